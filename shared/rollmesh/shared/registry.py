"""Extension points found by a short name, or loaded from a user's code by `file.py:Name`.

Built-ins are listed by dotted name and imported when asked for, so that listing a heavy one costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.shared.config import config_from_dict
from rollmesh.shared.errors import ConfigError, MeshError
from rollmesh.shared.objects import load_object
from rollmesh.shared.user_code import explain, user_traceback


class Registry:
    """One kind of extension point, e.g. scorers. `built_in` maps short names to `package.module:Name`."""

    def __init__(self, kind: str, built_in: Mapping[str, str]) -> None:
        self.kind = kind
        self._built_in = dict(built_in)

    @property
    def names(self) -> tuple[str, ...]:
        """Short names of the built-ins."""
        return tuple(self._built_in)

    def find(self, name: str, base_dir: str | Path | None = None) -> Any:
        """The class called `name`; a user's relative file is looked up in `base_dir`. ConfigError if there is none."""
        if name in self._built_in:
            return load_object(self._built_in[name])
        if ":" not in name:
            known = ", ".join(self.names)
            raise ConfigError(
                f"there is no {self.kind} `{name}`; known: {known}, or your own as file.py:Name", name=name
            )
        return load_object(name, base_dir)

    def make(self, name: str, options: Mapping[str, Any], base_dir: str | Path | None = None, **context: Any) -> Any:
        """An instance of the class called `name`, given `context` and, if the class has `Options`, `options` as one of those.

        `Options` is a msgspec struct; the conversion is strict. A class without it takes no options. ConfigError naming the key.
        """
        cls = self.find(name, base_dir)
        converted = self.options(name, options, base_dir)
        try:
            return cls(**context, options=converted) if hasattr(cls, "Options") else cls(**context)
        except MeshError:
            raise
        except Exception as err:  # user code may raise anything; the name that led to it must be reported
            what = f"making the {self.kind} failed: {explain(err)}\n{user_traceback(err)}"
            raise ConfigError(f"{self.kind} `{name}`: {what}", name=name) from err

    def options(self, name: str, options: Mapping[str, Any], base_dir: str | Path | None = None) -> msgspec.Struct:
        """`options` as the struct of the class called `name`, with its defaults. ConfigError naming the key."""
        type_: type[msgspec.Struct] = getattr(self.find(name, base_dir), "Options", _NoOptions)
        try:
            return config_from_dict(type_, dict(options))
        except ConfigError as error:
            raise ConfigError(
                f"options of {self.kind} `{name}`: {error.message}", violations=error.violations
            ) from error


class _NoOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """For extensions without settings."""
