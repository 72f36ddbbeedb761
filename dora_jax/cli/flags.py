"""The command line of every entry point: absl flags around one --config, checked in full before JAX is imported.

    --config=configs/x.py[:arg] --config.field=value --workdir=DIR|gs://BUCKET/DIR --dry_run [--aot]
    [--begin_anew=history.1] [--accept_changes]

Consumes argv; produces a `Config` and a workdir that belongs to it: config.json (resolved, secrets blanked) and
overrides.json are written there, and a workdir of another config is refused.
Laws: a mistake is one line on stderr that names the field, and exit code 2; what is not understood is refused, never
ignored (absl drops what follows "--"; we do not).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections
from absl import app, flags, logging

from dora_jax import config as configs
from dora_jax.base import exits, helping
from dora_jax.cli import arguments, parents
from dora_jax.config import Config, ConfigError, RunError, workdirs
from dora_jax.config import files as config_files
from dora_jax.models.families import config as models
from dora_jax.models.hf_config import not_a_model, read_config
from dora_jax.plan import budget, devices, hub, presets, rates, validate
from dora_jax.trainer import objective

CONFIG_HELP = (
    "path.py[:argument], or the name of a config that comes with dora_jax; --config.field=value overrides a field"
)
WORKDIR_HELP = "where the run keeps its files, a folder or gs://bucket/folder; default: runs/<name of the config file>"
DRY_RUN_HELP = "print the resolved config, what was chosen and why, devices and memory, and stop"
DOWNLOAD_HELP = (
    "fetch models and data that are named as the Hugging Face hub does, OWNER/NAME, into models/ and data/ first"
)
ANEW_HELP = (
    "begin at version 0: move what an earlier run left in --workdir into this new folder of it, such as history.1; "
    "where that is there already, an earlier start of this command has done so, and the run goes on"
)
ACCEPT_HELP = (
    "go on in a --workdir whose run learned under other values; configs/README.md marks the fields that this is about"
)
AOT_HELP = (
    "with --dry_run: compile the run's programs for its TPU slice, which is not touched, and print what they need"
)
READERS = ("evaluate", "serve")  # purposes that start from an existing workdir, and change nothing in it
SERVED_TOKENS, SERVED_SLOTS = 1024, 16  # of --model, unless given: a prompt, an answer; samples at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandLine:
    """What one command line asks for."""

    plan: presets.Plan  # of a run that is to train, and in a dry run, with its model
    workdir: Path
    overrides: dict[str, Any]  # --config.field=value: {"field": value}
    dry_run: bool
    aot: bool = False
    in_bucket: bool = False  # the workdir is a scratch folder
    begin_anew: str = ""  # name of the folder that takes the workdir's history; empty: the run goes on
    accept_changes: bool = False  # that the workdir's run learns another thing from here on
    downloads: dict[str, str] = dataclasses.field(default_factory=dict)  # field -> name of the hub, for --download
    parent: parents.Parent | None = None  # the checkpoint of another run that model.path names

    @property
    def coming(self) -> list[str]:
        """Fields whose models a start brings."""
        return [*self.downloads, *(["model.path"] if self.parent else [])]

    @property
    def config(self) -> Config:
        """The config as given, without what the platform fills in."""
        return self.plan.asked


def run(main: Callable[[Config, Path], int | None], purpose: str = "train") -> None:
    """Parses sys.argv, records the config in the workdir, calls main(config, workdir) and exits with what it returns.

    Purposes evaluate and serve take the config of an existing workdir instead of --config, and record nothing; serve
    takes --model=FOLDER too.
    A module's own absl flags are parsed too.
    """

    def start(asked: CommandLine) -> int | None:
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # checkpoint libraries narrate at INFO, over the progress line
        if asked.dry_run:
            print(describe(asked), flush=True)
            if asked.aot:
                from dora_jax import aot  # it imports JAX

                aot.report(asked.config)
            return 0
        if asked.coming:
            for field, name in asked.downloads.items():
                hub.fetch(field, name)
            if asked.parent:
                parents.make(asked.parent)
            _check(asked, purpose)  # once more: what has come may be no model
        if asked.begin_anew:
            print(workdirs.put_history_aside(asked.workdir, asked.config, asked.begin_anew), flush=True)
        config = staged(asked, purpose)
        if purpose not in READERS:
            record(asked)
        code = main(config, asked.workdir)
        return exits.leave(code) if code == exits.RETRY else code  # what is unfinished still computes

    exits.listen()
    try:
        app.run(start, flags_parser=functools.partial(parse, purpose=purpose))
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        sys.exit(exits.BAD_USAGE)
    except Exception as error:
        sentence = str(error) if isinstance(error, RunError) else exits.refusal(error)
        if sentence is None:
            raise
        print(f"error: {sentence}", file=sys.stderr)
        sys.exit(exits.FAILED)
    except exits.Stop as stop:
        exits.leave(exits.RETRY, f"{stop} (exit code {exits.RETRY})")


def parse(argv: Sequence[str], purpose: str = "train", flag_values: flags.FlagValues = flags.FLAGS) -> CommandLine:
    """What argv (program name first) asks for; ConfigError lists everything that is wrong with it."""
    spec, rest = arguments.split(argv)
    # Every program's own flags, shown by its --help.
    flags.DEFINE_string("workdir", "", WORKDIR_HELP, flag_values=flag_values, allow_overwrite=False)
    flags.DEFINE_boolean("dry_run", False, DRY_RUN_HELP, flag_values=flag_values)
    flags.DEFINE_boolean("aot", False, AOT_HELP, flag_values=flag_values)
    flags.DEFINE_boolean("download", False, DOWNLOAD_HELP, flag_values=flag_values)
    flags.DEFINE_string("begin_anew", "", ANEW_HELP, flag_values=flag_values)
    flags.DEFINE_boolean("accept_changes", False, ACCEPT_HELP, flag_values=flag_values)
    for name in ("workdir", "dry_run", "aot", "download", "begin_anew", "accept_changes"):
        flag_values.register_key_flag_for_module(sys.argv[0], flag_values[name])
    if helping.asked_for(rest):
        flags.DEFINE_string("config", None, CONFIG_HELP, flag_values=flag_values)
        flag_values.register_key_flag_for_module(sys.argv[0], flag_values["config"])
        helping.show(rest, Config)
    tree = _saved(rest, spec, purpose) if purpose in READERS else config_files.load_file(spec, Config)
    overrides = arguments.apply_overrides(tree, rest, flag_values, Config, configs.RENAMED)
    workdir = local(
        flag_values.workdir or str(Path("runs") / config_files.run_name(spec)),
        "evaluate" if purpose in READERS else purpose,
        flag_values.dry_run,
    )
    parent = parents.settle(tree, workdir) if purpose == "train" else None
    downloads = hub.settle(tree) if flag_values.download else {}
    plan = validate.read(tree, purpose)
    if flag_values.aot and not (flag_values.dry_run and purpose == "train"):
        raise ConfigError("aot: --aot goes with --dry_run, of dora_jax.train")
    if flag_values.accept_changes and purpose != "train":
        raise ConfigError("accept_changes: --accept_changes goes with dora_jax.train alone")
    if flag_values.begin_anew:
        if purpose != "train":
            raise ConfigError("begin_anew: --begin_anew goes with dora_jax.train alone")
        if not workdirs.HISTORY.fullmatch(flag_values.begin_anew):
            raise ConfigError(
                f"begin_anew: {flag_values.begin_anew!r} is no name of a history folder, such as history.1"
            )
        if "://" in flag_values.workdir:
            raise ConfigError("begin_anew: a run in a bucket cannot put its history aside; choose another --workdir")
    asked = CommandLine(
        plan=plan,
        workdir=workdir,
        overrides=overrides,
        dry_run=flag_values.dry_run,
        aot=flag_values.aot,
        in_bucket="://" in flag_values.workdir,
        downloads=downloads,
        begin_anew=flag_values.begin_anew,
        accept_changes=flag_values.accept_changes,
        parent=parent,
    )
    return _check(asked, purpose, owns=bool(flag_values.workdir) or not flag_values.dry_run)


def describe(asked: CommandLine) -> str:
    """What --dry_run prints: the resolved config as JSON, then which part gets which device."""
    found, config, planned = asked.plan.machines, asked.plan.config, asked.plan.memory
    memory = (
        budget.describe(planned) if planned else "memory: not planned, for the machine or the model is not known yet"
    )
    notes = [f"note: {field}: --download would fetch {name}" for field, name in asked.downloads.items()]
    if asked.parent and not asked.parent.folder.exists():
        notes.append(f"note: model.path: a start exports {asked.parent} to {asked.parent.folder}")
    notes += [
        f"note: {field}: a run copies {url} to this machine first" for field, url in validate.urls(config).items()
    ]
    notes += [f"note: {problem}" for problem in validate.missing_paths(asked.config, coming=asked.coming)]
    return "\n".join(
        [
            json.dumps(configs.to_json(config), indent=2),
            f"workdir: {asked.workdir}",
            f"chosen for {found}{'' if all(machine.name for machine in found) else ', as no slice is named'}:",
            *presets.table(asked.plan.choices),
            devices.describe(config),
            memory,
            *(rates.describe(planned) if planned else ()),
            *notes,
        ]
    )


def taken(
    config: Config | Mapping[str, Any] | ml_collections.ConfigDict,
    workdir: str | os.PathLike,
    accept_changes: bool = False,
) -> CommandLine:
    """What a script asks for, checked and recorded as a command line is."""
    tree: Any = dataclasses.asdict(config) if isinstance(config, Config) else config
    folder = local(workdir, "train")
    if parent := parents.settle(tree, folder):
        parents.make(parent)
    asked = CommandLine(
        plan=validate.read(tree),
        workdir=folder,
        overrides={},
        dry_run=False,
        in_bucket="://" in os.fspath(workdir),
        accept_changes=accept_changes,
    )
    asked = _check(asked, "train")
    record(asked)
    return asked


def staged(asked: CommandLine, purpose: str) -> Config:
    """The configuration for this process: what it names by URL is copied to this machine, and checked once more."""
    if not (urls := validate.urls(asked.config)):
        return asked.config
    from dora_jax.runtime.journal import staged_inputs  # a local run needs none of it

    config = staged_inputs.staged(asked.config, urls)
    plan = validate.read(dataclasses.asdict(config), purpose)
    _check(dataclasses.replace(asked, plan=plan), purpose, owns=False)
    return config


def record(asked: CommandLine) -> None:
    """Writes config.json and overrides.json into the workdir, and into the bucket that it stands for."""
    workdirs.record(asked.workdir, asked.config, asked.overrides)
    if asked.in_bucket:
        from dora_jax.runtime.journal import workdir_mirror  # a local run needs none of it

        workdir_mirror.claim(asked.workdir)


def local(workdir: str | os.PathLike, purpose: str, dry_run: bool = False) -> Path:
    """The folder in which the run works: a bucket's is a scratch folder that stands for it. Dry runs ask no bucket."""
    workdir = os.fspath(workdir)
    if "://" not in workdir:
        return Path(workdir)
    if purpose == "sft":
        raise ConfigError("workdir: the warm start keeps its files in a local folder, not in a bucket")
    from dora_jax.runtime.journal import workdir_mirror  # a local run needs none of it

    return workdir_mirror.scratch(workdir, purpose) if dry_run else workdir_mirror.attach(workdir, purpose)


