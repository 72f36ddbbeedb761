"""Arguments of a program around one --config: which file it names, and --config.field=value on what the file returned.

Consumes argv, a ConfigDict and the dataclass that describes it; changes the ConfigDict, or says in a ConfigError what
is wrong. Law: what is not understood is refused, never ignored (absl drops what follows "--"; this file does not).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from dora_jax.base import config_tree
from dora_jax.base.config_tree import nearest
from dora_jax.config import ConfigError


def split(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The value of --config ("" where there is none) and argv without it."""
    if "--" in argv:
        behind = list(argv)[list(argv).index("--") + 1 :]
        raise ConfigError(f'argument {" ".join(behind) or "--"!r}: nothing behind "--" is read; leave the "--" out')
    spec, rest = "", []
    args = iter(argv)
    for arg in args:
        match = re.fullmatch(r"--?config(=(.*))?", arg, re.DOTALL)
        if match:
            before, spec = spec, match[2] if match[1] else next(args, "")
            if before not in ("", spec):
                raise ConfigError(f"config: {before} and {spec} are both named; leave one of them out")
        else:
            rest.append(arg)
    return spec, rest


def apply_overrides(
    tree: ml_collections.ConfigDict,
    argv: Sequence[str],
    flag_values: flags.FlagValues,
    cls: type,
    renamed: Mapping[str, str] = config_tree.NONE,
) -> dict[str, Any]:
    """Parses the flags, --config.field=value into the tree; returns these overrides.

    cls: the dataclass of the tree; renamed: as in config_tree.build. ConfigError says what is wrong.
    """
    # Every field, and the entries that the config file gave the free-form ones.
    known = list(config_tree.fields(cls))
    for name in config_tree.free_form(cls):
        known += _entries(functools.reduce(getattr, name.split("."), tree), name)
    problems = []
    for arg in argv:
        match = re.match(r"--?(no)?config\.([^=]*)", arg)
        if match and match[2] in renamed:
            problems.append(f"config.{match[2]}: renamed to config.{renamed[match[2]]}")
        elif match and match[2] not in known:
            inside = [name for name in known if name.startswith(match[2] + ".")]
            what = "a section, not a field" if inside else "unknown field"
            problems.append(f"config.{match[2]}: {what}; the nearest is config.{nearest(match[2], inside or known)}")
    if problems:
        raise ConfigError(problems)
    try:
        config_flags.DEFINE_config_dict("config", tree, flag_values=flag_values, sys_argv=list(argv))
        leftover = flag_values(list(argv))[1:]
    except flags.IllegalFlagValueError as error:
        message = " ".join(str(error).split())
        # absl's "flag --config.steps=ten: why" as one of our sentences, with the type that the field has
        match = re.match(r"flag --(config\.([^=]+))=(.*?): ", message)
        kind = config_tree.fields(cls).get(match[2]) if match else None
        if match and kind is not None:
            message = f"{match[1]}: {match[3]!r} is not of its type, {getattr(kind, '__name__', kind)}"
        raise ConfigError(message) from error
    except flags.Error as error:
        raise ConfigError(" ".join(str(error).split())) from error
    if leftover:
        closest = nearest(leftover[0].lstrip("-").partition("=")[0], [f"config.{name}" for name in known])
        raise ConfigError(f"argument {leftover[0]!r}: not a flag; the nearest is --{closest}=...")
    return config_flags.get_override_values(flag_values["config"])


# ---------------------------------------------------------------- private


def _entries(tree: ml_collections.ConfigDict, prefix: str) -> list[str]:
    """The entries of a free-form field, nested ones included."""
    found: list[str] = []
    for name, value in tree.items():
        found += [
            f"{prefix}.{name}",
            *(_entries(value, f"{prefix}.{name}") if isinstance(value, ml_collections.ConfigDict) else ()),
        ]
    return found
