"""The edge between a ConfigDict and the frozen dataclasses: types, defaults, rules, secrets."""

import dataclasses
import difflib
import json
import random
import typing

import ml_collections
import pytest

from dora_jax import config as configs
from dora_jax.base.config_tree import nearest, redact
from dora_jax.config import Config, ConfigError, to_json
from dora_jax.plan import validate
from dora_jax.plan.validate import from_config_dict


def good():
    c = configs.defaults()
    c.model.path = "somewhere"
    c.task.name = "reasoning_gym:chain_sum"
    return c


def problems(**fields):
    """The problems of a good config with some fields set, dots written as __."""
    tree = good().to_dict()
    for name, value in fields.items():
        *sections, leaf = name.split("__")
        section = tree
        for part in sections:
            section = section[part]
        section[leaf] = value
    try:
        from_config_dict(tree)
    except ConfigError as error:
        return list(error.problems)
    return []


def test_defaults_mirror_the_dataclasses():
    assert from_config_dict(good()) == dataclasses.replace(
        Config(),
        model=dataclasses.replace(Config().model, path="somewhere"),
        task=dataclasses.replace(Config().task, name="reasoning_gym:chain_sum"),
    )


def test_no_field_has_a_type_that_a_command_line_cannot_override():
    for name, kind in configs.fields().items():
        assert typing.get_origin(kind) in (dict, tuple) or kind in (int, float, bool, str), name


def test_json_reads_back_as_the_same_config():
    c = good()
    c.task.rewards = ("a.b", "c.d")
    c.task.params = {"terms": 3, "sizes": [1, 2]}
    config = from_config_dict(c)
    assert from_config_dict(to_json(config)) == config


def test_a_number_of_instances_that_is_left_to_the_devices_is_named():
    c = good()
    c.rollout.instances = 0
    _, lines = validate.settle(from_config_dict(c))
    assert any(line.split()[:1] == ["rollout.instances=4"] for line in lines)
    c.rollout.instances = 3
    assert not any("rollout.instances" in line for line in validate.settle(from_config_dict(c))[1])


def test_sections_are_locked_and_free_form_fields_are_not():
    c = configs.defaults()
    with pytest.raises(AttributeError, match="name"):
        c.task.nme = "x"
    c.task.params.anything = 1
    c.trainer.loss_params.dual_clip = 3.0
    assert set(configs.free_form()) >= {"task.params", "trainer.loss_params"}


def test_a_locked_free_form_field_can_still_be_replaced():
    c = good()
    c.trainer.loss_params = {"eps_lo": 0.1}
    assert from_config_dict(c.lock()).trainer.loss_params == {"eps_lo": 0.1}