# ---------------------------------------------------------------- private


def _check(asked: CommandLine, purpose: str, owns: bool = True) -> CommandLine:
    """The command line with the model in its plan; ConfigError lists what files, machine and, where the run `owns` it,
    the workdir say against this run."""
    config = described = asked.config
    if asked.parent and not asked.parent.folder.exists():
        described = dataclasses.replace(config, model=dataclasses.replace(config.model, path=asked.parent.model))
    problems = validate.model_problems(described) if purpose == "train" else []
    if not problems and (purpose == "train" or asked.dry_run):
        try:
            asked = dataclasses.replace(asked, plan=presets.with_model(asked.plan, presets.model_of(described)))
        except ConfigError as error:
            problems = list(error.problems)
    if purpose in READERS and not problems:
        return asked
    problems = problems or _machine(asked, purpose)
    if not asked.dry_run:
        problems += validate.missing_paths(config, purpose, asked.coming)
    if problems := [*problems, *(workdirs.conflicts(asked.workdir, config, asked.accept_changes) if owns else ())]:
        raise ConfigError(problems)
    return asked


def _saved(rest: Sequence[str], spec: str, purpose: str) -> ml_collections.ConfigDict:
    """The ConfigDict of the workdir that --workdir names, before absl has parsed anything; to serve, of --model."""
    if spec:
        raise ConfigError("config: this program reads the config of --workdir; leave --config out")
    folder, named = _named("model", rest) if purpose == "serve" else "", _named("workdir", rest)
    if bool(folder) + bool(named) != 1 and purpose == "serve":
        raise ConfigError("model: name either a folder, --model=FOLDER, or a run, --workdir=DIR")
    if folder:
        return _folder(folder, coming=any(arg.lstrip("-").startswith("download") for arg in rest))
    if not named:
        raise ConfigError("workdir: missing; name the folder of a run, --workdir=DIR")
    config = validate.declared(workdirs.read(local(named, "evaluate")))
    return ml_collections.ConfigDict(dataclasses.asdict(config)).lock()


