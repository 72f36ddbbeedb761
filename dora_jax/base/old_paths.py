"""Module paths of earlier versions, which configs and scripts of users name: one table, one finder.

An import of an old path gives the module itself under its new one, so that a class has one identity; `python -m OLD`
runs the module, or names its new command where that has other arguments. `dora_jax/__init__.py` installs the finder
behind every other, so that a path that exists costs nothing.
"""

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence

# new package <- modules that lay in the old one under the same name
MOVED = {
    ("dora_jax", "dora_jax.base"): "box_digest callables chips chrome_trace config_tree console digest exits"
    " helping intervals metrics prometheus redaction retrying_file state_files",
    ("dora_jax", "dora_jax.cli"): "arguments flags",
    ("dora_jax", "dora_jax.config"): "workdirs",
    ("dora_jax", "dora_jax.costs"): "recording",
    ("dora_jax", "dora_jax.models"): "tokenizer",
    ("dora_jax", "dora_jax.plan"): "budget devices hub memory presets validate",
    ("dora_jax.tasks", "dora_jax.tasks.sandbox"): "calls program_server programs render render_worker"
    " seccomp supervisor",
    ("dora_jax.tasks", "dora_jax.tasks.environments"): "bridge by_task calculator"
    " environment_worker noise renderer_bridge skyrl_gym",
    ("dora_jax.models", "dora_jax.models.families"): "config",
}
RENAMED = {
    "dora_jax.aot_roles": "dora_jax.aot.roles",
    "dora_jax.aot_slices": "dora_jax.aot.slices",
    "dora_jax.base.intervals": "dora_jax.base.metrics",
    "dora_jax.base.redaction": "dora_jax.base.config_tree",
    "dora_jax.bench.adapters": "dora_jax.bench.decode",
    "dora_jax.bench.aot": "dora_jax.bench.device",
    "dora_jax.bench.checkpoint": "dora_jax.bench.train_step",
    "dora_jax.bench.device_model": "dora_jax.bench.device",
    "dora_jax.bench.drafts": "dora_jax.bench.decode",
    "dora_jax.bench.drift": "dora_jax.bench.train_step",
    "dora_jax.bench.host_time": "dora_jax.bench.train_step",
    "dora_jax.bench.migrate": "dora_jax.bench.transfer",
    "dora_jax.bench.publish": "dora_jax.bench.transfer",
    "dora_jax.bench.real_model": "dora_jax.bench.learning",
    "dora_jax.bench.satisfaction": "dora_jax.bench.learning",
    "dora_jax.config_cluster": "dora_jax.config.cluster",
    "dora_jax.config_files": "dora_jax.config.files",
    "dora_jax.config_live": "dora_jax.config.live",
    "dora_jax.config_task": "dora_jax.config.task",
    "dora_jax.runtime.journal.journal_digests": "dora_jax.runtime.journal.journal_audit",
    "dora_jax.serving.counters": "dora_jax.base.prometheus",
    "dora_jax.serving.text": "dora_jax.serving.chat",
    "dora_jax.sim.agenda": "dora_jax.sim.world",
    "dora_jax.sim.chips": "dora_jax.sim.world",
    "dora_jax.sim.environments": "dora_jax.sim.world",
    "dora_jax.sim.trace": "dora_jax.sim.meter",
    "dora_jax.spelling": "dora_jax.base.config_tree",
    "dora_jax.tasks.environment_process": "dora_jax.tasks.environments",
    "dora_jax.tasks.environments.environment_process": "dora_jax.tasks.environments",
    "dora_jax.tasks.environments.noise": "dora_jax.tasks.environments.environment_worker",
    "dora_jax.tasks.identity": "dora_jax.tasks.source",
    "dora_jax.tasks.program_walls": "dora_jax.tasks.sandbox.bubblewrap",
    "dora_jax.tasks.sandbox.render_worker": "dora_jax.tasks.sandbox.render",
    "dora_jax.tasks.token_bridge": "dora_jax.tasks.environments.bridge",
    "dora_jax.trainer.routing": "dora_jax.trainer.health",
    "dora_jax.update_costs": "dora_jax.costs.update",
}
COMMANDS = {  # programs that are called in another way now
    **{
        f"dora_jax.bench.{name}": f"tests.soak.{name}"
        for name in ("chaos", "damage", "end_to_end", "exact", "fuzz_ports", "gang_kills", "kill_rate", "sandbox")
    },
    "dora_jax.bench.environments": "tests.soak.end_to_end --environments",
    "dora_jax.bench.migrate_processes": "dora_jax.bench.transfer migrate --processes",
    "dora_jax.bench.recorded": "tests.soak.end_to_end --recorded=DIRECTORY",
    "dora_jax.bench.paced": "tests.soak.end_to_end",
    "dora_jax.bench.smollm": "dora_jax.bench.learning real_model",
    "dora_jax.bench.waiting": "dora_jax.bench.transfer migrate --waiting",
}
TABLE = {f"{old}.{name}": f"{new}.{name}" for (old, new), names in MOVED.items() for name in names.split()}
# A module that moved, and was then renamed or merged into another: the table names where it is now.
TABLE = RENAMED | {old: RENAMED.get(new, new) for old, new in TABLE.items()}


class OldPaths:
    """Finder and loader of the paths in TABLE, by their methods alone: importlib.abc takes 10 ms of every start."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if command := COMMANDS.get(fullname):
            raise ImportError(f"{fullname} is `python -m {command}` now", name=fullname)
        if fullname not in TABLE:
            return None
        origin = self._spec(fullname).origin  # `python -m` makes it sys.argv[0]
        return importlib.machinery.ModuleSpec(fullname, self, origin=origin)  # type: ignore[arg-type]

    def _spec(self, fullname: str) -> importlib.machinery.ModuleSpec:
        spec = importlib.util.find_spec(TABLE[fullname])
        assert spec is not None
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return importlib.import_module(TABLE[spec.name])

    def exec_module(self, module: types.ModuleType) -> None:
        """The import system has written the old spec into the module, which has run: give it its own back."""
        module.__spec__ = importlib.util.spec_from_file_location(module.__name__, module.__file__)

    def get_code(self, fullname: str) -> types.CodeType | None:
        """What runpy runs for `python -m`."""
        loader = self._spec(fullname).loader
        assert isinstance(loader, importlib.machinery.SourceFileLoader)
        return loader.get_code(TABLE[fullname])

    def get_source(self, fullname: str) -> None:
        return None


def install() -> None:
    if not any(isinstance(finder, OldPaths) for finder in sys.meta_path):
        sys.meta_path.append(OldPaths())
