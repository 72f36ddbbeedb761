"""What every word and metric of a run means, and where it is healthy. `page()` is dora_jax/report/README.md.

A name may hold `*` for what a run chooses: a term, a task, a lag. Law: a metric that the program writes is here; a test
reads the names from the source.
"""

from __future__ import annotations

import fnmatch

from dora_jax.base import health

Meaning = tuple[str, str]  # (what it is, with its unit; where it is healthy, "" where nothing is known)

WORDS = {
    "version": "one immutable set of weights; 0 is the base, each published step makes the next",
    "step": "one trainer iteration: a batch of groups, one or several updates, one new version",
    "group": "one prompt with its G samples",
    "sample": "one answer; all of its tokens are of one version, except in mode `partial`",
    "instance": "one rollout engine, of one or several devices; `slots` samples decode in it at once",
    "lag": "versions between the one that sampled a group and the one that the step starts from",
    "idle": "share of the time in which a role had nothing to do: the trainer no batch, an instance no sample",
    "move": "a running sample goes on in another instance, at its version, with its KV",
    "load": "an instance takes a version's weights; samples of another version may run meanwhile",
    "adapter": "a low-rank addition to weights that stay; where `lora.rank` is set a version is one, and an instance "
    "holds several beside one base",
    "draft": "tokens that are guessed from a group's other samples and verified in one call (`rollout.drafts`)",
    "session": "a user's conversation with a run's endpoint, answered by one version; with `serving.train` it is a "
    "sample",
    "quarantine": "an instance whose log-probs are not finite, or disagree with the trainer's at the same version, is "
    "ended and made again; what it sampled and is not trained yet is sampled again elsewhere",
    "waiting for rollouts": "too few groups have finished sampling",
    "waiting for stragglers": "the longest answers of a version at its staleness bound hold everything up",
    "waiting for rewards": "sampled groups wait for their scores",
    "waiting for the trainer": "as many groups are ready or under way as staleness and load allow",
    "waiting for weights": "the version that is to be sampled next is not loaded yet",
    "waiting for evaluation": "held-out samples of a version take the slots",
    "waiting for a rollout instance": "none is up",
}

