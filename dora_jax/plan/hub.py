"""Models that a configuration names as the Hugging Face hub does, OWNER/NAME, where a folder is meant.

Consumes such fields; produces the command that downloads the model, or, with --download, the folder models/OWNER/NAME.
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

FIELDS = ("model.path", "sft.init", "reward_model.path")  # those that name a model's folder
FOLDER = Path("models")
PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt")
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_name(path: str) -> bool:
    """Whether a path can only be a name of the hub: neither the path nor its parent folder exists."""
    parent = Path(path).parent
    return bool(NAME.fullmatch(path)) and parent != FOLDER and not parent.exists()


def advice(path: str) -> str:
    """Advice about a path that does not exist, as the end of a sentence; empty where the path is no name of the hub."""
    folder = FOLDER / path
    if not is_name(path):
        return ""
    if folder.exists():
        return f", but {folder} does: name that"
    return (
        f"; if it is a model of the Hugging Face hub, run `hf download {path} --local-dir {folder}` and name that "
        f"folder, or add --download"
    )


def settle(tree: MutableMapping[str, Any]) -> dict[str, str]:
    """Replaces each name of the hub in a configuration tree by its folder; returns field -> name."""
    names = {}
    for field in FIELDS:
        section, _, leaf = field.partition(".")
        if is_name(name := tree[section][leaf]):
            names[field], tree[section][leaf] = name, str(FOLDER / name)
    return names


def fetch(field: str, name: str) -> None:
    """Downloads a model into its folder, unless the folder exists; the files of a killed download are used again.

    ConfigError where the hub has no such model or does not give it; RunError where it cannot be reached.
    """
    folder = FOLDER / name
    if folder.exists():
        return
    import huggingface_hub  # only a download needs it
    from huggingface_hub import errors

    partial = folder.with_name(f".{folder.name}.partial")
    print(f"{field}: downloading {name} into {folder}", file=sys.stderr, flush=True)
    try:
        huggingface_hub.snapshot_download(name, local_dir=partial, allow_patterns=list(PATTERNS))
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{field}: the hub gives {name} only to accounts that have accepted its terms: do so on its page, "
            f"and set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(f"{field}: the hub has no model {name}, or does not show it without HF_TOKEN") from error
    except OSError as error:  # the network, the hub, the disk
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise RunError(f"{field}: {name} cannot be downloaded: {why}; the same command goes on") from error
    partial.rename(folder)
