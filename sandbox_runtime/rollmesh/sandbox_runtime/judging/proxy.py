"""The candidate's module as hidden tests see it, in the oracle's jail: each use is a request, and each reply is plain
data or a handle.

Operators of a test are evaluated here, on copies: `in`, `==`, `[]` and arithmetic never reach the candidate, which
therefore neither decides them nor learns what the test expects. Only the arguments of calls and assigned attributes are
sent. Operations that only the candidate could decide raise `UnsupportedError`, or Python's own TypeError.
"""

from __future__ import annotations

import builtins
import itertools
import json
import types
from _queue import SimpleQueue  # `queue` brings `threading`, see `languages.children`
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from rollmesh.sandbox_runtime.judging.values import decode, encode, loads

_REFERENCE = "a name that no attribute has"
_ITEMS_MAX = 10_000
"""Maximum items of one iterator that a test passes to the candidate."""


class CandidateError(Exception):
    """The candidate raised an exception without a builtin type, or sent an invalid reply."""


class UnsupportedError(TypeError):
    """A test used an operation that only the candidate could decide. The text contains no value of the test."""


class Channel:
    """Requests of the test's thread to the candidate, and the replies."""

    def __init__(self, *, objects: bool = True) -> None:
        self._objects = objects
        """Whether results may be objects that are not plain data."""
        self.outbox: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self.inbox: SimpleQueue[str] = SimpleQueue()
        self.num_asked = 0
        self.loading = False
        """Whether the tests' source is being executed, rather than a test."""
        self._handles: dict[tuple[str, int], Handle] = {}
        self._copies: dict[int, Any] = {}
        """Contents of objects by number, kept until a method of the object is called, so that all operators of a test
        see the same contents."""
        self._classes: dict[str, type[Exception]] = {}

    def ask(self, verb: str, text: str, *forms: str) -> tuple[str, Any]:
        """Send a request and return the form of the reply, which is `value` or one of `forms`, and its content. Raises
        what the candidate raised."""
        self.num_asked += 1
        self.outbox.put({"ask": [verb, text]})
        try:
            ((form, content),) = loads(self.inbox.get()).items()
            if form == "value":
                return form, decode(content, self._take)
            if form in forms:
                return form, self._class_of(content) if form == "exception" else None
            if form != "error":
                raise ValueError(form)
            names, message = content
            error = self._class_of(names)(str(message)[:1000])
            shown = f"{str(names[0])[:200]}: {error}"
        except UnsupportedError:
            raise
        except Exception:  # noqa: BLE001 - hostile data may break decoding in any way
            raise raised_by_candidate(CandidateError("the candidate's reply is not valid")) from None
        raise raised_by_candidate(error, shown)

    def invoke(self, number: int | None, name: str, arguments: Sequence[Any] = (), keywords: Any = None) -> Any:
        """Return the result of a function, or of a method of an object."""
        question = {
            "object": number,
            "name": name,
            "arguments": encode(list(arguments), self._hand_over),
            "keywords": encode(keywords or {}, self._hand_over),
        }
        return self.ask("invoke", json.dumps(question))[1]

    def look_up(self, path: str, function: Handle) -> Any:
        """Return an attribute: plain data, an exception class, or `function` if it is callable."""
        form, content = self.ask("look_up", path, "callable", "exception")
        return function if form == "callable" else content

    def contents(self, number: int) -> Any:
        """Return a copy of an object: a dict, a list, or the length of an object that has only a length."""
        if number not in self._copies:
            _, found = self.ask("contents", str(number))
            if type(found) not in (dict, list, int):
                raise raised_by_candidate(CandidateError("the candidate's reply is not valid"))
            self._copies[number] = found
        return self._copies[number]

    def forget(self, number: int | None) -> None:
        """Drop the copy of an object that may have changed."""
        if number is not None:
            self._copies.pop(number, None)

    def _class_of(self, names: Any) -> type[Exception]:
        """Return a local exception class for one of the candidate: a builtin class, or one with the same bases as far
        as they are known."""
        if not names:
            return CandidateError
        name = str(names[0])[:200]
        known = getattr(builtins, name, None)
        if isinstance(known, type) and issubclass(known, Exception):
            return known
        if name not in self._classes:
            self._classes[name] = type(name, (self._class_of(names[1:50]),), {})
        return self._classes[name]

    def _take(self, tag: str, number: Any) -> Handle:
        kind = {"object": Object, "stream": Stream}[tag]
        if type(number) is not int:
            raise ValueError("an object is named by a number")
        if not self._objects and tag == "object":
            raise UnsupportedError("the candidate returned an object where plain data was expected")
        return self._handles.setdefault((tag, number), kind(_Reference(self, number)))

    def _hand_over(self, value: object) -> dict[str, Any]:
        if isinstance(value, Handle):
            reference = _reference(value)
            if reference.number is not None and not reference.path:
                self.forget(reference.number)
                return {"object": reference.number}
        elif isinstance(value, Iterator):
            items = list(itertools.islice(value, _ITEMS_MAX + 1))
            if len(items) <= _ITEMS_MAX:
                return {"iterator": encode(items, self._hand_over)}
        raise UnsupportedError(f"a {type(value).__name__} cannot be passed to the candidate; pass plain data")


