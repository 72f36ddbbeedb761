"""Rows of your own: reading, quarantine, the split, epochs."""

import json
import logging
import random
from pathlib import Path

import pytest

from dora_jax import tasks
from dora_jax.config import ConfigError, TaskSection
from dora_jax.tasks.prompts import PromptTooLong, Wording
from dora_jax.tasks.rows import RowsSource, permuted
from dora_jax.tasks.source import uid_of
from tests.fakes.tasks import Letters, sums, write


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def opened(
    path, folder, *, heldout=20, seed=0, limit=100, supervised=False, exclude=frozenset(), tokenizer=None, **section
):
    return tasks.open_task(
        TaskSection(name="rows", path=str(path), **section),
        tokenizer or Letters(),
        seed=seed,
        max_prompt_tokens=limit,
        max_new_tokens=8,
        heldout=heldout,
        quarantine_path=folder / "run" / "quarantine.jsonl",
        supervised=supervised,
        exclude=exclude,
    )


# ---------------------------------------------------------------- bad rows


def test_three_bad_rows_in_five_hundred_are_quarantined_and_the_run_goes_on(folder, caplog):
    rows = sums(500)
    rows[6] = '{"prompt": "1+1=", "answer": '
    rows[99] = {"prompt": "1+1="}
    rows[498] = {"prompt": 7, "answer": "7"}
    with caplog.at_level(logging.WARNING):
        task = opened(write(folder / "rows.jsonl", rows), folder)
    received = [json.loads(line) for line in (folder / "run" / "quarantine.jsonl").read_text().splitlines()]
    assert [(bad["line"], bad["reason"]) for bad in received] == [
        (7, "not a JSON object in UTF-8"),
        (100, "answer is missing"),
        (499, "prompt is neither a text nor a list of messages"),
    ]
    assert received[1]["row"] == '{"prompt": "1+1="}'
    assert "3 of 500 rows" in caplog.text and "line 7" in caplog.text
    assert {task.prompt_at(g).uid for g in range(477)} | task.heldout_uids == {
        uid_of(row["prompt"]) for row in sums(500) if row["id"] not in (6, 99, 498)
    }


def test_above_the_limit_the_run_stops_and_says_where_the_rows_are(folder):
    rows = sums(500)
    for i in range(6):
        rows[i * 7] = "nonsense"
    path = write(folder / "rows.jsonl", rows)
    received = r"6 of 500 rows of .*rows.jsonl are bad; the first: line 1: .*max_bad_rows_share"
    with pytest.raises(ValueError, match=received) as error:
        opened(path, folder)
    assert str(folder / "run" / "quarantine.jsonl") in str(error.value)
    assert len((folder / "run" / "quarantine.jsonl").read_text().splitlines()) == 6
    opened(path, folder, max_bad_rows_share=0.02)


def test_a_clean_file_leaves_no_quarantine_of_an_earlier_run(folder):
    (folder / "run").mkdir()
    (folder / "run" / "quarantine.jsonl").write_text("old")
    opened(write(folder / "rows.jsonl", sums(50)), folder)
    assert not (folder / "run" / "quarantine.jsonl").exists()


@pytest.mark.parametrize(
    "row, reason",
    [
        ("[1, 2]", "a list, not an object"),
        ('{"prompt": "\\ud800", "answer": 1}', "surrogates"),
        ('{"prompt": "a", "answer": NaN}', "answer cannot be written as JSON"),
        ('{"prompt": "  ", "answer": 1}', "prompt is empty"),
        ('{"answer": 1}', "prompt is missing"),
        ('{"prompt": "a", "answer": 1, "task": 3}', "task is not a text"),
        ('{"prompt": "a", "answer": 1, "id": [3]}', "id is neither"),
        ('{"prompt": "a", "answer": 1, "completion": 3}', "completion is not a text"),
        ('{"prompt": [], "answer": 1}', "neither a text nor a list of messages"),
        ('{"prompt": [{"role": "user"}], "answer": 1}', "lacks a text role or content"),
        ('{"prompt": [{"role": "user", "content": "a"}], "answer": 1}', 'needs task.template = "chat"'),
        ("[" * 100_000, "not a JSON object"),
    ],
)
def test_each_kind_of_bad_row_is_named(folder, row, reason):
    path = write(folder / "rows.jsonl", [*sums(5), row])
    opened(path, folder, heldout=2, max_bad_rows_share=0.5)
    assert reason in json.loads((folder / "run" / "quarantine.jsonl").read_text())["reason"]


