"""Stage 5, train: which objectives exist, what each takes, and which do not go together. No JAX.

Consumes the trainer's section of the config; produces sentences, one per mistake, before JAX is imported. A policy
loss, advantage or correction is a name of the tables, or the import path of the user's own function (`plugin`).
Law: the tables below name exactly the keywords of the functions in loss.py, advantage.py and correction.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dora_jax.base import callables
from dora_jax.config import VALUE_ADVANTAGES, Config, RolloutSection, TrainerSection
from dora_jax.models.families.config import ModelConfig

ADVANTAGES: Mapping[str, tuple[str, ...]] = {
    "grpo": ("eps",),
    "dr_grpo": (),
    "rloo": (),
    "reinforce_pp": ("gamma",),
    "reinforce_pp_baseline": (),
    "max_rl": (),
    "opo": (),
    "vcpo": (),
    "gae": ("gamma", "lam"),
    "gae_turn": ("gamma", "lam"),
}
LOSSES: Mapping[str, tuple[str, ...]] = {
    "ppo": ("eps_lo", "eps_hi", "dual_clip"),
    "gspo": ("eps_lo", "eps_hi"),
    "cispo": ("eps_lo", "eps_hi"),
    "sapo": ("tau_pos", "tau_neg"),
    "topr": ("w_pos", "w_neg"),
    "reinforce": (),
    "dppo_tv": ("d_lo", "d_hi"),
    "dppo_kl": ("d_lo", "d_hi"),
    "longcat": ("eps_neg_lo", "eps_pos_hi", "eps_neg_hi", "C"),
}
CORRECTIONS: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "tis": ("C", "level"),
    "icepop": ("lo", "hi"),
    "mask": ("lo", "hi", "level", "metric"),
    "opsm": ("delta",),
    "vcpo_lr": ("rho_base",),
}
KNOWN = {"advantage": ADVANTAGES, "policy_loss": LOSSES, "correction": CORRECTIONS}
TAKES: Mapping[str, tuple[str, ...]] = {  # what a function of each kind takes by position
    "policy_loss": ("logprobs", "anchor", "advantages"),
    "advantage": ("rewards", "group_ids"),
    "correction": ("gap", "mask", "segment_ids"),
}
OFFERED: Mapping[str, tuple[str, ...]] = {  # and by keyword, where its signature names it
    "policy_loss": ("behavior", "rewards", "mask", "segment_ids"),
    "advantage": ("mask", "lengths", "truncated"),
    "correction": ("drift", "adv"),
}
SPLASH_UNIT = 128  # positions: a TPU's vector, of which the kernel's blocks are multiples
CUDNN_LONGEST = 16384  # positions: the mask of a longer row and its gradient take more than 1 GiB
WHITENED = ("reinforce_pp", "reinforce_pp_baseline", "gae", "gae_turn")
# a group is its own baseline
GROUP_RELATIVE = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "max_rl", "opo", "vcpo")
ALONE = ("vcpo",)  # a trajectory has to stand alone for the norm of its gradient, and shares no prompt
WEIGHTING = ("tis", "icepop")  # corrections that multiply the loss by exp(l_old - l_mu)
# of its 8 bits the last is worth up to 1/128 of the value, and a decay must move it by half of that
MAX_BFLOAT16_B2 = 0.99
WORDS: Mapping[tuple[str, str], tuple[str, ...]] = {  # keywords whose values are names; all others are numbers
    ("tis", "level"): ("token", "sequence"),
    ("mask", "level"): ("token", "seq_sum", "seq_mean", "seq_max", "geometric"),
    ("mask", "metric"): ("ratio", "k1", "k2", "k3"),
}


def check(section: TrainerSection, rollout: RolloutSection | None = None) -> list[str]:
    """What is wrong with a TrainerSection (and with the RolloutSection it learns from): one sentence each."""
    takes: dict[str, tuple[str, ...]] = {}
    errors = []
    for kind, table in KNOWN.items():
        name = getattr(section, kind)
        if name not in table and "." not in name and name not in callables.registered(kind):
            errors.append(
                f"trainer.{kind}={name!r} is unknown: known are {', '.join(table)}, and a function of your own by its "
                "import path (my_module.name)"
            )
            continue
        try:
            if name in table:
                takes[kind] = table[name]
            else:
                parameters = inspect.signature(plugin(kind, name)).parameters.values()
                words = [p.name for p in parameters if p.kind == p.KEYWORD_ONLY and p.name not in OFFERED[kind]]
                takes[kind] = tuple(words)
        except ValueError as error:
            errors.append(f"trainer.{kind}: {error}")
    if errors:
        return errors
    for kind, params in zip(KNOWN, (section.advantage_params, section.loss_params, section.correction_params)):
        name, field = getattr(section, kind), f"trainer.{kind.removeprefix('policy_')}_params"
        if surplus := sorted(set(params) - set(takes[kind])):
            known = ", ".join(takes[kind]) or "nothing"
            errors.append(f"{field}: {', '.join(surplus)} not known to {name!r}, which takes {known}")
        errors += [
            f"{field}.{key}: {params[key]!r} is {wrong}"
            for key in takes[kind]
            if key in params and name in KNOWN[kind] and (wrong := _wrong_value(name, key, params[key]))
        ]
    mask = section.correction_params if section.correction == "mask" else {}
    if mask.get("level") == "geometric" and mask.get("metric", "ratio") != "ratio":
        errors.append(f"trainer.correction_params: level='geometric' is of ratios, not of metric={mask['metric']!r}")
    errors += _pairings(section)
    if rollout is None:
        return errors
    if not rollout.temperature > 0:
        errors.append(
            f"rollout.temperature={rollout.temperature} must be above 0: greedy samples have no log-prob to learn from"
        )
    whole = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    cut = [f"{name}={getattr(rollout, name)}" for name, off in whole.items() if getattr(rollout, name) != off]
    if cut:
        errors.append(
            f"rollout.{', '.join(cut)}: the engine's log-probs are of the whole distribution, so truncated "
            f"sampling cannot be trained on"
        )
    return errors


@functools.cache
def plugin(kind: str, path: str) -> Callable[..., Any]:
    """The user's own function of a kind (policy_loss, advantage, correction), by its import path "module.name".

    It takes what TAKES lists by position, what it names of OFFERED by keyword, and its other keywords from
    `trainer.*_params`; shapes and results are those of loss.py (f32[B, L]), advantage.py (f64[n] -> [n] or [n, T]) and
    correction.py ((weights, mask, metrics)). ValueError: it cannot be imported, or takes something else.
    """
    if "." not in path and path not in callables.registered(kind):
        raise ValueError(f"unknown {kind.replace('_', ' ')} {path!r}: known are {', '.join(KNOWN[kind])}")
    function = callables.imported(path, kind)
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    takes = sum(each in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in kinds)
    if takes != len(TAKES[kind]):
        raise ValueError(
            f"{path} takes {takes} arguments by position, not {len(TAKES[kind])} ({', '.join(TAKES[kind])}); of "
            f"{', '.join(OFFERED[kind])} it gets by keyword what it names behind a *"
        )
    return function


def offered(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """What the function's signature names of `values`; for one that is None its own default stands."""
    named = inspect.signature(function).parameters
    return {
        name: value
        for name, value in values.items()
        if name in named and (value is not None or named[name].default is inspect.Parameter.empty)
    }