class _Reference(NamedTuple):
    """Target of a handle: an attribute of the candidate's module, an object, or an attribute of an object."""

    channel: Channel
    number: int | None = None
    path: str = ""

    def attribute(self, name: str) -> Any:
        path = f"{self.path}.{name}" if self.path else name
        prefix = "" if self.number is None else f"@{self.number}."
        return self.channel.look_up(prefix + path, Object(self._replace(path=path)))


class Module(types.ModuleType):
    """The candidate's module."""

    def __init__(self, name: str, channel: Channel) -> None:
        super().__init__(name)
        self.__dict__[_REFERENCE] = _Reference(channel)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        reference = _reference(self)
        try:
            return reference.attribute(name)
        except AttributeError as error:
            if reference.channel.loading:
                return _Missing(error)  # so that `from solution import f` fails the tests that use f, and no others
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        raise UnsupportedError("the candidate's module cannot be changed")


class Handle:
    """A function, a class or an object of the candidate. It has only the attributes of its target."""

    def __init__(self, reference: _Reference) -> None:
        self.__dict__[_REFERENCE] = reference

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        channel, number, path = _reference(self)
        channel.forget(number)
        return channel.invoke(number, path or "__call__", arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _reference(self).attribute(name)

    def __setattr__(self, name: str, value: Any) -> None:
        channel, number, path = _reference(self)
        if path:
            raise UnsupportedError("a function or a class of the candidate cannot be changed")
        channel.forget(number)
        channel.invoke(number, "__setattr__", (name, value))

    def __bool__(self) -> NoReturn:
        raise UnsupportedError("an object of the candidate is neither true nor false; compare plain data")

    def __str__(self) -> str:
        return _text(self, "__str__")

    def __repr__(self) -> str:
        return _text(self, "__repr__")


class Object(Handle):
    """An object of the candidate, equal to itself alone."""

    def __len__(self) -> int:
        contents = _contents(self)
        return contents if isinstance(contents, int) else len(contents)

    def __iter__(self) -> Iterator[Any]:
        items: Iterator[Any] = iter(_contents(self))
        return items

    def __reversed__(self) -> Iterator[Any]:
        items: Iterator[Any] = reversed(_contents(self))
        return items

    def __getitem__(self, key: Any) -> Any:
        return _contents(self)[key]

    def __contains__(self, value: Any) -> bool:
        return value in _contents(self)


class Stream(Handle):
    """An iterator or a generator: each item is requested once, when the test reads it."""

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        channel, number, _ = _reference(self)
        return channel.invoke(number, "__next__")


class _Missing:
    """A name that the candidate's module lacks; fails when it is used."""

    def __init__(self, error: AttributeError) -> None:
        self.__dict__["_error"] = error

    def _fail(self, *_arguments: Any, **_keywords: Any) -> NoReturn:
        raise self.__dict__["_error"]

    __call__ = __getattr__ = __bool__ = __eq__ = __ne__ = __len__ = __iter__ = __getitem__ = __str__ = _fail


def _reference(proxy: Handle | Module) -> _Reference:
    found: _Reference = proxy.__dict__[_REFERENCE]
    return found


def _text(handle: Handle, method: str) -> str:
    channel, number, path = _reference(handle)
    text: str = f"<{path} of the candidate>" if path else channel.invoke(number, method)
    return text


def _contents(handle: Handle) -> Any:
    channel, number, path = _reference(handle)
    if number is None or path:
        raise UnsupportedError("a function or a class of the candidate has no contents")
    return channel.contents(number)


def raised_by_candidate(error: Exception, text: str = "") -> Exception:
    """Mark an exception as raised by the candidate. Its assertion error is not an assertion of the test."""
    error.__candidate_text__ = text or str(error)  # type: ignore[attr-defined]
    return error
