"""Finds an extension by short name, or loads it from a user's code as `file.py:Name` or `package.module:Name`.

Each kind of extension has one Registry beside its port. The built-in table holds dotted names, which are imported on first use, so that
listing a heavy extension is free.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.shared.config import config_from_dict
from rollmesh.shared.errors import ConfigError, MeshError
from rollmesh.shared.objects import load_object
from rollmesh.shared.user_code import explain, user_traceback


class Extension(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a configuration names an extension. Each kind derives a struct with its default name."""

    name: str
    """Short name, `file.py:Name` relative to the configuration file, or `package.module:Name`."""
    options: dict[str, Any] = {}
    """Settings of the extension, as in the `Options` of its class."""


class Registry:
    """One kind of extension, e.g. scorers. `built_in` maps short names to `package.module:Name`."""

    def __init__(self, kind: str, built_in: Mapping[str, str]) -> None:
        self.kind = kind
        self._built_in = dict(built_in)

    @property
    def names(self) -> tuple[str, ...]:
        """Short names of the built-ins."""
        return tuple(self._built_in)

    def find(self, name: str, base_dir: str | Path | None = None) -> Any:
        """Return the class called `name`. A user's relative file is looked up in `base_dir`. Raises ConfigError if it does not exist."""
        if name in self._built_in:
            return load_object(self._built_in[name])
        if ":" not in name:
            raise unknown_name(self.kind, name, self.names)
        return load_object(name, base_dir)

    def make(self, name: str, options: Mapping[str, Any], base_dir: str | Path | None = None, **context: Any) -> Any:
        """Construct the class called `name` from `context` and, if the class has `Options`, from `options` as an instance of it.

        `Options` is a msgspec struct, and the conversion is strict. A class without it takes no options. Raises ConfigError.
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
        """Convert `options` to the struct of the class called `name`, with its defaults. Raises ConfigError that names the key."""
        type_: type[msgspec.Struct] = getattr(self.find(name, base_dir), "Options", _NoOptions)
        try:
            return config_from_dict(type_, dict(options))
        except ConfigError as error:
            raise ConfigError(
                f"options of {self.kind} `{name}`: {error.message}", violations=error.violations
            ) from error


def unknown_name(kind: str, name: str, known: Iterable[str], own: str = "file.py:Name") -> ConfigError:
    """Return the error for a name that is not in the table of its kind, with the nearest known one."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    meant = f"; did you mean `{near[0]}`?" if near else ""
    return ConfigError(
        f"there is no {kind} `{name}`; known: {', '.join(names)}, or your own as {own}{meant}", name=name
    )


class _NoOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """For extensions without settings."""
