"""Chat templates and regular expressions that raise, never end or ask for all memory: one sentence, in time."""

import json
import threading

import pytest

from dora_jax import tasks
from dora_jax.config import ConfigError, SftSection, TaskSection
from dora_jax.models.tokenizer import Tokenizer
from dora_jax.runtime.training import warm_start_data
from dora_jax.tasks.sandbox import render
from tests.fakes.tokenizer_folder import folder

MESSAGES = [{"role": "user", "content": "b"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"


def with_template(path, template):
    return Tokenizer.load(folder(path, settings={"eos_token": "<eos>", "chat_template": template}))


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(render, "RENDER_S", 0.5)


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{{ 1 / (messages | length - 1) }}", "refused the messages: ZeroDivisionError: division by zero"),
        (
            "{{ messages[0].content + 1 }}",
            'refused the messages: TypeError: can only concatenate str (not "int") to str',
        ),
        (
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "refused the messages: RecursionError: maximum recursion depth",
        ),
        ("{{ messages[0].content * 4000000000 }}", "refused the messages: MemoryError"),
        ("{{ nothing.at_all }}", "refused the messages: 'nothing' is undefined"),
        ("{% for %}", "does not compile: Expected an expression"),
    ],
)
def test_a_template_that_raises_is_one_sentence_and_the_next_text_comes(template, reason, tmp_path):
    tokenizer = with_template(tmp_path, template)
    for _ in range(2):
        with pytest.raises(ValueError) as error:
            tokenizer.chat(MESSAGES)
        assert str(error.value).startswith(f"the chat template of {tmp_path} {reason}")
        assert not isinstance(error.value, render.NeverEnds)


@pytest.mark.parametrize("template", [ENDLESS, "{{ 9 ** (9 ** 9) }}"])  # as it runs, as it is compiled
def test_a_template_that_never_ends_is_cut_off(template, tmp_path, short):
    with pytest.raises(render.NeverEnds, match=f"^the chat template of {tmp_path} took over 0.5 s$"):
        with_template(tmp_path, template).chat(MESSAGES)


def test_a_text_that_never_comes_does_not_stop_the_next(tmp_path, short):
    tokenizer = with_template(tmp_path, "{% if messages[0].content == 'endless' %}" + ENDLESS + "{% endif %}ok")
    with pytest.raises(render.NeverEnds):
        tokenizer.chat([{"role": "user", "content": "endless"}])
    render.RENDER_S = 60.0
    assert tokenizer.chat(MESSAGES) == "ok"


def test_threads_share_a_tokenizer(tmp_path):
    tokenizer = with_template(tmp_path, "{{ messages[0].content }}")
    seen = {}

    def ask(i):
        seen[i] = [tokenizer.chat([{"role": "user", "content": f"{i} {j}"}]) for j in range(50)]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {i: [f"{i} {j}" for j in range(50)] for i in range(4)}


def rows_task(tmp_path, prompts, **section):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": p, "answer": "1"}) + "\n" for p in prompts))
    tokenizer = with_template(tmp_path, section.pop("chat", "x"))
    section = TaskSection(name="rows", path=str(tmp_path / "rows.jsonl"), heldout=1, **section)
    return tasks.open_task(
        section,
        tokenizer,
        seed=0,
        max_prompt_tokens=99,
        max_new_tokens=9,
        heldout=1,
        quarantine_path=tmp_path / "quarantine.jsonl",
    )


def test_an_expression_that_never_ends_names_itself_and_the_prompt(tmp_path, short):
    with pytest.raises(ConfigError) as error:
        rows_task(tmp_path, ["a", "a" * 40 + "b", "aa"], extract="^((?:a+)+)$")
    reason = str(error.value)
    assert reason.startswith("task.extract '^((?:a+)+)$' took over 0.5 s, on the prompt 'aaaa") and "\n" not in reason


def test_a_template_that_refuses_a_row_names_field_folder_and_prompt(tmp_path):
    with pytest.raises(ConfigError) as error:
        rows_task(tmp_path, ["a", "b", "ab"], template="chat", chat="{{ raise_exception('no such role') }}")
    assert str(error.value).startswith(
        f"task.template: the chat template of {tmp_path} refused the messages: no such role, on the prompt '"
    )


def test_a_warm_start_without_a_base_has_no_chat_template(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "1"}\n')
    section = TaskSection(name="rows", path=str(tmp_path / "rows.jsonl"), heldout=1, template="chat")
    with pytest.raises(
        ConfigError, match="^task.template: the tokenizer that the warm start makes has no chat template"
    ):
        tasks.open_task(
            section,
            warm_start_data.tokenizer_of(SftSection()),
            seed=0,
            max_prompt_tokens=99,
            max_new_tokens=9,
            heldout=1,
            quarantine_path=tmp_path / "quarantine.jsonl",
        )
