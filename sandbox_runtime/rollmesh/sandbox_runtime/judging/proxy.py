"""The candidate's module as hidden tests see it, in the oracle's jail: each use is a request, and each reply is plain
data or a handle.

Operators of a test are evaluated here, on copies: `in`, `==`, `[]` and arithmetic never reach the candidate, which
therefore neither decides them nor learns what the test expects. Only the arguments of calls and assigned attributes are
sent. Operations that only the candidate could decide raise `UnsupportedError`, or Python's own TypeError.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import json
import sys
import types
from _queue import SimpleQueue  # `queue` brings `threading`, see `languages.children`
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, cast

from rollmesh.sandbox_runtime.judging.values import decode, encode, loads

_REFERENCE = "a name that no attribute has"
REQUEST_CHARS_MAX = 4 << 20
"""Maximum characters of a request to the candidate."""
_ITEMS_MAX = 10_000
"""Maximum items of one iterator that a test passes to the candidate."""


_TEXT = "the text of an exception"
_LIBRARIES = (sys.stdlib_module_names | {"numpy"}) - {"unittest", "doctest"}
"""Modules whose exceptions keep their class. Test frameworks are excluded: some of their exceptions skip or pass a
test."""
_PASSED_ON = frozenset({"__name__", "__qualname__", "__doc__"})
"""Special attributes that a handle requests from the candidate."""


class CandidateError(Exception):
    """The candidate raised an exception without a builtin type, or sent an invalid reply."""


class BrokenTestsError(Exception):
    """The hidden tests cannot judge any candidate. The candidate did not cause it."""


class CandidateStoppedError(RuntimeError):
    """The candidate raised StopIteration from a call. Only an item of an iterator may end a loop of the test."""


class UnsupportedError(TypeError):
    """A test used an operation that only the candidate could decide. The text contains no value of the test."""


class Channel:
    """Requests of the test's thread to the candidate, and the replies."""

    def __init__(self, *, objects: bool = True) -> None:
        self.objects = objects
        """Whether results may be objects that are not plain data."""
        self.outbox: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self.inbox: SimpleQueue[str] = SimpleQueue()
        self.num_asked = 0
        self.has_values = False
        """Whether the candidate has sent values, which later requests may contain."""
        self.loading = False
        """Whether the tests' source is being executed, rather than a test."""
        self.used: frozenset[str] = frozenset()
        """Names that the tests' source uses."""
        self.defined: dict[str, Any] = {}
        """Namespace of the tests."""
        self._handles: dict[tuple[str, int], Handle] = {}
        self._copies: dict[int, Any] = {}
        """Contents of objects by number, kept until a method of the object is called, so that all operators of a test
        see the same contents."""
        self._classes: dict[str, type[Exception]] = {}

    def ask(self, verb: str, text: str, *forms: str, may_stop: bool = False) -> tuple[str, Any]:
        """Send a request and return the form of the reply, which is `value` or one of `forms`, and its content. Raises
        what the candidate raised; StopIteration only if the request `may_stop`."""
        if len(text) > REQUEST_CHARS_MAX:
            what = f"a request of the test has {len(text)} characters, at most {REQUEST_CHARS_MAX} are allowed"
            raise UnsupportedError(what) if self.has_values else BrokenTestsError(what)
        self.num_asked += 1
        self.outbox.put({"ask": [verb, text]})
        try:
            ((form, content),) = loads(self.inbox.get()).items()
            self.has_values |= form not in ("callable", "exception") and verb != "names"
            if form == "value":
                return form, decode(content, self._take)
            if form in forms:
                return form, self._class_of(content) if form == "exception" else None
            if form != "error":
                raise ValueError(form)
            error = self._rebuilt(content, may_stop=may_stop)
            shown = f"{_short(content[0][0])}: {content[1]}"
        except UnsupportedError:
            raise
        except Exception:  # noqa: BLE001 - hostile data may break decoding in any way
            raise raised_by_candidate(CandidateError("the candidate's reply is not valid")) from None
        raise raised_by_candidate(error, shown)

    def invoke(
        self,
        number: int | None,
        name: str,
        arguments: Sequence[Any] = (),
        keywords: Any = None,
        *,
        may_stop: bool = False,
    ) -> Any:
        """Return the result of a function, or of a method of an object."""
        question = {
            "object": number,
            "name": name,
            "arguments": encode(list(arguments), self._hand_over),
            "keywords": encode(keywords or {}, self._hand_over),
        }
        return self.ask("invoke", json.dumps(question), may_stop=may_stop)[1]

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

    def public_names(self) -> list[str]:
        """Return the names for `import *`: those that the candidate exports, the tests' source uses, and nothing else
        has defined. A candidate cannot replace what the tests use for their assertions."""
        _, exported = self.ask("names", "")
        if type(exported) is not list:
            raise raised_by_candidate(CandidateError("the candidate's reply is not valid"))
        found = [name for name in exported if name in self.used and name not in self.defined]
        if builtin := [name for name in found if hasattr(builtins, name)]:
            raise UnsupportedError(
                f"`import *` would replace the builtin {builtin[0]} of the test; import it by its name"
            )
        return found

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
        module, _, short = name.rpartition(".")
        home = builtins if not module else sys.modules.get(module) if _top(module) in _LIBRARIES else None
        known = getattr(home, short, None)
        known = known if _top(getattr(known, "__module__", "")) in _LIBRARIES else None
        if isinstance(known, type) and (issubclass(known, Exception) or known is SystemExit):
            return cast("type[Exception]", known)
        if name not in self._classes:
            base = self._class_of(names[1:50])
            self._classes[name] = type(
                short, (base,), {"__str__": lambda error: error.__dict__.get(_TEXT) or base.__str__(error)}
            )
        return self._classes[name]

    def _rebuilt(self, content: Any, *, may_stop: bool = False) -> Exception:
        """Return an exception with the class, arguments, attributes and cause of one of the candidate. Values that are
        not plain data are handles, or omitted where handles are not allowed. Raises errors for an invalid content."""
        names, text, given, attributes, cause = content
        kind = self._class_of(names)
        if issubclass(kind, (StopIteration, StopAsyncIteration)) and not may_stop:
            kind = CandidateStoppedError
        arguments: tuple[Any, ...] = (str(text),)
        with contextlib.suppress(UnsupportedError):
            arguments = tuple(decode(given, self._take_of_error))
        error = _made(kind, arguments)
        error.__dict__[_TEXT] = str(text)
        for name, value in attributes.items():
            if name.isidentifier() and not name.startswith("_") and not hasattr(BaseException, name):
                with contextlib.suppress(UnsupportedError, AttributeError, TypeError):
                    setattr(error, name, decode(value, self._take_of_error))
        if cause is not None:
            error.__cause__ = self._rebuilt(cause)
        return error

    def _take_of_error(self, tag: str, content: Any) -> Handle | Exception:
        """Return what an exception contains, such as another exception. A result is never an exception of this
        process."""
        return self._rebuilt(content) if tag == "error" else self._take(tag, content)

    def _take(self, tag: str, number: Any) -> Handle:
        kind = {"object": Object, "stream": Stream}[tag]
        if type(number) is not int:
            raise ValueError("an object is named by a number")
        if not self.objects and tag == "object":
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
        if self.number is not None or self.path:
            self.require_objects()
        path = f"{self.path}.{name}" if self.path else name
        prefix = "" if self.number is None else f"@{self.number}."
        return self.channel.look_up(prefix + path, Object(self._replace(path=path)))

    def require_objects(self) -> None:
        """Raise UnsupportedError if only plain data is expected: functions may be called, and iterators read."""
        if not self.channel.objects:
            raise UnsupportedError("an attribute of a function or an iterator was used where plain data was expected")