def needs_value(section: TrainerSection) -> bool:
    return section.advantage in VALUE_ADVANTAGES


def needs_scores(section: TrainerSection) -> bool:
    """Whether log-probs or values must be computed on the packed batch before its advantages."""
    before_advantages = needs_value(section) or section.advantage == "vcpo" or section.kl != "none"
    # Whether the trainer's log-probs under the step's starting weights are used at all
    return before_advantages or (
        (section.anchor == "proximal" or section.correction != "none" or section.advantage == "vcpo")
        and section.updates > 1
    )


def may_start_early(section: TrainerSection) -> bool:
    """Whether a step's first update may run before the groups of its later ones are there.

    Denominators are per update anyway. Not where the starting weights must score every batch of the step first, nor
    where an advantage is whitened: over fewer trajectories that is another estimate.
    """
    alone = section.advantage in ADVANTAGES and section.advantage not in WHITENED
    return section.updates > 1 and not needs_scores(section) and alone


def batch_dtypes(section: TrainerSection, exact: bool = False, tempered: bool = False) -> dict[str, str]:
    """Arrays of a packed batch as this objective uses it: name -> dtype. exact: with log-probs of the engine's
    calls. tempered: with the temperature of each target."""
    integers: tuple[str, ...] = ("tokens", "targets", "segment_ids", "positions", "version")
    integers += ("prefix_ids",) if section.share_prompts == "on" else ()
    names = dict.fromkeys(integers, "int32") | {"mask": "bool"}
    floats = ["behavior_logprobs", "advantages", "rewards", "loss_weights"]
    if needs_scores(section):
        floats.append("old_logprobs")
    if section.kl != "none":
        floats.append("ref_logprobs")
    if exact:
        floats.append("exact_logprobs")
    if tempered:
        floats.append("temperatures")
    if needs_value(section):
        floats += ["values", "returns"]
    return names | dict.fromkeys(floats, "float32")


