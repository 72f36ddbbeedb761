"""Tokenizer folders: ids, end ids from three files, chat templates in their sandbox."""

import json

import pytest

from dora_jax.models.tokenizer import BYTE_OF, Tokenizer
from tests.fakes.tokenizer_folder import folder

CHATML = """{%- for message in messages %}
    {%- if message.role == 'refuse' %}{{ raise_exception('no such role') }}{%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- generation %}{{ message.content }}{% endgeneration %}
    {{- '<|im_end|>' }}
{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def test_ids_are_those_of_the_text_and_back(tmp_path):
    tok = Tokenizer.load(folder(tmp_path))
    assert tok.encode("ab ba") == [5, 6, 7, 6, 5]  # the file's truncation to 3 is not applied
    assert tok.encode("<|im_start|>a<think>") == [2, 5, 4]
    assert tok.decode([2, 5, 4, 6, 1]) == "a<think>b"
    assert tok.decode([5, 3], keep_special=True) == "a<|im_end|>"
    assert (tok.vocab_size, tok.pad_id, tok.eos_ids) == (10, 0, (1,))


def test_the_bytes_of_a_token_are_those_that_it_stands_for(tmp_path):
    path = folder(tmp_path)
    raw = json.loads((path / "tokenizer.json").read_text())
    euro = list("€".encode())
    names = [next(char for char, byte in BYTE_OF.items() if byte == each) for each in euro]
    raw["model"]["vocab"] |= {name: 10 + i for i, name in enumerate(names)} | {"<0x0A>": 13}
    raw["decoder"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    (path / "tokenizer.json").write_text(json.dumps(raw))
    tokens = Tokenizer.load(path)
    assert [list(tokens.token_bytes(10 + i)) for i in range(3)] == [[byte] for byte in euro]
    assert tokens.token_bytes(5) == b"a" and tokens.token_bytes(13) == b"\n" and tokens.token_bytes(4) == b"<think>"


def test_vocab_size_counts_holes(tmp_path):
    path = folder(tmp_path)
    raw = json.loads((path / "tokenizer.json").read_text())
    raw["model"]["vocab"]["a"] = 99
    (path / "tokenizer.json").write_text(json.dumps(raw))
    assert Tokenizer.load(path).vocab_size == 100


@pytest.mark.parametrize(
    "files, eos, pad",
    [
        ({"generation_config": {"eos_token_id": [3, 1]}}, (3, 1), 0),
        ({"generation_config": {"eos_token_id": 3}, "config": {"eos_token_id": 2}}, (3, 2, 1), 0),
        ({"config": {"eos_token_id": None, "pad_token_id": 7}}, (1,), 0),
        ({"settings": {"eos_token": {"content": "<|im_end|>"}}, "config": {"pad_token_id": 7}}, (3,), 7),
        ({"settings": {}, "special_tokens_map": {"eos_token": "<|im_end|>"}}, (3,), 3),
    ],
)
def test_end_ids_are_the_union(files, eos, pad, tmp_path):
    tok = Tokenizer.load(folder(tmp_path, **files))
    assert (tok.eos_ids, tok.pad_id) == (eos, pad)


@pytest.mark.parametrize(
    "files, message",
    [
        ({"settings": {}}, "names no end token"),
        ({"settings": {"eos_token": "<end>"}}, "names eos_token '<end>', which its tokenizer.json does not hold"),
        ({"settings": {"eos_token": "<eos>", "chat_template": 5}}, "is a int, not a text"),
        (
            {"settings": {"eos_token": "<eos>", "chat_template": [{"name": "default", "template": 5}, 3]}},
            "is a int, not a text",
        ),
    ],
)
def test_a_folder_that_cannot_be_used_is_named(files, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        Tokenizer.load(folder(tmp_path, **files))
    assert str(tmp_path) in str(error.value)


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="tokenizer.json is missing"):
        Tokenizer.load(tmp_path)
    (folder(tmp_path) / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer.json is not a tokenizer"):
        Tokenizer.load(tmp_path)
    (folder(tmp_path) / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ValueError, match="tokenizer_config.json holds a JSON list, not an object"):
        Tokenizer.load(tmp_path)


MESSAGES = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]


@pytest.mark.parametrize("place", ["string", "named", "file"])
def test_chat_ends_where_the_assistant_begins(place, tmp_path):
    settings = {"eos_token": "<eos>"}
    if place == "string":
        settings["chat_template"] = CHATML
    if place == "named":
        settings["chat_template"] = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    if place == "file":
        settings["chat_template"] = "the file goes first"
        (tmp_path / "chat_template.jinja").write_text(CHATML)
    tok = Tokenizer.load(folder(tmp_path, settings=settings))
    turns = "<|im_start|>system\na<|im_end|>\n<|im_start|>user\nb<|im_end|>\n"
    assert tok.chat(MESSAGES) == turns + "<|im_start|>assistant\n"
    assert tok.chat(MESSAGES, add_generation_prompt=False) == turns
    with pytest.raises(ValueError, match="refused the messages: no such role"):
        tok.chat([{"role": "refuse", "content": ""}])


@pytest.mark.parametrize(
    "template, expected",
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "<é>"}]'),  # neither HTML nor ASCII escapes
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ bos_token }}{{ eos_token }}{{ extra }}", "<eos>7"),
        ("{{ 'clock' if strftime_now is defined else 'none' }}{{ tools is none }}", "noneTrue"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
    ],
)
def test_what_templates_count_on(template, expected, tmp_path):
    tok = Tokenizer.load(folder(tmp_path, settings={"eos_token": "<eos>", "chat_template": template}))
    assert tok.chat([{"role": "user", "content": "<é>"}], extra=7) == expected


def test_a_template_that_asks_for_the_day_is_given_one(tmp_path):
    """gpt-oss' template writes the date into every prompt; a prompt does not depend on when it is made."""
    template = "{{ strftime_now('%Y-%m-%d, %d %b') }}"
    tok = Tokenizer.load(folder(tmp_path, settings={"eos_token": "<eos>", "chat_template": template}))
    assert tok.chat(MESSAGES, strftime_now="2025-08-05") == "2025-08-05, 05 Aug"
    with pytest.raises(
        ValueError, match="it sees no clock: give it the day, strftime_now=2026-01-31 of the template's v"
    ):
        tok.chat(MESSAGES)
    with pytest.raises(ValueError, match="refused the messages: ValueError: Invalid isoformat string: 'today'"):
        tok.chat(MESSAGES, strftime_now="today")


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages[0].clear() }}"]
)
def test_templates_stay_in_their_sandbox(template, tmp_path):
    tok = Tokenizer.load(folder(tmp_path, settings={"eos_token": "<eos>", "chat_template": template}))
    with pytest.raises(ValueError, match="refused the messages"):
        tok.chat(MESSAGES)


def test_no_template_is_one_sentence(tmp_path):
    tok = Tokenizer.load(folder(tmp_path))
    with pytest.raises(ValueError, match="has no chat template: neither chat_template.jinja nor chat_template in"):
        tok.chat(MESSAGES)


def test_chat_as_transformers_renders_it(tmp_path):
    library = pytest.importorskip("transformers", reason="transformers is not installed: the other tests fix the text")
    settings = {"eos_token": "<eos>", "chat_template": CHATML, "tokenizer_class": "PreTrainedTokenizerFast"}
    path = folder(tmp_path, settings=settings)
    theirs = library.AutoTokenizer.from_pretrained(path)
    ours = Tokenizer.load(path)
    for prompt in (True, False):
        expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=prompt)
        assert ours.chat(MESSAGES, add_generation_prompt=prompt) == expected
    assert ours.encode(expected) == theirs.encode(expected, add_special_tokens=False)
