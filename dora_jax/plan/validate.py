"""The rules between the fields of a configuration: each a small function; no JAX, no files but in `missing_paths` and
`model_problems`.

Consumes a `config.Config` whose fields are as declared; produces sentences, each naming its field. Nothing is repaired.
Rules that a stage knows better are asked of its own standard-library module (trainer.objective, orchestrate.modes,
rollout.shapes, tasks.solved, models.config); what depends on the number of devices is in devices.plan.
"""

from __future__ import annotations

import dataclasses
import glob
import re
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

from dora_jax.base import callables, config_tree
from dora_jax.config import RENAMED, Config, ConfigError
from dora_jax.config import cluster as config_cluster
from dora_jax.config import live as config_live
from dora_jax.config.task import TaskPart, TaskSection
from dora_jax.models import families, lora_config
from dora_jax.models.families.config import MAX_LAYERS, ModelConfig
from dora_jax.models.hf_config import not_a_model, read_config
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.plan import devices, hub, presets
from dora_jax.rollout.shapes import shapes_of
from dora_jax.tasks import environment, mixture, solved
from dora_jax.trainer import objective

Problems = Iterator[str]

MOST_WEIGHT = 1000  # prompts of one turn through a mix: its shares are exact to a thousandth


def read(tree: config_tree.Tree, purpose: str = "train") -> presets.Plan:
    """A tree as a configuration, with what the machines that it names choose; its model is not looked at.

    ConfigError lists everything that is wrong with it. Purpose: as in `problems`.
    """
    config, found = config_tree.build(Config, tree, RENAMED)
    planned, broken = _ruled(config, purpose)
    if found := [*found, *broken]:
        raise ConfigError(found)
    return planned


def declared(tree: config_tree.Tree) -> Config:
    """A tree as a configuration whose fields are as declared; the rules between them are not looked at."""
    config, found = config_tree.build(Config, tree, RENAMED)
    if found:
        raise ConfigError(found)
    return config


def from_config_dict(tree: config_tree.Tree, purpose: str = "train") -> Config:
    """A tree as a configuration, as asked; ConfigError lists everything that is wrong with it."""
    return read(tree, purpose).asked


def settle(config: Config) -> tuple[Config, list[str]]:
    """(the configuration that this process runs, lines that say what was chosen for it); starts JAX.

    ConfigError where a choice breaks a rule, or where the memory plan does not fit.
    """
    config = declared(dataclasses.asdict(config))  # a script may have made it
    planned = presets.plan(config, presets.here(config), presets.model_of(config))
    if found := [*_broken(planned.config), *model_problems(config), *presets.problems(planned)]:
        raise ConfigError(found)
    choices, count = planned.choices, planned.machines.trainer.devices
    if not config.rollout.instances and count:
        instances = len(devices.plan(count, planned.config).instances)
        choices += (presets.Choice("rollout.instances", instances, "as many as the devices hold"),)
    return planned.config, [f"chosen for {planned.machines}:", *presets.table(choices)] if choices else []


def problems(config: Config, purpose: str = "train") -> list[str]:
    """Every broken rule. Purpose: what is about to run; train needs a model to start from, sft a folder to write.

    Open fields count as the machine that the configuration names fills them in, a CPU where it names none.
    """
    return _ruled(config, purpose)[1]


def makes_base(config: Config) -> bool:
    """Whether the run makes its own base model: sft.out is the folder that the run starts from."""
    return bool(config.sft.out) and Path(config.sft.out) == Path(config.model.path)


def named_paths(config: Config, purpose: str = "train") -> dict[str, str]:
    """Field -> file or folder that a run reads; without the folder that its warm start will write."""
    named = {
        f"{where}.{field}": getattr(part, field)
        for where, part in {"task": config.task, **_parts(config.task)}.items()
        for field in ("path", "heldout_path")
    }
    named |= {"sft.rows": config.sft.rows, "sft.init": config.sft.init, "reward_model.path": config.reward_model.path}
    named["lora.path"] = config.lora.path
    if purpose == "train" and not makes_base(config):
        named["model.path"] = config.model.path
    return named


