"""Find extensions by name: built-ins by short name, user code as `file.py:Name` or `package.module:Name`.

Every kind of extension is configured the same way, as `{name: NAME, options: {...}}`, or as the bare string `NAME` if
it gets no options. Built-ins are listed by dotted name and imported on first use, so a heavy one costs nothing until
then.
"""

from __future__ import annotations

import difflib
import re
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

_IN_FILE = re.compile(r"([^\s:]+\.py):[A-Za-z_][\w.]*")
"""An extension in a file, in options whose types are not known here."""


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
        """Return the same choice with absolute files: that of `name`, if it is in a file relative to `base_dir`, and
        those of extensions in the options. A text of the options names an extension if it is FILE.py:Name and the file
        exists, whatever the option is."""
        name, options = _absolute(self.name, base_dir), _located(self.options, base_dir, typed=False)
        if name == self.name and options is self.options:
            return self
        return msgspec.structs.replace(self, name=name, options=options)


E = TypeVar("E", bound=Extension)


class Registry:
    """One kind of extension, for example scorers. Its base class states the members, see
    `rollmesh.shared.config.plugin`."""

    def __init__(self, kind: str, built_in: Mapping[str, str], base: type[Plugin]) -> None:
        """`built_in` maps short names to `package.module:Name`."""
        self.kind = kind
        self.base = base
        self._built_in = dict(built_in)
        self._adoption = Adoption(kind, base)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the short names of the built-ins."""
        return tuple(self._built_in)

    def find(self, name: str, base_dir: str | Path | None = None) -> Any:
        """Return the class called `name`. A relative file is looked up in `base_dir`. Raise ConfigError if it does not
        exist."""
        if name in self._built_in:
            return load_object(self._built_in[name])
        if ":" not in name:
            raise unknown_name(self.kind, name, self.names)
        found = load_object(name, base_dir)
        self._adoption.of_class(found, name)
        return found

    def find_class(self, name: str, base_dir: str | Path | None = None) -> Any:
        """Return what `find` returns, or the base class for a function that makes an extension."""
        found = self.find(name, base_dir)
        return found if isinstance(found, type) else self.base

    def make(self, chosen: Extension | str, base_dir: str | Path | None = None, /, **context: Any) -> Any:
        """Return an instance of the chosen class: `cls(**context, options=...)`, or `cls(**context)` without `Options`.

        Raise ConfigError that names the wrong key, or contains the traceback of a constructor that failed.
        """
        chosen = _as_extension(chosen)
        cls = self.find(chosen.name, base_dir)
        options = _located(self.options(chosen, base_dir), base_dir or ".")
        try:
            made = (
                cls(**context) if self.options_type(chosen.name, base_dir) is None else cls(**context, options=options)
            )
        except MeshError:
            raise
        except Exception as err:  # user code may raise anything; the name that led to it must be reported
            what = f"the constructor failed: {explain(err)}\n{user_traceback(err)}"
            raise ConfigError(f"{self.kind} `{chosen.name}`: {what}", name=chosen.name) from err
        self.adopt(made, chosen.name)
        return made

    def adopt(self, made: Any, name: str = "") -> None:
        """Check an extension that was made, here or in other user code. Raise ConfigError if it lacks a required
        member."""
        self._adoption.of_instance(made, name or type(made).__name__)

    def options_type(self, name: str, base_dir: str | Path | None = None) -> type[msgspec.Struct] | None:
        """Return the `Options` of a class, or of a function that makes an extension. None: it has no options."""
        found: type[msgspec.Struct] | None = getattr(self.find(name, base_dir), "Options", None)
        return found

    def options(self, chosen: Extension | str, base_dir: str | Path | None = None) -> msgspec.Struct:
        """Return the options as the `Options` of the class, with defaults. Raise ConfigError that names the wrong
        key."""
        chosen = _as_extension(chosen)
        type_ = self.options_type(chosen.name, base_dir)
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


def _absolute(name: str, base_dir: str | Path) -> str:
    """Return the name of an extension with an absolute file, if it is in a file."""
    file, _, attribute = name.rpartition(":")
    return f"{(Path(base_dir) / Path(file).expanduser()).resolve()}:{attribute}" if file.endswith(".py") else name


def _located(value: Any, base_dir: str | Path, *, typed: bool = True) -> Any:
    """Return options, or a part of them, with absolute files in the extensions that they choose at any depth. `typed`
    says that an extension is an `Extension`; else it is a text, see `Extension.located`."""

    def part(one: Any) -> Any:
        return _located(one, base_dir, typed=typed)

    if isinstance(value, Extension):
        return value.located(base_dir)
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.asdict(value)
        changed = {name: new for name, old in fields.items() if (new := part(old)) is not old}
        return msgspec.structs.replace(value, **changed) if changed else value
    if isinstance(value, dict):
        located = {key: part(one) for key, one in value.items()}
        return located if any(located[key] is not one for key, one in value.items()) else value
    if type(value) in (list, tuple):
        parts = [part(one) for one in value]
        return type(value)(parts) if any(new is not old for new, old in zip(parts, value, strict=True)) else value
    if typed or not isinstance(value, str) or not (found := _IN_FILE.fullmatch(value)):
        return value
    return _absolute(value, base_dir) if (Path(base_dir) / Path(found[1]).expanduser()).is_file() else value


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