def prompts_of(task, n=3):
    return sorted((p.text, p.answer) for p in map(task.prompt_at, range(n)))


def test_csv_and_json_hold_rows_too(folder):
    (folder / "a.csv").write_text('\ufeffprompt,answer\n"1, 2",3\n\nb,4\nshort\nc,5,long\nd,6\n', encoding="utf-8")
    task = opened(folder / "a.csv", folder, heldout=1, max_bad_rows_share=0.5)
    assert {row.question for row in task.source.heldout} | {p for p, _ in prompts_of(task)} == {"1, 2", "b", "d"}
    bad = [json.loads(line) for line in (folder / "run" / "quarantine.jsonl").read_text().splitlines()]
    assert [(row["line"], row["row"]) for row in bad] == [(5, "short,None"), (6, "c,5,['long']")]
    rows = [{"prompt": name, "answer": 1} for name in "abcd"]
    (folder / "list.json").write_text(json.dumps(rows, indent=1))
    (folder / "lines.json").write_text("\n".join(map(json.dumps, rows)) + "\n")
    of_list, of_lines = (opened(folder / name, folder, heldout=1) for name in ("list.json", "lines.json"))
    assert prompts_of(of_list) == prompts_of(of_lines) != []


def test_columns_of_any_name_may_be_prompt_and_answer_nested_ones_too(folder):
    rows = [{"question": f"{i}?", "gold": {"value": i}, "level": "easy", "day": float("nan")} for i in range(9)]
    path = write(folder / "rows.jsonl", rows)
    task = opened(path, folder, heldout=3, prompt_column="question", answer_column="gold.value")
    prompt = task.prompt_at(0)
    assert prompt.text == f"{prompt.answer}?"
    assert dict(prompt.row) == {"question": prompt.text, "gold": {"value": prompt.answer}, "level": "easy"}
    received = "9 of 9 rows .* prompt is missing; the row has question, gold, level, day .task.prompt_column"
    with pytest.raises(ValueError, match=received):
        opened(path, folder, heldout=3)
    with pytest.raises(ValueError, match="line 1: answr is missing"):
        opened(path, folder, heldout=3, prompt_column="question", answer_column="answr")
    assert opened(path, folder, heldout=3, prompt_column="question").prompt_at(0).answer is None  # no row has one


def test_shards_of_a_split_are_read_together_and_several_splits_are_named(folder):
    for split, shards in (("train", 2), ("test", 1)):
        for i in range(shards):
            name = f"{split}-{i:05}-of-{shards:05}.jsonl"
            write(folder / name, sums(5, start=5 * i + 20 * (split == "test")))
    task = opened(folder / "train", folder, heldout=2)
    assert {p.answer for p in map(task.prompt_at, range(8))} <= {str(2 * i) for i in range(10)}
    assert len(task.heldout_uids | {task.prompt_at(g).uid for g in range(8)}) == 10
    with pytest.raises(ValueError, match="may mean .*/test, .*/train; name one of them"):
        opened(folder, folder, heldout=2)
    with pytest.raises(ValueError, match="may mean .*/test, .*/train; name one of them"):
        opened(folder / "t", folder, heldout=2)
    (folder / "train-00001-of-00002.jsonl").unlink()
    with pytest.raises(ValueError, match="train has 1 of its 2 shards"):
        opened(folder / "train", folder, heldout=2)


def test_a_system_message_and_variables_reach_the_chat_template(folder):
    talk = [{"role": "system", "content": "own"}, {"role": "user", "content": "d"}]
    rows = [*({"prompt": name, "answer": 1} for name in "abc"), {"prompt": talk, "answer": 1}]
    chat = {"template": "chat", "system": "Be brief.", "template_kwargs": {"think": False}}
    task = opened(write(folder / "rows.jsonl", rows), folder, heldout=1, tokenizer=Chatty(), **chat)
    prompts = {task.prompt_at(g).text for g in (-1, 0, 1, 2)}
    output = {f"think=False <system>Be brief.<user>{name}<assistant>" for name in "abc"}
    assert prompts == output | {"think=False <system>own<user>d<assistant>"}
    assert task.messages_at(-1)[0]["role"] == "system"
    ends = {"prompt": [{"role": "user", "content": "d"}, {"role": "assistant", "content": "e"}], "answer": 1}
    opened(
        write(folder / "rows.jsonl", [*rows, ends]),
        folder,
        heldout=1,
        max_bad_rows_share=0.5,
        **chat | {"template_kwargs": {}},
    )
    assert "ends with a message of the assistant" in (folder / "run" / "quarantine.jsonl").read_text()