def urls(config: Config) -> dict[str, str]:
    """Field -> URL, of the inputs that are copied to this machine first."""
    return {field: path for field, path in named_paths(config).items() if "://" in path}


def missing_paths(config: Config, purpose: str = "train", coming: Container[str] = ()) -> list[str]:
    """One sentence for each of `named_paths` that does not exist, but for fields of `coming`, whose models or rows a
    download brings, and for URLs."""
    return [
        f"{field}: {path} does not exist{hub.advice(field, path)}"
        for field, path in named_paths(config, purpose).items()
        if path
        and not (field in coming or "://" in path or Path(path).exists())
        # rows may be the shards of a split that the path names
        and not (field.startswith("task.") and any(Path(path).parent.glob(f"{glob.escape(Path(path).name)}*")))
    ]


def model_problems(config: Config) -> list[str]:
    """Why the folder that the run starts from holds no model, or no model for samples of this length.

    Empty where the model is not known yet.
    """
    field, path = "model.path", config.model.path
    if makes_base(config) and not (Path(path) / "config.json").is_file():
        if Path(path).exists() and not (Path(path).is_dir() and not any(Path(path).iterdir())):
            return [f"sft.out: {path} exists and is not an empty folder; a model is never written over another"]
        field, path = "sft.init", config.sft.init
    if path and Path(path).exists() and not (Path(path) / "config.json").is_file():
        return [f"{field}: {not_a_model(path)}"]
    try:
        known = read_config(path) if path and Path(path).exists() else families.KNOWN.get(config.model.size)
    except ValueError as error:
        return [f"{field}: {error}"]
    positions = known.max_position if known else None if path else ModelConfig.max_position  # of a new model
    tokens = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    wrong = lora_config.model_problems(config.lora, known) if known else []
    if presets.is_recurrent(config, known):
        if config.rollout.exact and config.environment.name and config.rollout.stop_strings:
            wrong.append(
                "rollout.stop_strings is not for linear attention with rollout.exact and an environment: where one "
                "ends a turn inside of a call, the recurrent state is made again by other calls"
            )
        if config.cluster.hosts_per_instance > 1:
            wrong.append(
                "cluster.hosts_per_instance: a recurrent state does not move in parts yet, so that an instance of a "
                "model with linear attention is of one process"
            )
    if known:
        wrong += objective.model_problems(config.trainer, known)
    if positions is not None and tokens > positions:
        wrong.append(
            f"rollout.max_new_tokens: the longest sample, max_prompt_tokens + max_new_tokens = {tokens}, is longer "
            f"than the model's {positions} positions"
        )
    return wrong


def _ruled(config: Config, purpose: str) -> tuple[presets.Plan, list[str]]:
    """(the plan without the model, every broken rule)."""
    found = []
    if purpose == "train" and not config.model.path:
        found.append("model.path: empty; name a Hugging Face folder, or the same folder as sft.out to make one first")
    if "://" in config.sft.out:
        found.append(f"sft.out: {config.sft.out} is no local folder, which is what the warm start writes")
    if purpose == "sft" and not config.sft.out:
        found.append("sft.out: empty; name the folder to write")
    try:
        machines = presets.machines(config)
    except ValueError as error:
        found.append(str(error))
        machines = presets.UNKNOWN
    planned = presets.plan(config, machines)
    return planned, [*found, *_broken(planned.config, purpose)]


def _broken(config: Config, purpose: str = "evaluate") -> Problems:
    """The rules between fields that a resolved configuration breaks."""
    rules: tuple[Callable[[Config], Problems], ...]
    rules = (_task, _reward_model, _engine, _orchestrator, _trainer, _sft, config_cluster.problems)
    if purpose == "serve":  # an engine, and nothing else of a run
        rules = (_engine, lora_config.problems)
    for rule in rules:
        yield from rule(config)


def _parts(task: TaskSection) -> dict[str, TaskPart]:
    return {f"task.mix.{name}": part for name, part in task.mix.items()}


