"""The Python state of a session as a stream of pickles, written in one jail and read in a fresh one of the same
profile.

Saved is what the session's code created: each name of its namespace, the names that it deleted, the working directory,
sys.path, the environment, the state of the `random` module, and the source lines for later tracebacks. Values shared by
several names stay shared. Functions and classes of the session are saved by value (cloudpickle); their globals are the
namespace itself, before and after. What the profile provides is saved by name, and not at all while unchanged. Names
that cannot be saved are reported.

Everything read here is hostile, and unpickling executes it. That is allowed only inside the jail, where the session's
code could have executed the same.
"""

from __future__ import annotations

import functools
import importlib
import io
import linecache
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any

from rollmesh.sandbox_runtime import process_env

_NAMESPACE = "namespace"
_BASE = "base"
_OWN_NAMES = frozenset({"__name__", "__builtins__"})
_CODE_NAME = "<call "
"""Prefix of the file names of code that the interpreter compiles."""
_PROVIDED = (FunctionType, type, ModuleType)
_UNCHANGING = (*_PROVIDED, str, bytes, int, float, complex, bool, type(None))


class StateError(Exception):
    """The saved state cannot be loaded."""


def save(namespace: dict[str, Any], base: Mapping[str, Any], out: Any) -> list[str]:
    """Write the state to `out` and return the names that could not be saved. Raises only what a hostile object raises
    at its second pickling."""
    wanted = {name: value for name, value in namespace.items() if _is_wanted(name, value, base)}
    make = functools.partial(_pickler_class(), namespace=namespace, base=base)
    lost = _lost(wanted, make)
    for name in lost:
        del wanted[name]
    pickler = make(out)
    pickler.dump(
        _process_state() | {"num_values": len(wanted), "removed": [name for name in base if name not in namespace]}
    )
    for name, value in wanted.items():
        pickler.dump(name)
        pickler.dump(value)
    return lost


def load(namespace: dict[str, Any], base: Mapping[str, Any], source: io.BufferedReader) -> int:
    """Restore a fresh namespace and return the number of its last run. Raises StateError."""
    if not source.peek(1):
        return 0  # files only, for example of a repository
    unpickler = _Unpickler(source, namespace, base)
    what = "the state"
    try:
        saved = unpickler.load()
        _restore_process_state(saved)
        for name in saved["removed"]:
            namespace.pop(name, None)
        for _ in range(saved["num_values"]):
            name = unpickler.load()
            what = f"the name {name!r}"
            namespace[name] = unpickler.load()
        random.setstate(saved["random"])
        return max((int(name[len(_CODE_NAME) : -1]) for name in saved["sources"]), default=0)
    except BaseException as error:
        raise StateError(f"cannot load {what}: {type(error).__name__}: {error}"[:500]) from error


def _is_wanted(name: object, value: object, base: Mapping[str, Any]) -> bool:
    if not isinstance(name, str) or name in _OWN_NAMES:
        return False
    return not (name in base and base[name] is value and isinstance(value, _UNCHANGING))


def _lost(wanted: Mapping[str, Any], make: Callable[[Any], Any]) -> list[str]:
    """Return the names that cannot be pickled. Nothing is written yet, because a stream cannot drop half of a value."""
    if _can_pickle(make, (value for value in wanted.values())):
        return []
    return [name for name, value in wanted.items() if not _can_pickle(make, [value])]


def _can_pickle(make: Callable[[Any], Any], values: Iterable[Any]) -> bool:
    pickler = make(_DiscardingWriter())
    try:
        for value in values:
            pickler.dump(value)
    except BaseException:  # noqa: BLE001 - a foreign __reduce__ may raise anything
        return False
    return True


class _DiscardingWriter(io.RawIOBase):
    """A file that discards everything."""

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


def _process_state() -> dict[str, Any]:
    return {
        "directory": os.getcwd(),
        "path": [entry for entry in sys.path if isinstance(entry, str)],
        "environment": dict(os.environ),
        "private_dir": process_env.private_dir(),
        "random": random.getstate(),
        "sources": {
            name: entry[2]
            for name, entry in linecache.cache.items()
            if name.startswith(_CODE_NAME) and len(entry) > 2  # a lazy entry has no lines
        },
    }


def _moved(path: str, saved: Mapping[str, Any]) -> str:
    """Translate a path in the private directory of the saved session to this session."""
    before, here = saved["private_dir"], process_env.private_dir()
    return here + path[len(before) :] if path == before or path.startswith(before + "/") else path


def _restore_process_state(saved: Mapping[str, Any]) -> None:
    """Restore the process state before any value is loaded: modules of the session are imported by name through
    sys.path."""
    sys.path[:] = [_moved(entry, saved) for entry in saved["path"]]
    os.environ.clear()
    os.environ.update({name: _moved(value, saved) for name, value in saved["environment"].items()})
    os.chdir(_moved(saved["directory"], saved))
    for name, lines in saved["sources"].items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


@functools.cache
def _pickler_class() -> Any:
    """Return cloudpickle's pickler, extended so that the namespace and the profile's values are saved by reference."""
    cloudpickle = importlib.import_module("cloudpickle")

    class StatePickler(cloudpickle.Pickler):  # type: ignore[misc, name-defined]
        def __init__(self, file: Any, *, namespace: dict[str, Any], base: Mapping[str, Any]) -> None:
            super().__init__(file)
            self._namespace = namespace
            self._provided = {id(value): name for name, value in base.items() if isinstance(value, _PROVIDED)}
            self.globals_ref[id(namespace)] = namespace

        def persistent_id(self, value: object) -> tuple[str, ...] | None:
            if value is self._namespace:
                return (_NAMESPACE,)
            name = self._provided.get(id(value))
            return None if name is None else (_BASE, name)

        def _dynamic_function_reduce(self, func: FunctionType) -> Any:
            reduced = super()._dynamic_function_reduce(func)
            if func.__globals__ is self._namespace:
                reduced[2][1]["__globals__"] = {}  # its globals are saved with the namespace
            return reduced

    return StatePickler


class _Unpickler(pickle.Unpickler):
    def __init__(self, source: io.BufferedReader, namespace: dict[str, Any], base: Mapping[str, Any]) -> None:
        super().__init__(source)
        self._namespace = namespace
        self._base = base

    def persistent_load(self, key: Any) -> Any:
        return self._namespace if key[0] == _NAMESPACE else self._base[key[1]]