def attention_problems(section: TrainerSection, platform: str, dtype: str) -> Iterator[str]:
    """Why trainer.attention does not run on these devices (platform cpu, tpu or gpu) in this type; one sentence
    each."""
    kind, local = section.attention, section.pack_tokens // section.context // max(section.row_splits, 1)
    if kind == "auto":
        yield "trainer.attention=auto is open: presets.resolve names the kernel of a platform"
    if kind == "splash" and platform != "tpu":
        yield f"trainer.attention=splash is a kernel for TPUs; the trainer's devices are {platform}: use reference"
    if kind == "splash" and local % SPLASH_UNIT != 0:
        yield (
            f"trainer.attention=splash takes multiples of {SPLASH_UNIT} positions a shard, not trainer.pack_tokens="
            f"{section.pack_tokens} over trainer.context={section.context}"
            + f" and trainer.row_splits={section.row_splits}"
            * (section.row_splits > 1)
        )
    if kind == "splash" and section.share_prompts == "on":
        yield (
            "trainer.share_prompts=on: the kernel trainer.attention=splash compares segments only; use reference, "
            "or off"
        )
    if kind == "cudnn" and platform != "gpu":
        yield (
            f"trainer.attention=cudnn is a kernel for NVIDIA GPUs; the trainer's devices are {platform}: use reference"
        )
    if kind == "cudnn" and dtype not in ("bfloat16", "float16"):
        yield f"trainer.attention=cudnn computes in bfloat16 or float16, not in model.dtype={dtype}"
    if kind == "cudnn" and section.context > 1:
        yield f"trainer.attention=cudnn keeps rows whole: trainer.context={section.context} needs reference"
    if kind == "cudnn" and (section.pack_tokens > CUDNN_LONGEST or section.pack_tokens % 2 == 1):
        yield (
            f"trainer.attention=cudnn holds a mask of the square of trainer.pack_tokens={section.pack_tokens}, "
            f"which must be even and at most {CUDNN_LONGEST}"
        )


def model_problems(section: TrainerSection, model: ModelConfig) -> list[str]:
    """What a TrainerSection asks of the experts, or the heads, that the model does not have, or of a recurrent state
    what attention alone can do; one sentence each."""
    experts, linear = model.experts, model.linear_layers
    recurrent = [
        (section.share_prompts == "on", "share_prompts=on", "a prompt's state would have to begin each of its answers"),
        (section.context > 1, f"context={section.context}", "a state would have to travel along a row"),
    ]
    rules = [
        (section.routing_replay != "none" and experts is None, "routing_replay", section.routing_replay, "experts"),
        (section.load_balance_coef and experts is None, "load_balance_coef", section.load_balance_coef, "experts"),
        (
            section.router_bias_rate and not (experts and experts.corrected),
            "router_bias_rate",
            section.router_bias_rate,
            "a router with a selection bias",
        ),
        (section.attention == "cudnn" and model.sinks, "attention", "cudnn", "heads without sinks"),
    ]
    return [
        f"trainer.{field}={value} needs a model with {needed}, and this {model.family} has none"
        for broken, field, value, needed in rules
        if broken
    ] + [
        f"trainer.{setting} is not for linear attention, and this {model.family} has {linear} layers of it: {why}"
        for broken, setting, why in recurrent
        if broken and linear
    ]


def exact_problems(config: Config) -> list[str]:
    """What a Config asks for that the trainer cannot replay to the bit (score.py); one sentence each."""
    few = config.lora.rank > 0 and 0 < config.rollout.residents <= config.orchestrator.max_versions
    branches, dropped = config.environment.branches > 0, config.environment.name and config.rollout.host_kv_bytes > 0
    rules = [
        (config.orchestrator.mixes_versions, "orchestrator.mode", "a sample of several versions has KV of each"),
        (few, "rollout.residents", "an adapter's place decides its last bits: max_versions + 1 have each their own"),
        (branches, "environment.branches", "what a branch keeps of a turn is not what the turn's calls computed"),
        (dropped, "rollout.host_kv_bytes", "a waiting episode's KV that is dropped is computed again by other calls"),
    ]
    return [f"{name}: rollout.exact=True needs another value: {why}" for broken, name, why in rules if broken]