@pytest.mark.parametrize(
    "field, value, why",
    [
        ("steps", "ten", "is not a int"),
        ("steps", True, "is not a int"),
        ("steps", 1.5, "is not a int"),
        ("task__shuffle_rewards", 1, "is not a bool"),
        ("task__rewards", ("a.b", 3), "3 is not a str"),
        ("task__rewards", "a.b", "is not a tuple"),
        ("trainer__learning_rate", float("nan"), "is not a finite float"),
        ("trainer__loss_params", 3, "is not a dict"),
        ("trainer", 3, "is not a section"),
        ("trainer__learning_rat", 1.0, "unknown field; the nearest is trainer.learning_rate"),
        ("steps", 0, "at least 1"),
        ("seed", -1, "at least 0"),
        ("placement", "somewhere", "is none of: auto, disjoint, shared"),
        ("model__path", "", "empty"),
        ("task__name", "chain_sum", "neither"),
        ("task__name", "reasoning_gym:", "neither"),
        ("task__name", "rows", "task.path"),
        ("task__template", "Solve!", "{prompt}"),
        ("task__rewards", (), "empty"),
        ("task__rewards", ("exact",), "import path"),
        ("reward_model__placement", "shared", "none of: own, trainer"),
        ("reward_model__tensor", 0, "at least 1"),
        ("task__answer_pattern", "(", "not a regular expression"),
        ("task__extract", "(a{99999999999})", "not a regular expression: the repetition number is too large"),
        ("task__extract", "(" * 5000 + ")" * 5000, "not a regular expression: maximum recursion depth"),
        ("task__extract", "abc", "no group"),
        ("task__max_failed_share", 1.5, "between 0 and 1"),
        ("eval__prompts", 257, "task.heldout"),
        ("rollout__page_size", 12, "power of two"),
        ("rollout__pages", 15, "which needs 17"),
        ("rollout__prefill_tokens", 8, "less than a page"),
        ("rollout__decode_rows", 5, "not a multiple"),
        ("rollout__temperature", 0.0, "temperature"),
        ("rollout__top_k", 5, "top_k"),
        ("rollout__attention", "flash", "reference, tpu, tokamax, gpu"),
        ("orchestrator__mode", "asynch", "dora_paper"),
        ("orchestrator__max_versions", 0, "0 is not at least 1"),
        ("orchestrator__group_size", 65, "64 slots"),
        ("orchestrator__inflight", 0.01, "less than one group"),
        ("trainer__pack_tokens", 254, "255"),
        ("trainer__rows", 8, "64 always do"),
        ("trainer__policy_loss", "gpso", "gspo"),
        ("trainer__policy_loss", "gspo", "seq_mean_token_mean"),
        ("trainer__advantage", "dr_grpo", "seq_mean_token_sum_norm"),
        ("trainer__correction", "tis", "twice"),
        ("trainer__loss_params", {"eps": 0.2}, "eps"),
        ("trainer__fsdp", 0, "trainer.fsdp: 0 is not at least 1, or -1"),
        ("trainer__b2", 1.0, "trainer.b2: 1.0 is not at least 0 and below 1"),
        ("trainer__updates", 0, "trainer.updates: 0 is not at least 1"),
        ("trainer__optimizer_memory", "hots", "trainer.optimizer_memory: 'hots' is none of: device, host"),
        ("trainer__anchor", "old", "trainer.anchor: 'old' is none of: behavior, proximal"),
        ("rollout__kv", "int8", "rollout.kv: 'int8' is none of: '', float8"),
        ("rollout__weights", "int4", "rollout.weights: 'int4' is none of: '', published, bfloat16, int8, float8"),
        ("rollout__drafts", -1, "-1 is not at least 0"),
        ("rollout__max_repeats", -1, "-1 is not at least 0"),
        ("rollout__draft_rows", 0, "0 is not at least 1"),
        ("rollout__draft_cost", -0.1, "-0.1 is not at least 0"),
        ("rollout__narrow_rows", -1, "-1 is not at least 0"),
        ("rollout__narrow_cost", -0.1, "-0.1 is not at least 0"),
        ("rollout__min_p", 2.0, "2.0 is not between 0 and 1"),
        ("orchestrator__kv_pressure", 0.6, "0.6 is not between 0 and 0.5"),
        ("monitor__port", 65536, "65536 is not between 0 and 65535"),
        ("lora__rank", -1, "lora.rank: -1 is not at least 0"),
        ("lora__alpha", 0.0, "lora.alpha: 0.0 is not above 0"),
        ("sft__n_heads", 3, "n_kv_heads"),
        ("sft__head_dim", 7, "odd"),
        ("sft__family", "gpt2", "llama"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_its_field(field, value, why):
    found = problems(**{field: value})
    assert len(found) == 1, found
    assert why in found[0] and "\n" not in found[0]
    assert field.split("__")[-1] in found[0] or why in ("task.path", "n_kv_heads")


@pytest.mark.parametrize("mode, starts", [("dora", True), ("partial", True), ("dora_paper", False)])
def test_less_in_flight_than_a_batch_needs_a_mode_that_counts_the_awaited_one(mode, starts):
    found = problems(orchestrator__inflight=0.5, orchestrator__mode=mode)
    assert starts and not found or len(found) == 1 and "inflight" in found[0] and "never start" in found[0], found


def test_a_config_that_a_script_made_is_held_to_its_declarations():
    with pytest.raises(ConfigError, match="^steps: 0 is not at least 1$"):
        validate.settle(Config(steps=0))


def test_rows_must_divide_over_micro_batches_and_the_mesh():
    assert problems(trainer__rows=66, trainer__micro_batches=4) == [
        "trainer.rows: 66 is not divisible by micro_batches * data * fsdp = 4"
    ]
    assert problems(trainer__rows=64, trainer__micro_batches=4, trainer__data=2, trainer__fsdp=2) == []


def test_a_group_must_fit_the_slots_of_all_instances():
    assert problems(orchestrator__group_size=64) == []
    assert problems(orchestrator__group_size=64, rollout__instances=1)
    assert problems(orchestrator__group_size=64, rollout__instances=0) == []  # at least two are made


def test_every_problem_is_reported_at_once():
    found = problems(steps="x", seed=-1, placement="y", orchestrator__mode="z", trainer__data=0, task__nme=1)
    named = ("steps", "seed", "placement", "orchestrator.mode", "trainer.data", "task.nme")
    assert [name for name in named if not any(problem.startswith(name) for problem in found)] == []
    assert len(found) == len(named)


def test_out_of_range_numbers_do_not_break_the_rules_that_divide_by_them():
    for name, kind in configs.fields().items():
        if kind in (int, float):
            problems(**{name.replace(".", "__"): kind(0)})
            problems(**{name.replace(".", "__"): kind(-1)})


@pytest.mark.parametrize(
    "fields, why",
    [
        ({"task__rewards": ()}, None),  # its score is the reward
        ({"reward_model__weight": 0.0}, "no part of the reward"),
        ({"reward_model__pack_tokens": 255}, "max_prompt_tokens + max_new_tokens = 256"),
        ({"reward_model__data": 2, "reward_model__rows": 3}, "not divisible by data * fsdp = 2"),
        ({"cluster__launcher": "process"}, "reward_model.path: belongs to a run in one process"),
    ],
)
def test_a_reward_model(fields, why):
    found = problems(reward_model__path="judge", **fields)
    assert [why in problem for problem in found] == [True] * bool(why)


@pytest.mark.parametrize(
    "train, reward_s, rewards, why",
    [
        (True, 9.0, (), []),  # clients post them
        (True, 0.0, (), ["serving.reward_s is 0", "task.rewards: empty"]),
        (False, 9.0, ("dora_jax.tasks.rewards.exact",), ["serving.reward_s: no session"]),
    ],
)
def test_sessions_are_scored_by_rewards_of_the_task_or_of_clients(train, reward_s, rewards, why):
    found = problems(serving__port=8000, serving__train=train, serving__reward_s=reward_s, task__rewards=rewards)
    assert [text in problem for text, problem in zip(why, found, strict=True)] == [True] * len(why)


@pytest.mark.parametrize("field, cost", [("drafts", "draft_cost"), ("narrow_rows", "narrow_cost")])
@pytest.mark.parametrize("given", [0.0, 0.4])
def test_processes_of_an_instance_measure_no_cost_of_calls(field, cost, given):
    cluster = {"cluster__launcher": "process", "cluster__hosts_per_instance": 2, "rollout__instances": 1}
    asked = {f"rollout__{field}": 7}
    found = problems(**asked, **cluster, **{f"rollout__{cost}": given})
    assert any(f"rollout.{cost}: 0 is measured by each process" in problem for problem in found) == (not given)
    assert not any(cost in problem for problem in problems(**asked))


def test_processes_of_an_instance_measure_no_ladder():
    cluster = {"cluster__launcher": "process", "cluster__hosts_per_instance": 2, "rollout__instances": 1}
    found = [problems(rollout__ladder=ladder, **cluster) for ladder in ("auto", "on")]
    assert [any("rollout.ladder" in problem for problem in each) for each in found] == [False, True]


def test_purpose_decides_what_must_be_named():
    c = configs.defaults()
    c.task.name = "reasoning_gym:chain_sum"
    with pytest.raises(ConfigError, match="model.path"):
        from_config_dict(c, "train")
    with pytest.raises(ConfigError, match="sft.out"):
        from_config_dict(c, "sft")
    from_config_dict(c, "evaluate")


def test_missing_paths_but_not_what_the_warm_start_writes(tmp_path):
    c = good()
    c.task.heldout_path = str(tmp_path / "gone.jsonl")
    assert validate.missing_paths(from_config_dict(c)) == [
        f"task.heldout_path: {tmp_path}/gone.jsonl does not exist",
        "model.path: somewhere does not exist",
    ]
    c.sft.out, c.task.heldout_path = c.model.path, ""
    assert validate.missing_paths(from_config_dict(c)) == []


@pytest.mark.parametrize(
    "name",
    [
        "token",
        "hf_token",
        "api_key",
        "apikey",
        "APIKEY",
        "wandbApiKey",
        "api-keys",
        "passwd",
        "db_passwd",
        "pwd",
        "password",
        "passphrase",
        "auth",
        "oauth",
        "Authorization",
        "bearer",
        "X-Auth-Token",
        "credentials",
        "accesskey",
        "client_secret",
        "jwt",
        "cookie",
        "authtokens",
    ],
)
def test_secrets_are_blanked_by_many_names(name):
    assert redact({"a": [{name: "sesame"}]}) == {"a": [{name: "<redacted>"}]}
    assert redact({f"task.params.{name}": ("sesame",)}) == {f"task.params.{name}": "<redacted>"}


@pytest.mark.parametrize("name", ["author", "monkey", "keyboard", "top_k", "tokenizer", "secretary", "passage"])
def test_names_that_only_look_alike_are_kept(name):
    assert redact({name: "open"}) == {name: "open"}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("https://me:sesame@host:80/x", "https://<redacted>@host:80/x"),
        ("s3://sesame@bucket/x", "s3://<redacted>@bucket/x"),
        ("https://h/x?a=1&api_key=sesame&b=2#c", "https://h/x?a=1&api_key=<redacted>&b=2#c"),
        ("https://h/x?X-Amz-Signature=sesame", "https://h/x?X-Amz-Signature=<redacted>"),
        ("from http://a/b, then https://u:sesame@c/d", "from http://a/b, then https://<redacted>@c/d"),
        ("gs://bucket/runs/me@home", "gs://bucket/runs/me@home"),
        ("mail me@home, token=x", "mail me@home, token=x"),
    ],
)
def test_secrets_in_urls_are_blanked_wherever_they_stand(text, kept):
    assert redact({"rows": (text,), "url": text}) == {"rows": (kept,), "url": kept}


def test_secrets_are_blanked_by_name_and_counts_are_not():
    tree = {
        "hf_token": "abc",
        "max_new_tokens": 5,
        "num_memory_tokens": 7,
        "api_keys": ("a", "b"),
        "keyboard": "k",
        "nested": {"password": "x", "page_size": 16, "empty_secret": ""},
    }
    assert redact(tree) == {
        "hf_token": "<redacted>",
        "max_new_tokens": 5,
        "num_memory_tokens": 7,
        "api_keys": "<redacted>",
        "keyboard": "k",
        "nested": {"password": "<redacted>", "page_size": 16, "empty_secret": ""},
    }
    assert json.loads(json.dumps(dataclasses.asdict(Config()))) == to_json(Config()), "no field of ours is one"
    c = good()
    c.task.params.api_key = "sesame"
    assert "sesame" not in str(to_json(from_config_dict(c)))


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("trainer.learning_rat", "trainer.learning_rate"),
        ("lr", "trainer.learning_rate"),
        ("page_sise", "rollout.page_size"),
        ("sft.learning_rat", "sft.learning_rate"),
        ("stesp", "steps"),
        ("orchestrator.max_version", "orchestrator.max_versions"),
    ],
)
def test_nearest_known_field(typed, meant):
    assert nearest(typed, configs.fields()) in (meant, meant.replace("trainer.learn", "sft.learn"))