class Chatty(Letters):
    def chat(self, messages, **variables):
        return " ".join(f"{name}={value} " for name, value in variables.items()) + super().chat(messages)


def test_bytes_that_are_no_utf8_are_a_bad_row(folder):
    path = folder / "rows.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a", "answer": 1}\n{"prompt": "b\xff", "answer": 1}\n\n{"prompt": "c", "answer": 1}\n'
    )
    opened(path, folder, heldout=1, max_bad_rows_share=0.5)
    assert json.loads((folder / "run" / "quarantine.jsonl").read_text())["line"] == 2


def test_files_beyond_reading_stop_with_a_sentence(folder):
    whole = write(folder / "rows.jsonl", sums(50))
    cut = folder / "cut.jsonl"
    cut.write_bytes(Path(whole).read_bytes()[:-9])
    (folder / "rows.tsv").write_text("a")
    (folder / "list.json").write_text('[{"prompt": "a"')
    (folder / "quote.csv").write_text('prompt,answer\n"a" b,1\n')
    (folder / "empty.jsonl").write_text("")
    (folder / "zip.jsonl").write_bytes(random.Random(0).randbytes(5000) + b"\n")
    for path, sentence in [
        (cut, "cut.jsonl is truncated: its last line, 50"),
        ("absent.jsonl", "absent.jsonl is neither a file of rows nor a folder of them"),
        (folder / "rows.tsv", "none of .jsonl, .json, .csv, .parquet"),
        (folder / "list.json", "list.json is not whole JSON"),
        (folder / "quote.csv", "quote.csv is not a CSV file"),
        (folder / "empty.jsonl", "has no rows"),
        (folder / "zip.jsonl", "rows of .* are bad"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            opened(path, folder)


def test_a_last_line_without_newline_is_fine_when_whole(folder):
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in sums(50)))
    assert opened(path, folder).n_heldout == 20


def test_parquet_reads_like_jsonl_and_a_truncated_one_stops(folder):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(sums(50)), folder / "rows.parquet")
    one = opened(folder / "rows.parquet", folder)
    two = opened(write(folder / "rows.jsonl", sums(50)), folder)
    assert [one.prompt_at(g).text for g in range(-20, 30)] == [two.prompt_at(g).text for g in range(-20, 30)]
    chats = [{"prompt": [{"role": "user", "content": str(i)}], "answer": i} for i in range(5)]
    parquet.write_table(pyarrow.Table.from_pylist(chats), folder / "chat.parquet")
    assert opened(folder / "chat.parquet", folder, heldout=1, template="chat").prompt_at(0).text.startswith("<user>")
    data = (folder / "rows.parquet").read_bytes()
    for name, broken in (("cut", data[:-20]), ("text", b"prompt,answer\n"), ("empty", b"")):
        (folder / f"{name}.parquet").write_bytes(broken)
        with pytest.raises(ValueError, match=f"{name}.parquet is not a whole parquet file"):
            opened(folder / f"{name}.parquet", folder)


# ---------------------------------------------------------------- the split and epochs


def test_duplicates_never_cross_the_split(folder):
    rows = sums(60) * 3 + [{"prompt": row["prompt"].replace("+", " +  "), "answer": 0} for row in sums(10)]
    random.Random(0).shuffle(rows)
    task = opened(write(folder / "rows.jsonl", rows), folder)
    heldout = {task.prompt_at(-1 - i).uid for i in range(20)}
    training = {task.prompt_at(g).uid for g in range(1000)}
    assert len(heldout) == 20 and not training & heldout and len(training | heldout) == 70


def test_the_split_does_not_depend_on_the_order_of_the_file_or_the_seed(folder):
    one = opened(write(folder / "a.jsonl", sums(100)), folder)
    two = opened(write(folder / "b.jsonl", sums(100)[::-1]), folder, seed=5)
    assert one.heldout_uids == two.heldout_uids