def _wrong_value(name: str, key: str, value: Any) -> str:
    words = WORDS.get((name, key))
    if words:
        return "" if value in words else f"unknown: known are {', '.join(words)}"
    if key == "dual_clip":
        fits = value is None or (type(value) in (int, float) and value > 1)
        return "" if fits else "neither None nor a number above 1"
    return "" if type(value) in (int, float) else "not a number"


def _pairings(section: TrainerSection) -> Iterator[str]:
    loss, adv = section.policy_loss, section.advantage
    aggregation, correction = section.aggregation, section.correction
    # Where nothing but the advantage moves the weights, and no score or weight is taken over all trajectories
    only_advantage = loss in LOSSES and not section.entropy_coef and correction != "vcpo_lr"
    if section.skip_zero_advantage and (needs_scores(section) or not only_advantage):
        yield (
            "trainer.skip_zero_advantage: a sample of no advantage still counts with trainer.entropy_coef, "
            "trainer.kl, values or old log-probs of several updates, correction='vcpo_lr', or a policy loss of "
            "your own; set it to False"
        )
    splits = f"trainer.row_splits={section.row_splits}"
    if section.row_splits > 1 and section.pack_tokens % section.row_splits:
        yield f"{splits} does not divide trainer.pack_tokens={section.pack_tokens}"
    if section.row_splits > 1 and section.context > 1:
        yield f"{splits} splits rows that lie on trainer.context={section.context} devices: set one of them to 1"
    if section.row_splits > 1 and section.share_prompts == "on":
        yield f"{splits} is not for trainer.share_prompts=on, which keeps a prompt once a row: set one of them off"
    if section.share_prompts == "on" and adv in ALONE:
        yield f"trainer.share_prompts=on: advantage={adv!r} takes the gradient of each trajectory alone, so set it off"
    if loss == "gspo" and aggregation != "seq_mean_token_mean":
        yield (
            f"trainer.policy_loss='gspo' clips whole sequences and needs aggregation='seq_mean_token_mean', "
            f"not {aggregation!r}"
        )
    if adv == "dr_grpo" and aggregation != "seq_mean_token_sum_norm":
        yield (
            f"trainer.advantage='dr_grpo' removes the length bias and needs aggregation='seq_mean_token_sum_norm', "
            f"not {aggregation!r}"
        )
    if section.anchor == "behavior" and correction in WEIGHTING:
        yield (
            f"trainer.correction={correction!r} with anchor='behavior' counts the engine gap twice: the ratio "
            f"already holds it; use anchor='proximal', or a correction that only masks"
        )
    if loss == "longcat" and section.anchor != "proximal":
        yield "trainer.policy_loss='longcat' weighs by truncated importance sampling and needs anchor='proximal'"
    if loss == "longcat" and aggregation != "seq_mean_token_sum_norm":
        yield (
            f"trainer.policy_loss='longcat' divides by G T_max and needs aggregation='seq_mean_token_sum_norm', "
            f"not {aggregation!r}"
        )
    if loss == "longcat" and correction in WEIGHTING:
        yield (
            f"trainer.policy_loss='longcat' already weighs by the engine gap: correction={correction!r} counts it twice"
        )
    if needs_value(section) and not section.value_learning_rate > 0:
        yield f"trainer.advantage={adv!r} needs a value model: set trainer.value_learning_rate"
    if not needs_value(section) and section.value_learning_rate > 0:
        yield f"trainer.value_learning_rate is set but advantage={adv!r} uses no value model"
    if section.kl == "none" and section.kl_coef != 0:
        yield "trainer.kl_coef is set but trainer.kl is 'none': choose k1, k2 or k3"
    if section.kl_in == "reward" and section.kl == "none":
        yield "trainer.kl_in='reward' needs trainer.kl: choose k1, k2 or k3"
    if section.pack_tokens % section.context:
        yield (
            f"trainer.pack_tokens={section.pack_tokens} is not divisible by the mesh axis "
            f"trainer.context={section.context}"
        )
    if section.matmul == "bfloat16" and section.context > 1:
        yield f"trainer.matmul=bfloat16 takes tokens as one axis, which trainer.context={section.context} shards"
    if section.moments == "bfloat16" and section.b2 > MAX_BFLOAT16_B2:
        yield (
            f"trainer.b2={section.b2}: a second moment in bfloat16 rounds away what an update changes above "
            f"{MAX_BFLOAT16_B2}; lower it, or keep trainer.moments=float32"
        )
