"""The report of a run: readable whatever the files hold, and right about what they say."""

import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest

from dora_jax.report import findings, timeline
from dora_jax.report.load import load
from dora_jax.report.page import page

ROOT = Path(__file__).parent.parent
UPLOT = "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"  # of uPlot 1.6.32, dist/uPlot.iife.min.js


def step(number, **more):
    return {"step": number, "reward/mean": 0.5, "lag/mean": 1.0, "lag/0": 0.25, "lag/1": 0.75, "lag/max": 1,
            "trainer/wait_s": 3.0, "trainer/step_s": 1.0, "rollout/idle_share": 0.1, "time/step_s": 4.0,
            "waits": "trainer idle 75%: waiting for stragglers; rollouts idle 10%: waiting for weights"} | more  # fmt: skip


def write(folder, name, rows):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_of(folder, steps=3, samples=()):
    folder.mkdir(exist_ok=True)
    evaluations = [{"step": 0, "eval/accuracy": 0.5, "eval/prompts": 50, "eval/k": 2, "eval/pass_at_k": 0.75}]
    write(folder, "metrics.jsonl", evaluations + [step(n) for n in range(1, steps + 1)])
    write(folder, "samples.jsonl", samples)
    (folder / "config.json").write_text(json.dumps({"orchestrator": {"mode": "dora"}}))
    (folder / "overrides.json").write_text("{}")
    return folder