def _named(flag: str, rest: Sequence[str]) -> str:
    """The last value of a flag; empty where it is not there."""
    return next((arg.partition("=")[2] for arg in reversed(rest) if re.match(rf"--?{flag}=", arg)), "")


def _folder(path: str, coming: bool) -> ml_collections.ConfigDict:
    """The configuration of an engine for this Hugging Face folder, which no run has described. coming: it is yet to be
    downloaded."""
    tree = configs.defaults()
    tree.model.path = path
    there = (Path(path) / "config.json").is_file()
    if not there and not coming and "://" not in path:
        raise ConfigError(f"model: {not_a_model(path)}{hub.advice('model.path', path)}")
    with configs.field_context("model"):
        positions = read_config(path).max_position if there else 2 * SERVED_TOKENS
    tree.rollout.max_prompt_tokens = tree.rollout.max_new_tokens = min(SERVED_TOKENS, positions // 2)
    tree.rollout.slots = SERVED_SLOTS
    return tree


def _machine(asked: CommandLine, purpose: str) -> list[str]:
    """What the devices of this machine cannot do, as far as their number and the model are known by now."""
    plan, config = asked.plan, asked.config
    n_devices = devices.known_devices(config) or (1 if asked.dry_run else None)
    makes_model = purpose == "sft" or (validate.makes_base(config) and not plan.model)
    if problems := presets.warm_start_problems(config, plan.machines) if makes_model else []:
        return problems
    if purpose == "sft":
        return []
    if config.cluster.launcher:
        processes, tensor = (
            config.cluster.hosts_per_instance,
            {"fsdp": 1, "tensor": config.rollout.tensor, "serving": True},
        )
        if plan.model and plan.model.cache_heads % processes and processes % plan.model.cache_heads:
            return [
                (
                    f"cluster.hosts_per_instance: {processes} processes can neither split nor share the model's "
                    f"{plan.model.cache_heads} KV heads evenly"
                )
            ]
        return (_indivisible("rollout.tensor", plan.model, tensor) if plan.model else []) or _unfit(plan)
    if n_devices is None:
        return []
    try:
        mesh = devices.plan(n_devices, config).trainer_mesh
        model = _model(plan)
    except ConfigError as error:
        return list(error.problems)
    except ValueError as error:  # a sentence of models.config or hf_config
        return [f"model.path: {error}"]
    if not model:
        return _unfit(plan)
    if problems := objective.model_problems(config.trainer, model):
        return problems
    rollout = config.rollout
    axes: dict[str, dict[str, int]] = {
        "trainer.fsdp": {"fsdp": mesh[1], "tensor": 1},
        **({"trainer.expert": {"fsdp": mesh[1], "tensor": 1, "expert": mesh[4]}} if mesh[4] > 1 else {}),
        "trainer.tensor": {"fsdp": 1, "tensor": mesh[2]},
        "rollout.tensor": {"fsdp": 1, "tensor": rollout.tensor, "expert": rollout.expert, "serving": True},
    }
    return [problem for field, mesh in axes.items() for problem in _indivisible(field, model, mesh)] or _unfit(plan)


def _unfit(plan: presets.Plan) -> list[str]:
    """What the machines that the configuration names cannot do, or cannot hold."""
    if not any(machine.name for machine in plan.machines):
        return []  # JAX will tell
    return presets.problems(plan)


def _indivisible(field: str, model: models.ModelConfig, mesh: dict[str, Any]) -> list[str]:
    try:
        models.check_mesh(model, **mesh)
    except ValueError as error:
        return [f"{field}: {error}"]
    return []


def _model(plan: presets.Plan) -> models.ModelConfig | None:
    """The model that will run; None where only a later stage can tell."""
    config = plan.asked
    if (Path(config.model.path) / "config.json").is_file():
        return plan.model
    sft = config.sft
    if sft.init or not validate.makes_base(config):
        return None
    rows = sft.vocab_size or config.trainer.tensor * config.rollout.tensor  # 0: the tokenizer decides, later
    return presets.fresh_model(sft, rows)