def _task(config: Config) -> Problems:
    task = config.task
    sources: dict[str, Any] = _parts(task) or {"task": task}
    for where, part in sources.items():
        name = part.name
        kind, _, dataset = name.partition(":")
        if name != "rows" and not (kind == "reasoning_gym" and dataset):
            try:
                callables.imported(name, "source")
            except ValueError as error:
                yield f'{where}.name: neither "rows" nor "reasoning_gym:<dataset>", and {error}'
        if name == "rows" and not part.path:
            yield f'{where}.path: empty; the task "rows" reads a .jsonl, .json, .csv or .parquet file'
        if name != "rows" and (part.prompt_column or part.answer_column):
            yield f"{where}.prompt_column: {name} has no columns; leave it and answer_column empty"
        yield from _pattern(f"{where}.extract", part.extract)
    if task.adaptive and not (task.mix and config.orchestrator.filter_zero_variance):
        yield (
            "task.adaptive: it looks at the filtered groups of a mix: it needs task.mix and "
            "orchestrator.filter_zero_variance"
        )
    for field in mixture.OWN if task.mix else ():
        if getattr(task, field):
            yield f"task.{field}: there is a task.mix, whose entries have their own; leave it empty"
    for where in _parts(task):
        if not re.fullmatch(r"\w[\w-]*", where.rpartition(".")[2]):
            yield f"{where}: a task's name is made of letters, digits, _ and -, for metrics bear it"
    if (total := sum(part.weight for part in task.mix.values())) > MOST_WEIGHT:
        yield f"task.mix: its weights add up to {total}: a turn through it has at most {MOST_WEIGHT} prompts"
    if task.template != "chat" and "{prompt}" not in task.template:
        yield f'task.template: {task.template!r} is neither "chat" nor a text with {{prompt}} in it'
    if task.template != "chat":
        for field in ("system", "template_kwargs"):
            if getattr(task, field):
                yield f'task.{field}: it belongs to a chat template; set task.template = "chat"'
    for name in ("messages", "add_generation_prompt"):
        if name in task.template_kwargs:
            yield f"task.template_kwargs: {name} is not free to choose: the run decides it"
    if task.reward_weights and (config.environment.name or config.serving.train):
        yield "task.reward_weights: they weigh the rewards of whole answers, not of turns; leave it empty"
    elif len(task.reward_weights) not in (0, len(task.rewards)):
        yield (
            f"task.reward_weights: {len(task.reward_weights)} weights for the {len(task.rewards)} of task.rewards: "
            "name one for each, or none"
        )
    yield from environment.problems(config)
    yield from config_live.problems(config)
    posted = config.serving.train and config.serving.reward_s
    if not (task.rewards or config.reward_model.path or config.environment.name or posted):
        yield "task.rewards: empty; name at least one callable"
    for path in task.rewards:
        if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", path) and path not in callables.registered("reward"):
            yield f"task.rewards: {path!r} is not an import path such as dora_jax.tasks.rewards.exact"
    yield from _pattern("task.answer_pattern", task.answer_pattern)
    try:
        solved.read(config.eval.solved)
    except ValueError as error:
        yield f"eval.solved: {error}"
    if config.eval.prompts > task.heldout:
        yield f"eval.prompts: {config.eval.prompts} is more than the {task.heldout} held-out prompts of task.heldout"


def _reward_model(config: Config) -> Problems:
    model, rollout = config.reward_model, config.rollout
    if not model.path:
        return
    if model.weight == 0:
        yield "reward_model.weight: 0 makes its score no part of the reward; leave reward_model.path empty instead"
    tokens = rollout.max_prompt_tokens + rollout.max_new_tokens
    if tokens > model.pack_tokens:
        yield (
            f"reward_model.pack_tokens: the longest sample, max_prompt_tokens + max_new_tokens = {tokens}, does not "
            f"fit a row of {model.pack_tokens}"
        )
    shards = model.data * model.fsdp
    if model.rows % shards:
        yield f"reward_model.rows: {model.rows} is not divisible by data * fsdp = {shards}"