def test_a_plain_mapping_is_read_like_a_config_dict():
    assert from_config_dict(
        ml_collections.ConfigDict({"steps": 3, "model": {"path": "m"}, "task": {"name": "reasoning_gym:x"}})
    )


def test_the_nearest_name_is_the_nearest_of_all_though_few_are_compared_in_full():
    known, draw = list(configs.fields()), random.Random(0)
    for name in ["", ".", "lr", *draw.sample(known, 20)]:
        letters = list(name)
        for _ in range(3):
            at = draw.randrange(len(letters) + 1)
            letters[at : at + draw.randrange(3)] = draw.choice(["", "a", "e.", "_s"])
        name = "".join(letters)
        word = name.rpartition(".")[2]

        def likeness(other, name=name, word=word):
            leaf = other.rpartition(".")[2]
            ratio = lambda a, b: difflib.SequenceMatcher(None, a, b).ratio()
            initials = "".join(part[0] for part in leaf.split("_"))
            return max(ratio(word, leaf), ratio(word, initials) - 0.1) + 0.5 * ratio(name, other)

        assert nearest(name, known) == max(known, key=likeness), name


@pytest.mark.parametrize(
    "fields, reason",
    [
        (
            {"orchestrator__group_size": 1},
            "orchestrator.group_size: trainer.advantage = grpo compares the samples of a group",
        ),
        (
            {"orchestrator__group_size": 1, "trainer__advantage": "rloo"},
            "an advantage that needs no group: reinforce_pp, gae, gae_turn",
        ),
        (
            {
                "orchestrator__group_size": 1,
                "trainer__advantage": "reinforce_pp",
                "orchestrator__filter_zero_variance": True,
            },
            "orchestrator.filter_zero_variance: a group of 1 has no variance",
        ),
        ({"eval__solved": "right > 1"}, "eval.solved: 'right > 1' is not of the form TERM or TERM >= NUMBER"),
    ],
)
def test_what_would_learn_or_measure_nothing_is_refused(fields, reason):
    (problem,) = problems(**fields)
    assert reason in problem


def test_a_group_of_one_goes_with_advantages_that_need_no_group():
    assert problems(orchestrator__group_size=1, trainer__advantage="reinforce_pp") == []


def test_a_renamed_field_is_refused_with_its_name():
    tree = to_json(from_config_dict(good()))
    tree["cluster"]["replica_slice"] = tree["cluster"].pop("instance_slice")
    with pytest.raises(ConfigError) as refused:
        from_config_dict(tree, "evaluate")
    assert refused.value.problems == ("cluster.replica_slice: renamed to cluster.instance_slice",)
    assert set(configs.RENAMED.values()) <= set(configs.fields()) and not set(configs.RENAMED) & set(configs.fields())
