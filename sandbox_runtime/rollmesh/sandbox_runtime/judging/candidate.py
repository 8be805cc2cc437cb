"""The candidate's side of a judgment: loads its file and answers one question at a time. Runs inside the candidate's jail.

Nothing here knows an expected answer, a test's name or how many tests there are, and nothing here is trusted: the candidate
shares the process and may replace any of it. All it gains is another answer, which the service compares like every answer.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from typing import Any

from rollmesh.sandbox_runtime.process_env import private_dir

MODULE = "solution"
"""Name under which the candidate's file is imported, whatever the file is called."""


def load(path: str) -> None:
    """Execute the candidate's file as a module; its other files can be imported beside it."""
    sys.dont_write_bytecode = True
    sys.path.insert(0, private_dir())
    spec = importlib.util.spec_from_file_location(MODULE, os.path.join(private_dir(), path))
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    spec.loader.exec_module(module)


def ask(function: str, arguments: str) -> str:
    """Call a function of the candidate with JSON arguments: an array by position, an object by name. JSON of what it returns."""
    given = json.loads(arguments)
    target = find(function)
    result = target(**given) if isinstance(given, dict) else target(*given)
    return json.dumps(result, allow_nan=False, default=_plain)


def find(name: str) -> Any:
    """What a dotted name means in the candidate's module. `Class.method` stands for the method of a fresh instance."""
    target: Any = sys.modules[MODULE]
    parts = name.split(".")
    for number, part in enumerate(parts, start=1):
        target = getattr(target, part)
        if isinstance(target, type) and number < len(parts):
            target = target()
    return target


def _plain(value: object) -> object:
    """Numbers and arrays of numpy and its like as JSON has them."""
    to_list = getattr(value, "tolist", None)
    if to_list is None:
        raise TypeError(f"the result holds a {type(value).__name__}, which JSON has no form for")
    return to_list()
