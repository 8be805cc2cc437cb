"""The candidate's side of a judgment: loads its file and answers one request at a time. Runs inside the candidate's
jail.

This code does not contain an expected answer, a test's name or the number of tests, and it is not trusted: the
candidate shares the process and may replace any of it. It gains only another answer, which the service compares like
every answer.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from typing import Any

from rollmesh.sandbox_runtime.process_env import private_dir

MODULE = "solution"
"""Name under which the candidate's file is imported, whatever the name of the file."""


def load(path: str) -> None:
    """Execute the candidate's file as a module, which can import the candidate's other files."""
    sys.dont_write_bytecode = True
    sys.path.insert(0, private_dir())
    spec = importlib.util.spec_from_file_location(MODULE, os.path.join(private_dir(), path))
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    spec.loader.exec_module(module)


def ask(function: str, arguments: str) -> str:
    """Call a function of the candidate with JSON arguments: an array by position, an object by name. Return its result
    as JSON."""
    given = json.loads(arguments)
    target = find(function)
    result = target(**given) if isinstance(given, dict) else target(*given)
    return json.dumps(result, allow_nan=False, default=_plain)


def find(name: str) -> Any:
    """Resolve a dotted name in the candidate's module. `Class.method` means the method of a fresh instance."""
    target: Any = sys.modules[MODULE]
    parts = name.split(".")
    for number, part in enumerate(parts, start=1):
        target = getattr(target, part)
        if isinstance(target, type) and number < len(parts):
            target = target()
    return target


def _plain(value: object) -> object:
    """Convert numbers and arrays of numpy and similar libraries to JSON values."""
    to_list = getattr(value, "tolist", None)
    if to_list is None:
        raise TypeError(f"the result contains a {type(value).__name__}, which JSON cannot represent")
    return to_list()