class Text(HTMLParser):
    """The page as a reader without JavaScript has it."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.scripts, self.within = [], "", [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.within = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.within = ""

    def handle_data(self, data):
        if self.within == "script":
            self.scripts[-1] += data
        elif self.within != "style":
            self.text += data


def test_tables_and_sentences_are_readable_without_javascript(tmp_path):
    read = Text(page([load(run_of(tmp_path / "a"), "a")]))
    assert (
        "The trainer is idle for 75% of a step and rollout for 10%. The trainer waits mostly for stragglers."
        in read.text
    )
    assert "50.0%" in read.text and "36.6% to 63.4%" in read.text, "the accuracy and its interval"


def test_the_seconds_of_a_step_are_one_picture_with_its_figures_in_text(tmp_path):
    folder = run_of(tmp_path / "a")
    odd = [{"t": 1, "spent": 3, "step": 1}, {"t": 1, "spent": {"trainer": {"update": "x"}}, "step": 2, "seconds": None}]
    rows = [{"t": float(n), "step": n, "seconds": seconds, "spent": {
        "controller": {"waiting for the stages": seconds}, "trainer": {"update": 3 * seconds / 4, "waiting for <b>": seconds / 4},
        "0": {"decode": seconds}, "1": {"decode": seconds / 2, "load": seconds / 2}, "2": []}}
        for n, seconds in [(1, 99.0), (2, 7.0), (2, 2.0), (3, 6.0)]]  # fmt: skip
    write(folder, "timeline.jsonl", [*odd, *rows])
    html = page([load(folder, "a")])
    read = Text(html).text
    assert "trainer: 4 s of 4 s a step (100.0%)" in read and "Steps 2 to 3" in read and "0 to 6 s a step" in read
    for figure in ("update 3 s, 75.0%", "waiting for <b> 1 s, 25.0%", "decode 3 s, 75.0%", "load 1 s, 25.0%"):
        assert figure in read
    assert "<b>" not in html
    stacks = re.findall(r"<svg class=stack viewBox='0 0 (\d+) 100'.*?</svg>", html)
    assert stacks == ["2"] * 3
    assert "d='M0 75.00h1v25.00h-1zM1 25.00h1v75.00h-1z'" in html, "the bars of the trainer's updates"
    assert "no step tells where its time went" in page([load(run_of(tmp_path / "b"), "b")])


def test_what_a_later_start_changed_is_named_with_its_step(tmp_path):
    folder = run_of(tmp_path / "a")
    rows = [{"step": 2, "changed": {"rollout.slots": [64, 32], "task.path": ["", "<b>"]}}, {"step": 3, "changed": 7}]
    write(folder, "changes.jsonl", rows)
    text = page([load(folder, "a")])
    assert "Changed at step 2: rollout.slots 64 -&gt; 32, task.path &#x27;&#x27; -&gt; &lt;b&gt;." in text
    assert "changes.jsonl: 1 lines hold no row and are left out" in text


def test_nothing_that_a_run_wrote_is_markup(tmp_path):
    hostile = "</script><script>alert(1)</script><b>bold</b> \u202ertl\u2066 \u0000 \ud800"
    samples = [{"step": 1, "group": hostile, "version": 0, "prompt": hostile, "expected": hostile,
                "samples": [{"reward": float("nan"), "text": hostile, "tokens": 3, "finish": hostile,
                             "by_token": {"text": [hostile], "advantage": [float("nan")], "gap": [0.5]}}]}]  # fmt: skip
    folder = run_of(tmp_path / "a", samples=samples)
    plain = Text(page([load(run_of(tmp_path / "b"), "b")]))
    name = "</script><img src=x onerror=alert(1)>"
    text = page([load(folder, name)]).encode(errors="replace").decode()
    read = Text(text)
    assert read.tags.count("script") == plain.tags.count("script") and "img" not in read.tags and "b" not in read.tags
    assert "<b>bold</b>" in read.text, "it is shown as text"
    data = json.loads(read.scripts[0])
    assert data["runs"] == [name] and data["tokens"][0][0][1:] == [[None], [0.5]]
    shown = text + json.dumps(data, ensure_ascii=False)
    assert "<U+202E>rtl<U+2066>" in read.text and not set("\u202e\u2066") & set(shown), "no mark turns what follows"
    assert re.search(r"<pre dir=auto class=sample>", text), "a text's direction stays its own"


@pytest.mark.parametrize(
    "content", [b"", b"not json\n[1]\n\xff\xfe", b'{"step": "x", "t": "y"}\n{"t": NaN}\n{"busy": 3, "t": 1}\n']
)
def test_files_that_are_absent_empty_or_nonsense_never_fail_the_page(tmp_path, content):
    for name in ("metrics.jsonl", "timeline.jsonl", "samples.jsonl", "instances.json", "config.json"):
        (tmp_path / name).write_bytes(content)
    read = Text(page([load(tmp_path, "a")]))
    assert "No step has ended yet" in read.text and "overrides.json is not there" in read.text


def test_not_a_number_in_the_metrics_is_a_gap(tmp_path):
    write(run_of(tmp_path / "a"), "metrics.jsonl", [step(1), step(2, **{"reward/mean": float("nan")}), step(3)])
    data = json.loads(Text(page([load(tmp_path / "a", "a")])).scripts[0])
    assert data["curves"][0]["lines"][0]["values"] == [0.5, None, 0.5]


def test_a_group_that_was_issued_again_is_named_by_its_first_number(tmp_path):
    sample = {"reward": 1.0, "text": "7", "tokens": 1, "finish": "stop"}
    samples = [
        {"step": step, "group": id, "version": 0, "prompt": "3 + 4", "samples": [sample]}
        for step, id in enumerate((39, 100_000_040), 1)
    ]
    read = Text(page([load(run_of(tmp_path / "a", samples=samples), "a")])).text
    assert "step 1, group 39, version 0" in read and "step 2, group 40 (issued again), version 0" in read


def test_ten_thousand_samples_stay_below_two_megabytes(tmp_path):
    text = "an answer of some length " * 12
    samples = [{"step": n, "group": n, "version": n, "prompt": text, "expected": "1",
                "samples": [{"reward": 1.0, "text": text, "tokens": 80, "finish": "stop"}] * 2} for n in range(5000)]  # fmt: skip
    size = len(page([load(run_of(tmp_path / "a", steps=5000, samples=samples), "a")]).encode())
    assert size < 2_000_000, size


def by_token(n, length=40):
    return {"text": ["ab"] * length, "advantage": [1.0] * length, "gap": [0.001 * n] + [0.0] * (length - 1)}


def test_tokens_say_their_advantage_and_gap_and_stay_few(tmp_path):
    samples = [{"step": n, "group": n, "version": n, "prompt": "p", "expected": "1",
                "samples": [{"reward": 1.0, "text": "abab", "by_token": by_token(n)}] * 2} for n in range(3000)]  # fmt: skip
    text = page([load(run_of(tmp_path / "a", steps=3, samples=samples), "a")])
    read = Text(text)
    views = json.loads(read.scripts[0])["tokens"][0]
    assert len(views) == 60 and views[-1][2][0] > 2.0, "from the first steps to the last"
    assert "advantage 1 to 1; largest gap trainer - engine 0.1 at token 0 ('ab')" in read.text, "without JavaScript too"
    assert text.count("class=tokens") == 60 and len(text.encode()) < 600_000


@pytest.mark.parametrize("table", [3, {}, {"text": ["a"]}, {"text": ["a"], "advantage": [1], "gap": []},
                                   {"text": 1, "advantage": 2, "gap": 3}])  # fmt: skip
def test_tokens_that_do_not_fit_together_are_left_out(tmp_path, table):
    samples = [{"step": 1, "samples": [{"by_token": table, "text": "the text"}, 3]}, {"step": 2, "samples": 5}]
    text = page([load(run_of(tmp_path / "a", samples=samples), "a")])
    assert "the text" in text and "class=tokens" not in text


def test_several_runs_are_compared_and_their_differences_named(tmp_path):
    runs = [load(run_of(tmp_path / name), name) for name in ("a", "b")]
    runs[1].config = {"orchestrator": {"mode": "sync"}, "steps": 3}
    read = Text(page(runs))
    assert "fields that differ: 2" in read.text and "orchestrator.mode" in read.text
    lines = json.loads(read.scripts[0])["curves"][0]["lines"]
    assert [(line["label"], line["run"]) for line in lines] == [("a reward/mean", 0), ("b reward/mean", 1)]


def heldout(step, *answers):
    """Held-out groups of two samples each: (prompt, the first answer, whether it is solved)."""
    return [
        {"step": step, "kind": "heldout", "group": -1 - i, "version": step, "prompt": prompt, "expected": "4",
         "samples": [{"index": 0, "reward": float(solved), "text": text, "solved": solved}, {"text": "second", "solved": True}]}
        for i, (prompt, text, solved) in enumerate(answers)
    ]  # fmt: skip


def stored(folder, name, rows):
    (folder / "samples").mkdir(exist_ok=True)
    write(folder / "samples", name, rows[::-1])


def test_the_page_opens_with_held_out_prompts_before_and_after(tmp_path):
    folder = run_of(tmp_path / "a")
    before = [(f"2 + {i} =", f"first {i}", i < 2) for i in range(30)]
    after = [(prompt, text.replace("first", "last"), i != 1) for i, (prompt, text, _) in enumerate(before)]
    between = [(prompt, "between", False) for prompt, _, _ in before]
    stored(folder, "00000000.jsonl", heldout(0, *before) + heldout(2, *between))
    others = heldout(4, *after) + heldout(4, ("of another turn", "a", True))
    stored(folder, "00000009.jsonl", others + [{"step": 3, "kind": "filtered", "samples": []}])
    (folder / "config.json").write_text(json.dumps({"monitor": {"samples_bytes": 2**30}}))
    text = page([load(folder, "a")])
    read = Text(text).text
    assert "Solved: 1 before and after, 28 only after, 1 only before, 0 neither." in read
    assert "before: version 0; reward 1, solved" in read and "after: version 4; reward 0last 1" in read
    pairs = re.findall(r"<pre dir=auto class=sample>(first|last|between|second) ?(\d*)</pre>", text)
    assert pairs == [(when, str(i)) for i in range(24) for when in ("first", "last")], (
        "in their order, and side by side"
    )
    assert "30 prompts" in read and "21 more prompts" in read
    assert "Groups in the workdir: 1 filtered, 90 held-out" in read and "of a budget of 1,024 MiB" in read
    places = [text.index(f"<h2>{name}") for name in ("Held-out", "Health", "Timeline", "Curves", "Summary")]
    assert text.index("class='verdict well'") < places[0] and places == sorted(places)


def test_one_evaluation_alone_and_none_are_named_as_such(tmp_path):
    folder = run_of(tmp_path / "a")
    assert "a: the workdir has no answer to a held-out prompt." in Text(page([load(folder, "a")])).text
    stored(folder, "0.jsonl", heldout(0, ("2 + 2 =", "4", True)))
    read = Text(page([load(folder, "a")])).text
    assert (
        "each prompt was evaluated once, 1 in all" in read
        and "version 0; reward 1, solved" in read
        and "Solved:" not in read
    )


def test_a_workdir_in_a_bucket_reads_as_a_folder_does(tmp_path):
    run_of(tmp_path / "a")
    stored(tmp_path / "a", "00000000.jsonl", heldout(0, ("2 + 2 =", "4", True)))
    stored(tmp_path / "a", "00000001.jsonl", [{"step": 1, "samples": [{"text": "of a step", "reward": 1.0}]}])
    assert "of a step" in page([load(tmp_path / "a", "a")])
    assert page([load(f"file://{tmp_path}/a", "a")]) == page([load(tmp_path / "a", "a")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty holds no run"):
        load(f"file://{tmp_path}/empty", "a")


def test_the_interval_of_a_curve_counts_groups_and_prompts(tmp_path):
    folder = run_of(tmp_path / "a")
    (folder / "config.json").write_text(json.dumps({"orchestrator": {"groups_per_step": 4}}))
    evaluated = {"step": 4, "eval/accuracy": 0.5, "eval/accuracy_low": 0.25, "eval/accuracy_high": 0.75}
    write(folder, "metrics.jsonl", [step(1, **{"reward/std": 0.5}), step(2), evaluated])
    reward, accuracy = json.loads(Text(page([load(folder, "a")])).scripts[0])["curves"][:2]
    assert reward["lines"][0]["low"] == [pytest.approx(0.5 - 1.96 * 0.25), None]
    assert (accuracy["lines"][0]["low"], accuracy["lines"][0]["high"]) == ([0.25], [0.75]), "as the run wrote it"


def test_a_page_without_data_is_small(tmp_path):
    assert len(page([load(run_of(tmp_path / "a", steps=1), "a")]).encode()) < 400_000


def test_the_timeline_names_versions_loads_deaths_and_moves():
    rows = [{"t": 10.0, "start": True}, {"t": 10.0, "up": 0, "slots": 8}, {"t": 10.0, "up": 1, "slots": 8},
            {"t": 10.0, "load": 0, "version": 0}, {"t": 11.0, "loaded": 0, "version": 0},
            {"t": 11.5, "busy": {"0": {"0": 8}}}, {"t": 12.0, "busy": {"0": {"0": 4, "1": 4}}}, {"t": 12.0, "train": 0},
            {"t": 13.0, "moves": [[0, 1, 3]]}, {"t": 13.0, "busy": {"0": {}, "1": {"0": 4}}},
            {"t": 13.0, "published": 1}, {"t": 14.0, "down": 1, "reason": "killed"}, {"t": 15.0, "busy": {}}]  # fmt: skip
    picture = timeline.bars(rows)
    first, second = picture["instances"]
    assert first["bars"] == [[0, 1000, -1, []], [1000, 1500, 0, []], [1500, 2000, 16, [[0, 8]]],
                             [2000, 3000, 16, [[0, 4], [1, 4]]], [3000, 5000, 0, []]]  # fmt: skip
    assert second["bars"] == [[0, 3000, 0, []], [3000, 4000, 8, [[0, 4]]], [4000, 5000, -2, []]]
    assert picture["trainer"] == [[0, 2000, 0, []], [2000, 3000, 16, [[1, 1]]], [3000, 5000, 0, []]]
    assert picture["moves"] == [[3000, 0, 1, 3]]
    used = picture["usage"][0]
    assert (used.up_s, used.idle_s, used.loading_s, used.longest_idle_s, used.deaths) == (5.0, 2.5, 1.0, 2.0, 0)
    assert picture["usage"][1].deaths == 1 and picture["steps"] == [[3000, 1]]


def test_what_a_killed_process_did_ends_with_its_last_row():
    rows = [{"t": 0.0, "start": True}, {"t": 0.0, "up": 0, "slots": 2}, {"t": 1.0, "busy": {"0": {"0": 2}}},
            {"t": 1.0, "train": 0}, {"t": 2.0, "busy": {}}, {"t": 9.0, "start": True}, {"t": 10.0, "up": 0, "slots": 2},
            {"t": 11.0, "busy": {"0": {"1": 2}}}, {"t": 12.0, "busy": {}}]  # fmt: skip
    picture = timeline.bars(rows)
    assert picture["instances"][0]["bars"] == [
        [0, 1000, 0, []], [1000, 2000, 16, [[0, 2]]], [2000, 10000, -2, []], [10000, 11000, 0, []],
        [11000, 12000, 16, [[1, 2]]],
    ]  # fmt: skip
    assert picture["trainer"][1:] == [[1000, 2000, 16, [[1, 1]]], [2000, 9000, -2, []], [9000, 12000, 0, []]]
    assert picture["restarts"] == [9000]


def test_a_thousand_instances_and_fifty_versions_stay_small():
    rows = [{"t": 0.0, "up": i, "slots": 8} for i in range(1000)]
    rows += [{"t": 1.0 + v, "busy": {str(i): {str(v): 8} for i in range(1000)}} for v in range(50)]
    picture = timeline.bars(rows)
    assert (
        picture["count"] == 1000 and len(json.dumps(picture["instances"])) < 500_000 and len(picture["usage"]) == 1000
    )


@pytest.mark.parametrize(
    "wait, idle, waits, message",
    [
        (0.0, 0.5, "rollouts idle 50%: waiting for the trainer", "The trainer is the bottleneck"),
        (3.0, 0.1, "trainer idle 75%: waiting for rewards", "task.reward_workers"),
        (0.02, 0.01, "", "Neither role waits"),
        (1.0, 0.5, "", "Both roles wait"),
    ],
)
def test_the_bottleneck_is_named_with_what_to_change(wait, idle, waits, message):
    rows = [step(n, **{"trainer/wait_s": wait, "rollout/idle_share": idle, "waits": waits}) for n in range(4)]
    assert message in findings.bottleneck(rows)


def test_lengths_that_are_left_out_of_training_are_found():
    made = {bucket: 1000 for bucket in range(10)}
    assert "follow" in findings.length_bias({"generated": made, "trained": made})[2]
    short = {bucket: 1000 for bucket in range(8)}
    distance, limit, message = findings.length_bias({"generated": made, "trained": short})
    assert distance == pytest.approx(0.2) and distance > limit and "differ" in message


def test_an_instance_that_emits_no_numbers_is_named(tmp_path):
    rows = {i: {"tokens": 100.0, "logprob_sum": -20.0, "nonfinite": 0.0} for i in range(3)}
    rows[1]["nonfinite"] = 7.0
    data = load(run_of(tmp_path / "a"), "a")
    data.instances = rows
    assert findings.suspicious(data) == {1: "7 log-probs are not finite"}


def test_the_vendored_library_is_the_published_one():
    assets = resources.files("dora_jax.report").joinpath("assets")
    assert hashlib.sha256(assets.joinpath("uPlot.iife.min.js").read_bytes()).hexdigest() == UPLOT
    assert "MIT License" in assets.joinpath("uPlot.LICENSE").read_text()


def test_the_command_writes_the_page_and_refuses_what_is_no_workdir(tmp_path):
    run_of(tmp_path / "a")

    def report(*workdirs):
        command = [sys.executable, "-m", "dora_jax.report", *(f"--workdir={workdir}" for workdir in workdirs)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    done = report(tmp_path / "a")
    assert done.returncode == 0 and (tmp_path / "a/report.html").exists(), done.stderr
    refused = report(tmp_path / "nothing")
    assert refused.returncode == 2 and "is no folder" in refused.stderr and "Traceback" not in refused.stderr
    (tmp_path / "empty").mkdir()
    refused = report(tmp_path / "empty")
    assert refused.returncode == 2 and refused.stderr == f"error: {tmp_path / 'empty'} holds no run\n"
    run_of(tmp_path / "b")
    assert report(tmp_path / "a", tmp_path / "b").returncode == 0
    assert '"b reward/mean"' in (tmp_path / "a/report.html").read_text(), "neither run is dropped"