SHARED: dict[str, Meaning] = {
    "reward/mean": ("mean reward of the step's samples", "rises"),
    "reward/std": (
        "its standard deviation over samples",
        "above 0: groups whose samples all score alike teach nothing",
    ),
    "reward/term/*": ("mean of one term of the reward, over the samples that have it", "the terms that you want rise"),
}
METRICS: dict[str, Meaning] = SHARED | {
    "reward/solved_all": ("share of the groups whose samples are all right", "below 0.5, else prompts are too easy"),
    "reward/solved_none": (
        "share of the groups whose samples all score alike, at 0 or below",
        "below 0.5, else too hard",
    ),
    "response/length": ("mean tokens of a response", "moves slowly"),
    "response/length_max": ("longest response, tokens", "below rollout.max_new_tokens"),
    "response/truncated": ("share of the samples that ended at the length limit", "below 5 %"),
    "lag/mean": ("mean lag of the step's groups, versions", "below orchestrator.max_versions - 1"),
    "lag/max": ("largest lag", "at most orchestrator.max_versions - 1, which is asserted"),
    "lag/*": ("share of the groups of this lag", ""),
    "trainer/loss": ("the step's loss, a sum that its denominators have divided", "near 0; its size says little"),
    "trainer/grad_norm": ("norm of the gradient before clipping", "no sudden growth"),
    "trainer/entropy": ("entropy of the policy, nats a token", "falls slowly; near 0 nothing is explored any more"),
    "trainer/clip_fraction": ("share of the tokens that the objective clips", "below 0.2"),
    "trainer/ratio_mean": ("mean of exp(log-prob - anchor)", "0.9 to 1.1"),
    "trainer/ratio_max": ("largest ratio of a token", "no sudden growth"),
    "trainer/kl_anchor": ("KL of the policy to the anchor, nats a token", "below 0.1"),
    "trainer/kl_ref": ("KL of the policy to the reference, nats a token", "rises slowly"),
    "trainer/rejected_share": ("share of the tokens that the correction leaves out", "below 0.1"),
    "trainer/ess_share": ("effective samples by importance weights, of all", "above 0.5; 0.1 comes before a collapse"),
    "trainer/effective_batch": ("the same, in trajectories", ""),
    "trainer/lr_scale": ("what correction vcpo_lr multiplies the learning rate by", "near 1"),
    "trainer/value_loss": ("loss of the value model", "falls"),
    "trainer/value_grad_norm": ("norm of its gradient", "no sudden growth"),
    "trainer/tokens": ("response tokens trained on", ""),
    "trainer/updates_skipped": ("updates that were not finite and changed nothing", "0; three in a row end the run"),
    "trainer/learning_rate": ("of the step's last update", ""),
    "trainer/tokens_per_s": ("tokens trained on a second of computing", "steady"),
    "trainer/packed_share": ("share of the packed rows that holds tokens", "the higher the better"),
    "trainer/mfu": ("model FLOPs a second, of the devices' peak", "the higher the better"),
    "trainer/wait_s": ("the trainer had no batch, s", "small against trainer/step_s"),
    "trainer/step_s": ("the trainer worked, s", ""),
    "mismatch/mean": (
        "mean |log-prob of the trainer - of the engine| at equal weights, nats",
        "below 1e-3 in float32, 2e-2 in bfloat16",
    ),
    "mismatch/max": ("largest of a token", "below 1"),
    "mismatch/p99": ("its 99 % quantile", "below ten times the mean"),
    "mismatch/kl": ("KL of the engine to the trainer, nats a token", "below 1e-3"),
    "mismatch/tokens": ("tokens that it is measured on", "above 0"),
    "moe/load_max": ("load of the busiest expert, in units of the mean", "below 2"),
    "moe/load_min": ("of the least busy one", "above 0.2"),
    "moe/entropy": ("entropy of a router's scores, nats", "falls slowly"),
    "moe/dropped_share": ("tokens that an expert had no room for", "0"),
    "moe/replay_changed": ("replayed choices that the router would not make now", "below 0.1"),
    "groups/failed_share": ("groups without a score since this process began", "below task.max_failed_share"),
    "groups/filtered_share": (
        "share of the groups scored since the last step that are left out, since their samples score alike",
        "below 0.8",
    ),
    "groups/failed_length_p50": ("median length of their responses, tokens", ""),
    "groups/failed_length_p90": ("its 90 % quantile", ""),
    "prompts/skipped": ("prompts over rollout.max_prompt_tokens since this process began", ""),
    "prompts/skipped_share": ("their share", "below 5 %"),
    "rollout/tokens_per_s": ("tokens sampled a second, all instances together", "steady"),
    "rollout/idle_share": ("share of the instances' time without a sample", "below 20 %"),
    "versions/live": ("versions that samples still run at, or that are published", "at most orchestrator.max_versions"),
    "versions/stride": (
        "rollouts take every n-th version (`orchestrator.stride`)",
        "at most orchestrator.max_versions",
    ),
    "versions/side_by_side_share": ("share of the time in which samples of several versions ran", ""),
    "moves/total": ("moves of running samples so far", ""),
    "moves/finished": ("moved samples that have finished", ""),
    "reloads/total": ("loads of weights so far", "about instances times steps"),
    "drafts/acceptance": ("share of guessed tokens that hold, of late (`rollout.drafts`)", ""),
    "drafts/gain": (
        "by how much sooner a sample alone on its instance has its tokens with drafts; 1: not known, or no gain",
        "above 1",
    ),
    "lends/total": ("times that an instance of the trainer's devices was lent so far", ""),
    "lends/switch_s": (
        "expected of a switch to the rollouts and back, from those that were, s",
        "far below trainer/wait_s",
    ),
    "time/replay_s": ("the samples of a step scored by the engine's calls (rollout.exact), s", ""),
    "seconds/trainer/*": ("what the trainer's thread did in the step, s, waits by cause; adds up to time/step_s", ""),
    "seconds/instances/*": ("the same of the instances' threads, their mean", ""),
    "seconds/controller/*": ("the same of the controller's thread", ""),
    "time/step_s": ("from one published version to the next, s", "steady"),
    "time/run_s": ("since this process began, s", ""),
    "time/left_s": ("until the last step, from the newest steps' mean, s", ""),
    "task/share/*": ("share of a task of a mix in the groups trained on", "its weight, unless task.adaptive"),
    "task/reward/*": ("mean reward of a task in this step", "rises"),
    "sft/loss": ("of the warm start, nats a token", "falls"),
    "rewards/failed_share": ("groups that the reward workers could not score", "below task.max_failed_share"),
    "rewards/failed_length_p50": ("median length of their responses, tokens", ""),
    "rewards/failed_length_p90": ("its 90 % quantile", ""),
    "rewards/queued_groups": ("groups that wait for a score or are being scored", "does not grow"),
    "rewards/retries": ("samples that were scored again after an error", "near 0"),
    "environment/turns": ("turns that environments have answered", ""),
    "environment/turns_an_episode": ("mean of the episodes that ended", ""),
    "environment/observed_tokens": ("tokens that environments have answered with", ""),
    "environment/seconds_a_turn": ("mean time of an answer, s", "small against the sampling of a turn"),
    "environment/failed_share": ("episodes that failed, of those that ended", "below task.max_failed_share"),
    "environment/failed_*_to_*": ("failed episodes of a kind, by length", ""),
    "environment/retries": ("answers that were asked for again", "near 0"),
    "environment/redone": ("episodes that began anew, because their worker was lost", "near 0"),
    "environment/branches": ("episodes that went on from an earlier turn", ""),
    "environment/cut_share": (
        "episodes cut short: the chat template would rewrite earlier turns more often than `environment.branches`",
        "near 0; see `environment.branches`",
    ),
}
EVALUATION: dict[str, Meaning] = {
    "eval/accuracy": ("share of the held-out samples that count as solved, avg@k (`eval.solved`)", "rises"),
    "eval/accuracy_low": (
        "lower end of its 95 % interval: Wilson's, with the trials that the prompts' spread amounts to",
        "",
    ),
    "eval/accuracy_high": ("upper end", ""),
    "eval/pass_at_k": ("share of the prompts with at least one solved sample", "rises"),
    "eval/pass_at_k_low": ("lower end of its 95 % interval (Wilson)", ""),
    "eval/pass_at_k_high": ("upper end", ""),
    "eval/k": ("samples a prompt", ""),
    "eval/prompts": ("held-out prompts with a score", ""),
    "eval/failed": ("held-out prompts without one; not there where it is 0", "0"),
    "eval/response_length": ("mean tokens of a response", "moves slowly"),
} | {f"eval/{name}": meaning for name, meaning in SHARED.items()}
FIELDS = {
    "step": "the step, or the evaluated version",
    "waits": "how idle each role was in this step, and what it waited for longest",
}


