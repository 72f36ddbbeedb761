"""Plug-ins: "module.name" -> the object, and a callable of the caller's own file -> its import path.

An installed package may register a short name for an import path, as an entry point of the group dora_jax.KIND; the
kinds are policy_loss, advantage, correction, reward, environment, sink, family, launcher and source.

A script that starts a run may define its reward itself. A worker then imports the script, and the import ends where the
script calls `fit`: what stands above that call is defined, what stands below is not, and no second run starts.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

_importing: str | None = None  # the module that `import_module` is in


class RunStarts(BaseException):
    """The module that is imported calls `fit`. No Exception: the module's own handlers shall not end it."""


def import_module(name: str) -> types.ModuleType:
    """The module; where it calls `fit` at its top level, what it has defined until then. Raises what the module
    raises."""
    global _importing
    _importing = name
    try:
        return importlib.import_module(name)
    except RunStarts as reached:
        module: types.ModuleType = reached.args[0]
        sys.modules[name] = module
        return module
    finally:
        _importing = None


@functools.cache
def registered(kind: str) -> Mapping[str, str]:
    """Short name -> import path: what installed packages register of a kind."""
    return {entry.name: entry.value.replace(":", ".") for entry in metadata.entry_points(group=f"dora_jax.{kind}")}


def imported(path: str, kind: str = "", wanted: type | None = None) -> Any:
    """The callable, or object of the class `wanted`, at the import path "module.name" or of a registered name.

    ValueError names in one sentence the path and what it lacks.
    """
    path = registered(kind).get(path, path) if "." not in path else path
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise ValueError(
            f"{path!r} is not an import path such as my_module.name, and no installed package registers this name as "
            f"an entry point of dora_jax.{kind}"
        )
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ValueError(f"{path}: there is no module {error.name}") from error
        raise ValueError(f"{path}: {module_name} imports {error.name}, which is not there") from error
    except Exception as error:  # the user's own code; always raised again, with the path
        raise ValueError(f"{path}: importing {module_name} raised {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), n=1)
        raise ValueError(f"{path}: {module_name} has no {name}" + (f"; the nearest is {near[0]}" if near else ""))
    found = getattr(module, name)
    if not (isinstance(found, wanted) if wanted else callable(found)):
        raise ValueError(f"{path} is a {type(found).__name__}, not a {wanted.__name__ if wanted else 'callable'}")
    return found


def end_import() -> None:
    """`fit` calls this first: raises RunStarts in a process that only imports the caller's file."""
    if _importing is not None:
        raise RunStarts(sys.modules[_importing])


def path_of(function: Any) -> str:
    """The import path of a callable, "module.name", by which every process of the run finds it. What has no name of its
    own, such as an object or a lambda, has that of a global variable that holds it.

    ValueError says in one sentence why there is none, and what to do.
    """
    name, module = getattr(function, "__qualname__", None), getattr(function, "__module__", None)
    if not callable(function):
        raise ValueError(f"{function!r:.80} is a {type(function).__name__}, neither a callable nor an import path")
    if name is None or not name.isidentifier():
        first = [sys.modules[each] for each in (module, type(function).__module__) if each in sys.modules]
        others = [each for key, each in list(sys.modules.items()) if key != "__main__"]
        for place in [*first, *others, sys.modules["__main__"]]:
            held = [key for key, value in list(getattr(place, "__dict__", {}).items()) if value is function]
            if held and held[0].isidentifier():
                module, name = place.__name__, held[0]
                break
    if name is None or module is None:
        raise ValueError(
            f"an object of the class {type(function).__name__} has no name to import; give it one at the top level of "
            "its file"
        )
    if "<lambda>" in name:
        raise ValueError(
            "a lambda has no name that a worker process could import; give it one at the top level of its file, or "
            "write it as a def"
        )
    if "<locals>" in name:
        raise ValueError(
            f"{name.rpartition('.')[2]} is defined inside {name.partition('.')[0]}, where no worker process can import "
            "it; define it at the top level of its file"
        )
    if "." in name:
        raise ValueError(f"{name} belongs to a class; a worker process imports functions of the top level of a file")
    if getattr(sys.modules.get(module), name, None) is not function:
        raise ValueError(f"{module}.{name} is another object by now, so a worker process would import that one")
    if module != "__main__":
        return f"{module}.{name}"
    main = sys.modules["__main__"]
    if spec := getattr(main, "__spec__", None):
        return f"{spec.name}.{name}"  # python -m
    file = getattr(main, "__file__", None)
    if file is None or not os.path.isfile(file):
        raise ValueError(
            f"{name} is defined in a notebook or at a prompt, which no worker process can import; write it to a file, "
            "in a notebook by a first line %%writefile my_rewards.py, and import it from there"
        )
    stem, ending = os.path.splitext(os.path.basename(file))
    if ending != ".py" or not stem.isidentifier():
        raise ValueError(
            f"{name} is defined in {os.path.basename(file)}, which is no name of a module, so no worker process can "
            "import it; rename the file, or move the function to a module"
        )
    found = importlib.util.find_spec(stem)
    if (
        found is None
        or not found.origin
        or not os.path.exists(found.origin)
        or not os.path.samefile(found.origin, file)
    ):
        where = found.origin if found and found.origin else "nothing"
        raise ValueError(
            f"{name} is defined in {file}, and a worker process that imports {stem} finds {where}; rename the file, or "
            "move the function to a module"
        )
    return f"{stem}.{name}"


def package_alone() -> tempfile.TemporaryDirectory[str]:
    """A folder for PYTHONPATH with this package and nothing that is installed beside it."""
    folder = tempfile.TemporaryDirectory(prefix="dora_jax-")
    package = Path(__file__).parents[1]
    os.symlink(package, Path(folder.name) / package.name)
    return folder
