"""The root of the base classes of extensions, and what is checked when a class of a user is loaded.

The base class of a kind states every member: required ones are marked, optional ones have a default, so that services
and trainer read members directly. A class that does not inherit from its base gets the defaults in this release, with a
warning. A public name that is close to a member, such as `needs_behaviour`, is reported, because no service reads it.
Other names are the user's own.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from rollmesh.shared.errors import ConfigError

if TYPE_CHECKING:
    from abc import abstractmethod as required
    from builtins import property as optional_attribute
    from builtins import property as required_attribute

__all__ = ["Adoption", "Plugin", "members", "optional_attribute", "overrides", "required", "required_attribute"]

_log = logging.getLogger(__name__)
_CLOSE = 0.8
"""Similarity from which a name is taken for a misspelled member."""
_LIBRARIES = frozenset({"rollmesh", "torch", "builtins", "abc", "typing"})
"""Top-level packages of classes whose names are not those of the user."""


class Requirement:
    """A method that an extension must have. It does not exist until a subclass, or its `__getattr__`, provides it."""

    attribute = False

    def __init__(self, declared: Callable[..., Any]) -> None:
        self.declared, self.__doc__ = declared, declared.__doc__

    def __get__(self, plugin: object, cls: type) -> Any:
        raise AttributeError(f"{cls.__name__} must have `{self.declared.__name__}`")


class AttributeRequirement(Requirement):
    """An attribute that an extension must have: a property, or an attribute of the class or of the instance."""

    attribute = True


class AttributeDefault:
    """The default of an attribute: the value of a function, unless the class or the instance has the attribute."""

    def __init__(self, value: Callable[[Any], Any]) -> None:
        self.value, self.__doc__ = value, value.__doc__

    def __get__(self, plugin: object, cls: type) -> Any:
        return self if plugin is None else self.value(plugin)


if not TYPE_CHECKING:
    required, required_attribute, optional_attribute = Requirement, AttributeRequirement, AttributeDefault


class Plugin:
    """The root of the base classes of extensions, such as `Scorer` or `LossTerm`."""

    Options: ClassVar[type[msgspec.Struct] | None] = None
    """Strict struct of its settings; the constructor gets an instance as `options=`. None: it has no settings and gets
    no `options`."""


def overrides(plugin: Plugin, default: Callable[..., Any]) -> bool:
    """Return whether an extension has its own method instead of the `default` of its base class."""
    return getattr(getattr(plugin, default.__name__), "__func__", None) is not default


def members(base: type[Plugin]) -> dict[str, Any]:
    """Return what a base class and its own bases define under public names."""
    found = [vars(cls) for cls in reversed(base.__mro__) if issubclass(cls, Plugin)]
    return {
        name: value
        for names in found
        for name, value in names.items()
        if name == "__call__" or not name.startswith("_")
    }


class Adoption:
    """Checks classes of users against the base class of one kind of extension. Each class is reported once."""

    def __init__(self, kind: str, base: type[Plugin]) -> None:
        self._kind, self._base, self._members = kind, base, members(base)
        self._reported: set[tuple[type, str]] = set()

    def of_class(self, cls: Any, name: str) -> None:
        """Check a class, or a function that makes extensions. Raise ConfigError if it lacks a class method that the
        base requires."""
        of_class = [key for key, value in self._members.items() if isinstance(value, classmethod)]
        if isinstance(cls, type):
            self._report_base(cls, name)
            self._report_misspelled(cls, _names_of(cls), name)
            if not issubclass(cls, self._base):
                # What an instance reads from another object by `__getattr__` is known after its construction only.
                self._fill(cls, cls, of_class if hasattr(cls, "__getattr__") else self._members)
        self._require(cls, name, of_class)

    def of_instance(self, plugin: Any, name: str) -> None:
        """Check an extension. Raise ConfigError if it lacks a member that its base requires."""
        cls = type(plugin)
        if issubclass(cls, self._base) and cls.__module__.startswith("rollmesh."):
            return
        self._report_base(cls, name)
        if self._is_new(cls, "attributes of an instance"):
            attributes = {key: value for key, value in getattr(plugin, "__dict__", {}).items() if not callable(value)}
            self._report_misspelled(cls, _names_of(cls) | attributes, name)
        self._require(plugin, name, self._members)
        if not isinstance(plugin, self._base):
            self._fill(plugin, cls, self._members)

    def _report_base(self, cls: type, name: str) -> None:
        if not issubclass(cls, self._base) and self._is_new(cls, "base class"):
            _log.warning(
                "%s `%s`: class %s does not inherit from %s.%s; this release sets the defaults of the base class, the "
                "next one rejects the class",
                self._kind,
                name,
                cls.__name__,
                self._base.__module__,
                self._base.__name__,
            )

    def _report_misspelled(self, cls: type, names: Mapping[str, Any], name: str) -> None:
        bases = {self._base, *(one for one in cls.__mro__ if _is_of_library(one))}
        known = {key for one in bases for key in dir(one)}
        known |= {key.lower() for key in known}
        for key, value in names.items():
            if key in known or key.startswith("_"):
                continue
            alike = [member for member, theirs in self._members.items() if _is_method(theirs) == _is_method(value)]
            near = difflib.get_close_matches(key, alike, n=1, cutoff=_CLOSE)
            if near and self._is_new(cls, key):
                _log.warning(
                    "%s `%s`: %s has no member `%s`; did you mean `%s`?",
                    self._kind,
                    name,
                    self._base.__name__,
                    key,
                    near[0],
                )

    def _is_new(self, cls: type, what: str) -> bool:
        """Return whether this is checked or reported for the first time."""
        new = (cls, what) not in self._reported
        self._reported.add((cls, what))
        return new

    def _require(self, plugin: Any, name: str, keys: Iterable[str]) -> None:
        for key in keys:
            member = _plain(self._members[key])
            if isinstance(member, Requirement) and _lacks(plugin, key):
                what = f"an attribute `{key}`" if member.attribute else f"a {_declaration(self._members[key])}"
                raise ConfigError(f"{self._kind} `{name}` must have {what}", name=name)

    def _fill(self, plugin: Any, cls: type, keys: Iterable[str]) -> None:
        """Set the defaults of the optional members that a class without the base lacks: on the class, if it is of the
        user."""
        own = not _is_of_library(cls)
        for key in keys:
            value = self._members[key]
            if isinstance(_plain(value), Requirement) or not _lacks(plugin, key):
                continue
            if own:
                setattr(cls, key, value)
            else:
                setattr(plugin, key, value.__get__(plugin, cls) if hasattr(value, "__get__") else value)


def _lacks(plugin: Any, name: str) -> bool:
    """Return whether a member is neither defined nor provided by `__getattr__`. No property is evaluated."""
    found = _plain(inspect.getattr_static(plugin, name, None))
    return (found is None or isinstance(found, Requirement)) and not hasattr(plugin, name)


def _plain(member: Any) -> Any:
    """Return the function of a class method or static method, and any other member itself."""
    return member.__func__ if isinstance(member, (classmethod, staticmethod)) else member


def _is_method(member: Any) -> bool:
    member = _plain(member)
    if isinstance(member, Requirement):
        return not member.attribute
    return inspect.isroutine(member) and not isinstance(member, AttributeDefault)


def _is_of_library(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in _LIBRARIES


def _names_of(cls: type) -> dict[str, Any]:
    """Return the names that the user's classes define, with their values."""
    own = [one for one in reversed(cls.__mro__) if not _is_of_library(one)]
    return {name: value for one in own for name, value in vars(one).items()}


def _declaration(member: Any) -> str:
    """Return how a required method is declared, for a message."""
    function = _plain(member).declared
    parameters = [
        p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(function).parameters.values()
    ]
    if isinstance(member, classmethod):
        return f"class method `{function.__name__}({', '.join(map(str, parameters[1:]))})`"
    begin = "async def" if inspect.iscoroutinefunction(function) else "def"
    return f"method `{begin} {function.__name__}({', '.join(map(str, parameters))})`"