def test_an_epoch_meets_each_row_once_and_the_next_in_another_order(folder):
    task = opened(write(folder / "rows.jsonl", sums(100)), folder)
    epochs = [[task.prompt_at(80 * epoch + i).text for i in range(80)] for epoch in range(3)]
    assert all(len(set(epoch)) == 80 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and set(epochs[0]) == set(epochs[2])
    again = opened(folder / "rows.jsonl", folder)
    assert [again.prompt_at(g).text for g in (239, 0, 80)] == [epochs[2][79], epochs[0][0], epochs[1][0]]
    assert [opened(folder / "rows.jsonl", folder, seed=1).prompt_at(g).text for g in range(80)] != epochs[0]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 1000])
def test_permuted_is_a_permutation(n):
    assert sorted(permuted(i, n, "train", 3) for i in range(n)) == list(range(n))


def test_heldout_rows_of_their_own_are_never_trained_on(folder):
    train = write(folder / "train.jsonl", sums(60))
    test = write(folder / "test.jsonl", sums(30, start=50) + sums(3, start=50))
    task = opened(train, folder, heldout_path=test, heldout=25)
    assert [task.prompt_at(-1 - i).text for i in range(25)] == [row["prompt"] for row in sums(25, start=50)]
    assert {task.prompt_at(g).text for g in range(50)} == {row["prompt"] for row in sums(50)}
    with pytest.raises(ValueError, match=r"test.jsonl has 30 distinct prompts, and task.heldout = 31"):
        opened(train, folder, heldout_path=test, heldout=31)
    with pytest.raises(ValueError, match="no prompt left to train on"):
        opened(train, folder, heldout=60)


def test_rows_of_messages_tasks_and_answers(folder):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2"}]
    rows = [{"prompt": messages, "answer": {"value": [4]}, "task": "sum", "info": "ignored"}] + sums(3)
    task = opened(write(folder / "rows.jsonl", rows), folder, heldout=1, template="chat")
    prompts = {p.text: p for p in map(task.prompt_at, range(-1, 3))}
    prompt = prompts["<system>be brief<user>2+2<assistant>"]
    assert prompt.task == "sum" and prompt.answer == {"value": [4]}
    assert prompts["<user>1+1=<assistant>"].task == "rows"  # the file's name
    with pytest.raises(ValueError, match="task.extract does not apply"):
        opened(folder / "rows.jsonl", folder, heldout=1, template="chat", extract="(.*)")


def test_the_warm_start_reads_completions_and_leaves_the_main_task_s_heldout_alone(folder):
    main = opened(write(folder / "main.jsonl", sums(50)), folder)
    rows = [{"prompt": row["prompt"], "completion": f"it is {row['answer']}"} for row in sums(40)] + sums(10, start=40)
    path = write(folder / "sft.jsonl", rows)
    with pytest.raises(ValueError, match="40 of 50 rows"):
        opened(path, folder, heldout=0)
    task = opened(path, folder, heldout=0, supervised=True, exclude=main.heldout_uids)
    pairs = dict(task.worked(i) for i in range(30))
    assert len(pairs) == 30
    assert not {uid_of(text) for text in pairs} & main.heldout_uids
    assert set(pairs.values()) <= {row["completion"] for row in rows if "completion" in row} | {
        row["answer"] for row in rows if "answer" in row
    }


def test_rows_cannot_be_scored_by_a_dataset(folder):
    with pytest.raises(ConfigError, match="scores reasoning-gym datasets"):
        opened(write(folder / "rows.jsonl", sums(50)), folder, rewards=(tasks.GYM_REWARD,))
    opened(folder / "rows.jsonl", folder, rewards=(tasks.GYM_REWARD,), supervised=True)  # nothing is scored there


def test_a_row_over_the_limit_raises(folder):
    task = opened(write(folder / "rows.jsonl", [*sums(30), {"prompt": "x" * 200, "answer": 1}]), folder, heldout=1)
    with pytest.raises(PromptTooLong, match="has 200 tokens"):
        for group in range(30):
            task.prompt_at(group)


def test_a_name_that_no_console_can_print_is_spelt_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": 1}\n{"\\ud800": "b", "answer": 2}\n')
    section = TaskSection(name="rows", path=str(path), heldout=0, max_bad_rows_share=0.5)
    wording = Wording(section, None)
    source = RowsSource(
        section, wording, heldout=0, exclude=frozenset(), supervised=False, quarantine_path=tmp_path / "bad.jsonl"
    )
    assert "the row has \\ud800, answer" in source.bad[0].reason