class Module(types.ModuleType):
    """The candidate's module."""

    def __init__(self, name: str, channel: Channel) -> None:
        super().__init__(name)
        self.__dict__[_REFERENCE] = _Reference(channel)

    def __getattr__(self, name: str) -> Any:
        reference = _reference(self)
        if name == "__all__" and reference.channel.loading:
            return reference.channel.public_names()
        if name.startswith("__"):
            raise AttributeError(name)
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
        reference = _reference(self)
        channel, number, path = reference
        if number is not None:
            reference.require_objects()
        channel.forget(number)
        return channel.invoke(number, path or "__call__", arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if name == "__signature__":
            raise UnsupportedError("the signature of a function of the candidate is not available")
        if name.startswith("__") and name not in _PASSED_ON:
            raise AttributeError(name)
        return _reference(self).attribute(name)

    def __setattr__(self, name: str, value: Any) -> None:
        reference = _reference(self)
        reference.require_objects()
        channel, number, path = reference
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
        return channel.invoke(number, "__next__", may_stop=True)


for _kind in (Handle, Object, Stream):
    _kind.__doc__ = property(lambda handle: handle.__getattr__("__doc__"))  # type: ignore[assignment]


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


def _top(module: str) -> str:
    return module.partition(".")[0]


def _short(name: Any) -> str:
    return str(name)[:200].rpartition(".")[2]


def _made(kind: type[Exception], arguments: tuple[Any, ...]) -> Exception:
    """Return an exception with these arguments, whatever its class requires."""
    try:
        return kind(*arguments)
    except Exception:  # noqa: BLE001 - a class of a library may check its arguments in any way
        error = kind.__new__(kind, *arguments)
        error.args = arguments
        return error


def raised_by_candidate(error: Exception, text: str = "") -> Exception:
    """Mark an exception as raised by the candidate. Its assertion error is not an assertion of the test."""
    error.__candidate_text__ = text or str(error)  # type: ignore[attr-defined]
    return error
