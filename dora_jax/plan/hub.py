"""Models and datasets that a configuration names as the Hugging Face hub does, OWNER/NAME, where a folder is meant.

Consumes such fields; produces the command that downloads the model, or, with --download, the folder models/OWNER/NAME.
A dataset's name may go on to a split, openai/gsm8k/main/train, whose files come to data/OWNER/NAME.
Laws: nothing is fetched that --download did not ask for; a folder appears whole or not at all; weights and texts are
fetched, never code.
"""

from __future__ import annotations

import re
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from dora_jax.config import ConfigError, RunError
from dora_jax.config.task import ROW_FILES, splits

FIELDS = ("model.path", "sft.init", "reward_model.path")  # those that name a model's folder
FOLDER, DATA = Path("models"), Path("data")
PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt")
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_name(path: str) -> bool:
    """Whether a path can only be a name of the hub: neither the path nor its parent folder exists."""
    parent = Path(path).parent
    return bool(NAME.fullmatch(path)) and parent != FOLDER and not parent.exists()


def advice(field: str, path: str) -> str:
    """Advice about a path that does not exist, as the end of a sentence; empty where the path is no name of the hub."""
    folder = FOLDER / path
    if field.startswith("task.") and is_dataset(path):
        return "; if it is a dataset of the Hugging Face hub, add --download"
    if field not in FIELDS or not is_name(path):
        return ""
    if folder.exists():
        return f", but {folder} does: name that"
    return (
        f"; if it is a model of the Hugging Face hub, run `hf download {path} --local-dir {folder}` and name that "
        f"folder, or add --download"
    )


def is_dataset(path: str) -> bool:
    """Whether the path of rows can only be a name of the hub: no such folder is there, and no file is named."""
    owner, _, rest = path.partition("/")
    named = NAME.fullmatch("/".join(path.split("/")[:2])) and not path.endswith(ROW_FILES)
    return bool(named and rest) and Path(owner) != DATA and not Path(owner).exists() and not path.endswith("/")


def settle(tree: MutableMapping[str, Any]) -> dict[str, str]:
    """Replaces each name of the hub in a configuration tree by its folder; returns field -> name."""
    names = {}
    task = tree["task"]
    sections = {"task": task, **{f"task.mix.{name}": entry for name, entry in task["mix"].items()}}
    rows = [(f"{where}.{leaf}", each, leaf) for where, each in sections.items() for leaf in ("path", "heldout_path")]
    models = [(field, tree[field.partition(".")[0]], field.partition(".")[2]) for field in FIELDS]
    for field, section, leaf in [*models, *rows]:
        name = section.get(leaf) or ""
        if is_name(name) if field in FIELDS else is_dataset(name):
            names[field], section[leaf] = name, str((FOLDER if field in FIELDS else DATA) / name)
    return names


def fetch(field: str, name: str) -> None:
    """Downloads a model, or a split of a dataset, into its folder, unless it is there; the files of a killed download
    are used again.

    ConfigError where the hub has no such thing or does not give it; RunError where it cannot be reached.
    """
    kind = "model" if field in FIELDS else "dataset"
    name, split = "/".join(name.split("/")[:2]), "/".join(name.split("/")[2:])
    folder = (FOLDER if kind == "model" else DATA) / name
    if folder.exists() and (kind == "model" or any(folder.glob(f"{split}*" if split else "*"))):
        return
    import huggingface_hub  # only a download needs it
    from huggingface_hub import errors

    partial, patterns = folder.with_name(f".{folder.name}.partial"), list(PATTERNS)
    print(f"{field}: downloading {name} into {folder}", file=sys.stderr, flush=True)
    try:
        if kind == "dataset":
            known = splits(huggingface_hub.HfApi().list_repo_files(name, repo_type=kind))
            wanted = [split] if split in known else [each for each in known if each.startswith(split)]
            if len(wanted) != 1:
                listed = ", ".join(f"{name}/{each}" for each in list(known)[:8]) or "no file of rows"
                raise ConfigError(f"{field}: the dataset {name} has {listed}; name one of them")
            patterns = known[wanted[0]]
        huggingface_hub.snapshot_download(name, repo_type=kind, local_dir=partial, allow_patterns=patterns)
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{field}: the hub gives {name} only to accounts that have accepted its terms: do so on its page, "
            f"and set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(f"{field}: the hub has no {kind} {name}, or does not show it without HF_TOKEN") from error
    except OSError as error:  # the network, the hub, the disk
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise RunError(f"{field}: {name} cannot be downloaded: {why}; the same command goes on") from error
    if kind == "model":
        partial.rename(folder)
        return
    for file in patterns:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (partial / file).replace(folder / file)
