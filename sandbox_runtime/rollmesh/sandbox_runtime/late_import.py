"""A package that sessions can import although its files are not in the jail: its code is read before containment and
executed on the first import.

Used for packages that few sessions need: the work of `threading` and `logging` after a fork alone is a tenth of a
session's start.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any


class LatePackage:
    """Finder and loader of one package without subpackages."""

    def __init__(self, name: str, directory: str) -> None:
        """Read the package. Raises OSError, and ImportError if it does not exist."""
        self._name = name
        self._codes: dict[str, CodeType] = {}
        for path in Path(directory).glob("*.py"):
            module = name if path.stem == "__init__" else f"{name}.{path.stem}"
            code = SourceFileLoader(module, str(path)).get_code(module)
            assert code is not None  # a source file always has one
            self._codes[module] = code
        if name not in self._codes:
            raise ImportError(f"no package {name} in {directory}")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of the package; implements a finder of `sys.meta_path`."""
        del path, target
        if fullname not in self._codes:
            return None
        loader: Any = self  # implements the protocol; `importlib.abc` would be another import
        return ModuleSpec(fullname, loader, origin="<kept>", is_package=fullname == self._name)

    def create_module(self, _spec: ModuleSpec) -> ModuleType | None:
        """Return None, so that a plain module is created."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Execute a module of the package; implements a loader."""
        exec(self._codes[module.__name__], module.__dict__)  # noqa: S102 - the operator's own package


def register(name: str, directory: str) -> None:
    """Make `import name` find the package in `directory` if no other finder does."""
    sys.meta_path.append(LatePackage(name, directory))
