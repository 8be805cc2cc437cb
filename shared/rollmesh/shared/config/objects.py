"""Load a class or function of a user by name: `package.module:Name`, `package.module.Name` or `file.py:Name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rollmesh.shared.config.extras import install_hint
from rollmesh.shared.config.moved import moved_hint
from rollmesh.shared.config.user_code import explain, user_traceback
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.process.interpreter_tuning import without_collections


def load_object(name: str, base_dir: str | Path | None = None) -> Any:
    """Return the object called `name`. Relative files are relative to `base_dir`, by default the current folder.

    A file is executed once per process, so its classes keep their identity. Raise ConfigError if the file, module or
    name does not exist. An exception of the module is chained to it.
    """
    source, attribute = _split(name)
    module = _load_file(name, source, base_dir) if source.endswith(".py") else _import(name, source)
    found: Any = module
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ConfigError(f"`{name}`: {source} has no `{attribute}`{_public_names(module)}", name=name) from None
    return found


def _split(name: str) -> tuple[str, str]:
    # Split at the last colon, because a path may contain colons and an attribute cannot.
    source, separator, attribute = name.rpartition(":" if ":" in name else ".")
    if not separator or not source or not attribute or name.endswith(".py"):
        raise ConfigError(f"`{name}`: expected package.module:Name or file.py:Name", name=name)
    return source, attribute


def _import(name: str, module: str) -> ModuleType:
    try:
        with without_collections():
            return importlib.import_module(module)
    except ModuleNotFoundError as err:
        if err.name is not None and (module == err.name or module.startswith(f"{err.name}.")):
            remedy = moved_hint(module) or "is it installed?"
            raise ConfigError(f"`{name}`: there is no module `{err.name}`; {remedy}", name=name) from err
        remedy = moved_hint(err.name) or install_hint(err.name)
        raise ConfigError(
            f"`{name}`: importing `{module}` failed: {err}{f'; {remedy}' if remedy else ''}", name=name
        ) from err
    except Exception as err:  # user code may raise anything; the name that led to it must be reported
        raise ConfigError(f"`{name}`: importing `{module}` failed: {explain(err)}", name=name) from err


def _load_file(name: str, source: str, base_dir: str | Path | None) -> ModuleType:
    path = (Path(base_dir or ".") / Path(source).expanduser()).resolve()
    if not path.is_file():
        raise ConfigError(f"`{name}`: there is no file {path}", name=name)
    # The digest distinguishes files of the same name. sys.modules makes one module of each file.
    module_name = f"_rollmesh_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before the execution, because dataclasses and msgspec look up their module
    try:
        spec.loader.exec_module(module)
    except Exception as err:  # user code may raise anything; the name that led to it must be reported
        del sys.modules[module_name]
        raise ConfigError(f"`{name}`: running {path} failed: {explain(err)}{_frames(err)}", name=name) from err
    return module


def _frames(error: Exception) -> str:
    """Return the frames of the user code. The message of a SyntaxError already contains its location."""
    return "" if isinstance(error, SyntaxError) else f"\n{user_traceback(error)}"


def _public_names(module: ModuleType) -> str:
    names = [
        n for n, v in vars(module).items() if not n.startswith("_") and getattr(v, "__module__", "") == module.__name__
    ]
    return f"; it defines: {', '.join(sorted(names))}" if names else ""