def _pattern(name: str, pattern: str) -> Problems:
    try:
        groups = re.compile(pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        yield f"{name}: {pattern[:80]!r} is not a regular expression: {error}"
    else:
        if pattern and not groups:
            yield f"{name}: {pattern!r} has no group to take"


def _engine(config: Config) -> Problems:
    try:
        families.own()
    except ValueError as error:
        yield f"model.family: {error}"
    try:
        shapes_of(config.rollout)
    except ValueError as error:
        yield str(error)


def _orchestrator(config: Config) -> Problems:
    section, rollout = config.orchestrator, config.rollout
    orchestrator_config = OrchestratorConfig.of(section, rollout, total_steps=config.steps)
    yield from (f"orchestrator.{problem}" for problem in orchestrator_config.problems())
    if section.group_size == 1 and config.trainer.advantage in objective.GROUP_RELATIVE:
        yield (
            f"orchestrator.group_size: trainer.advantage = {config.trainer.advantage} compares the samples of a group, "
            "and a group of 1 has nothing to compare; take 2 or more, or an advantage that needs no group: "
            f"{', '.join(name for name in objective.ADVANTAGES if name not in objective.GROUP_RELATIVE)}"
        )
    if section.group_size == 1 and section.filter_zero_variance:
        yield "orchestrator.filter_zero_variance: a group of 1 has no variance, so every group would be filtered"
    slots = rollout.slots * (rollout.instances or 2)
    if section.group_size > slots:
        yield f"orchestrator.group_size: {section.group_size} is more than the {slots} slots of all instances"


def _trainer(config: Config) -> Problems:
    t = config.trainer
    yield from objective.check(t, config.rollout)
    yield from objective.exact_problems(config) if config.rollout.exact else ()
    if config.rollout.exact and config.serving.train:
        yield "serving.train: rollout.exact=True needs another value: clients choose how a turn is sampled"
    ways = t.micro_batches * t.data * max(t.fsdp, 1)
    if t.rows % ways:
        yield f"trainer.rows: {t.rows} is not divisible by micro_batches * data * fsdp = {ways}"
    if t.lent_memory == "host" and not config.orchestrator.elastic:
        yield "trainer.lent_memory: host is of devices that are lent, and orchestrator.elastic lends none"
    every, export = config.checkpoint.every, config.checkpoint.export_hf_every
    if export and (not every or export % every):
        yield (
            f"checkpoint.export_hf_every: {export} is no multiple of checkpoint.every = {every}, and what is saved is "
            "exported"
        )
    yield from lora_config.problems(config)
    rollout, orchestrator = config.rollout, config.orchestrator
    tokens = rollout.max_prompt_tokens + rollout.max_new_tokens - 1  # the last is only a target
    if tokens > t.pack_tokens:
        yield (
            f"trainer.pack_tokens: the longest sample, max_prompt_tokens + max_new_tokens - 1 = {tokens}, "
            f"does not fit a row of {t.pack_tokens}"
        )
        return
    samples = orchestrator.groups_per_step * orchestrator.group_size
    needed = -(-samples // (t.pack_tokens // tokens))
    if 0 < t.rows < needed:
        yield (
            f"trainer.rows: {t.rows} rows of {t.pack_tokens} may not hold {samples} samples of up to {tokens} "
            f"tokens; {needed} always do (0 derives it)"
        )


def _sft(config: Config) -> Problems:
    sft = config.sft
    try:
        families.family(sft.family)
    except ValueError as error:
        yield f"sft.family: {error}"
    if sft.n_heads % sft.n_kv_heads:
        yield f"sft.n_heads: {sft.n_heads} is not divisible by n_kv_heads = {sft.n_kv_heads}"
    if sft.head_dim % 2:
        yield f"sft.head_dim: {sft.head_dim} is odd, and rotary positions turn pairs"
    if sft.n_layers > MAX_LAYERS:
        yield f"sft.n_layers: {sft.n_layers} is more than {MAX_LAYERS}, ten times what any model has"
