"""Find extensions by name: built-ins by short name, user code as `file.py:Name` or `package.module:Name`.

Every kind of extension is configured the same way, as `{name: NAME, options: {...}}`, or as the bare string `NAME` if
it gets no options. Built-ins are listed by dotted name and imported on first use, so a heavy one costs nothing until
then.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.objects import load_object
from rollmesh.shared.config.plugin import Adoption, Plugin
from rollmesh.shared.config.settings import Settings
from rollmesh.shared.config.user_code import explain, user_traceback
from rollmesh.shared.errors import ConfigError, MeshError


class Extension(Settings, kw_only=False):
    """The choice of one extension. In a configuration, a bare string means `name` without options."""

    short_form: ClassVar[str] = "name"

    name: str
    """Short name of a built-in, `file.py:Name` relative to the configuration file, or `package.module:Name`."""
    options: dict[str, Any] = {}
    """Settings of the extension, see the `Options` of its class."""

    @property
    def short_name(self) -> str:
        """The name without file or module."""
        return self.name.rpartition(":")[2]

    def located(self, base_dir: str | Path) -> Self:
        """Return the same choice with an absolute file, if `name` is in a file relative to `base_dir`."""
        file, _, name = self.name.rpartition(":")
        if not file.endswith(".py"):
            return self
        return msgspec.structs.replace(self, name=f"{(Path(base_dir) / Path(file).expanduser()).resolve()}:{name}")


E = TypeVar("E", bound=Extension)


class Registry:
    """One kind of extension, for example scorers.

    The class of an extension MAY have a class attribute `Options`, a msgspec struct. Options are converted to it strictly.
    """

    def __init__(self, kind: str, built_in: Mapping[str, str]) -> None:
        """`built_in` maps short names to `package.module:Name`."""
        self.kind = kind
        self._built_in = dict(built_in)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the short names of the built-ins."""
        return tuple(self._built_in)

    def find(self, name: str, base_dir: str | Path | None = None) -> Any:
        """Return the class called `name`. A relative file is looked up in `base_dir`. Raise ConfigError if it does not
        exist."""
        if name in self._built_in:
            return load_object(self._built_in[name])
        if ":" in name:
            return load_object(name, base_dir)
        raise unknown_name(self.kind, name, self.names)

    def make(self, chosen: Extension | str, base_dir: str | Path | None = None, /, **context: Any) -> Any:
        """Return an instance of the chosen class: `cls(**context, options=...)`, or `cls(**context)` without `Options`.

        Raise ConfigError that names the wrong key, or contains the traceback of a constructor that failed.
        """
        chosen = _as_extension(chosen)
        cls = self.find(chosen.name, base_dir)
        options = self.options(chosen, base_dir)
        try:
            return cls(**context, options=options) if hasattr(cls, "Options") else cls(**context)
        except MeshError:
            raise
        except Exception as err:  # user code may raise anything; the name that led to it must be reported
            what = f"the constructor failed: {explain(err)}\n{user_traceback(err)}"
            raise ConfigError(f"{self.kind} `{chosen.name}`: {what}", name=chosen.name) from err

    def options(self, chosen: Extension | str, base_dir: str | Path | None = None) -> msgspec.Struct:
        """Return the options as the `Options` of the class, with defaults. Raise ConfigError that names the wrong
        key."""
        chosen = _as_extension(chosen)
        type_: type[msgspec.Struct] | None = getattr(self.find(chosen.name, base_dir), "Options", None)
        if type_ is None and chosen.options:
            raise ConfigError(
                f"{self.kind} `{chosen.name}` has no options, got {', '.join(chosen.options)}; remove them"
            )
        try:
            return config_from_dict(type_ or _NoOptions, chosen.options)
        except ConfigError as error:
            what = error.message.replace("configuration: ", "")  # the options are not read from a file
            raise ConfigError(f"options of {self.kind} `{chosen.name}`: {what}", violations=error.violations) from error

    def with_defaults(self, chosen: E, base_dir: str | Path | None = None) -> E:
        """Return `chosen` with all options written out. Raise ConfigError as `options`."""
        return msgspec.structs.replace(chosen, options=msgspec.to_builtins(self.options(chosen, base_dir)))


def _as_extension(chosen: Extension | str) -> Extension:
    return Extension(chosen) if isinstance(chosen, str) else chosen


def unknown_name(kind: str, name: str, known: Iterable[str], own: str = "file.py:Name") -> ConfigError:
    """Return the error for a name that is not in the table of its kind, with the nearest known one."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    meant = f"; did you mean `{near[0]}`?" if near else ""
    return ConfigError(
        f"there is no {kind} `{name}`; known: {', '.join(names)}, or your own as {own}{meant}", name=name
    )


class _NoOptions(Settings):
    """Options of a class that has no `Options`."""