def meaning(name: str) -> Meaning | None:
    """The meaning of a metric by its name; None: it is not in the legend."""
    known = METRICS | EVALUATION
    if name in known:
        return known[name]
    return next((known[pattern] for pattern in known if "*" in pattern and fnmatch.fnmatchcase(name, pattern)), None)


def page() -> str:
    """README.md of this folder."""
    head = (
        "# What a run shows\n\n"
        "`python -m dora_jax.report --workdir=DIR` writes one HTML page, `python -m dora_jax.top --workdir=DIR` shows "
        "a run live; both read [the workdir](../runtime/README.md#the-workdir), also from a bucket. This "
        "page is made of `legend.py`; `python tests/test_legend.py` writes it anew.\n\n"
        "The page opens with held-out prompts, each with its first answer before and after training; then come the "
        "verdict, the timeline, and curves. All other texts are in `samples/`, a row a group, of which the page shows "
        "the best and the worst answer of each step, and `dora_jax.samples(workdir, step=..., task=...)` returns all. "
        "`samples/` keeps within `monitor.samples_bytes`, whose oldest steps go, and `timeline.jsonl` within "
        "`monitor.log_bytes`; what is older is read from `timeline.1.jsonl`, and the page says so, for what was before "
        "that is gone. A damaged line is left out and counted.\n\n"
        "In a timeline each instance has a row, coloured by version; the height is the share of its slots in use. Grey "
        "is idle, hatched a load of weights, black a dead instance; lines are moves, dashed lines restarts of the run. "
        "In a sample's tokens green is a positive advantage, red a negative one, and the line below the token is the "
        "gap of the log-probs, trainer - engine, under the weights that the step starts from: at lag 0 it is error "
        "alone, at a higher lag the policy has moved too.\n"
        "\nSeconds of a step show what each thread did: the trainer's, every instance's, the controller's. Lanes "
        "overlap, so each adds up to the whole step for itself, its waits split by cause. `prefill` is a tick "
        "that brings prompts or KV to the device, and decodes beside it; `decode` and `verify` are ticks that do "
        "nothing else; `update` holds the collectives of gradients, which one program overlaps with its products, "
        "and of a trainer in processes of its own all that they do. Rewards and environments compute in other "
        "processes: `rewards` and `environments` are what the controller does for them. The same figures are in "
        "`metrics.jsonl` (`seconds/`), in `top`, and as counters in `trace.json`.\n"
    )  # fmt: skip
    words = "".join(f"| {word} | {meaning} |\n" for word, meaning in WORDS.items())
    fields = "".join(f"| `{name}` | {meaning} |  |\n" for name, meaning in FIELDS.items())
    return (
        f"{head}\n## Words\n\n| word | meaning |\n|---|---|\n{words}\n"
        "## Verdicts\n\nRules for the known ways in which runs die. What holds at the newest step stands first on the "
        "page, in `top` and in `/healthz`, and the console prints it where it begins. None is passed on the first "
        f"{health.SETTLING} steps, and none changes the run.\n\n{health.table()}\n"
        f"## metrics.jsonl, a row a step\n\n| name | meaning | healthy |\n|---|---|---|\n{fields}{_rows(METRICS)}\n"
        "## metrics.jsonl and evaluations/, a row an evaluation\n\n| name | meaning | healthy "
        f"|\n|---|---|---|\n{_rows(EVALUATION)}"
    )


def _rows(of: dict[str, Meaning]) -> str:
    escaped = {name: [text.replace("|", "\\|") for text in meaning] for name, meaning in of.items()}
    return "".join(f"| `{name}` | {what} | {healthy} |\n" for name, (what, healthy) in escaped.items())
