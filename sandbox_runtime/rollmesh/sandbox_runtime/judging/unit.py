"""Hidden tests that call the candidate, run where it is not: the oracle's jail, in which `import solution` gives a proxy.

A test runs in a thread; when it uses the proxy, the question goes out as the answer to the service's request, and the candidate's
reply comes in with the next one:

    service             oracle's jail (this module)            candidate's jail (`remote`)
    start(test)  ---->  test calls solution.f(1)
                 <----  {"ask": ["invoke", ...]}
    invoke       ------------------------------------------->  f(1)
    resume(reply) --->  solution.f(1) returns
                 <----  {"end": ["AC", ""]}

Replies become builtin values (`values`), handles, or exceptions named by a builtin type: none brings code or an operator along.
"""

from __future__ import annotations

import builtins
import json
import sys
import types
from _queue import SimpleQueue  # `queue` brings `threading`, see `languages.children`
from collections.abc import Iterator
from typing import Any, NoReturn

from rollmesh.sandbox_runtime.judging.values import decode, encode, loads

_TESTS = "hidden_tests"
_outbox: SimpleQueue[dict[str, Any]] = SimpleQueue()
_inbox: SimpleQueue[str] = SimpleQueue()
_num_asked = 0


class CandidateError(Exception):
    """The candidate raised something that has no builtin type, or answered what is no answer."""


class BrokenTestsError(Exception):
    """The hidden tests do not load, and the candidate had no part in it."""


def start(source: str, test: str, module: str) -> str:
    """Begin one test. The first question or the end, as JSON."""
    import threading  # not by the zygote

    global _num_asked
    _num_asked = 0
    sys.modules[module] = _Proxy(module)
    threading.Thread(target=_run, args=(source, test), daemon=True).start()
    return json.dumps(_outbox.get())


def resume(reply: str) -> str:
    """Give the candidate's reply to the question. The next question or the end, as JSON."""
    _inbox.put(reply)
    return json.dumps(_outbox.get())


# The test's thread ----------------------------------------------------------------------------------------------------


def _run(source: str, test: str) -> None:
    try:
        verdict, message = _judged(source, test)
        _outbox.put({"end": [verdict, message]})
    except BrokenTestsError as error:
        _outbox.put({"broken": str(error)})


def _judged(source: str, test: str) -> tuple[str, str]:
    try:
        target = _load(source)
        for part in test.split(".")[:-1]:
            target = getattr(target, part)
        return _try(target, test.rpartition(".")[2])
    except BrokenTestsError:
        raise
    except BaseException as error:  # noqa: BLE001 - a test may raise anything; here it becomes the verdict
        return _meaning(error)


def _load(source: str) -> Any:
    module = types.ModuleType(_TESTS)
    sys.modules[_TESTS] = module
    try:
        exec(compile(source, f"{_TESTS}.py", "exec"), module.__dict__)  # noqa: S102 - the operator's own code
    except Exception as error:
        if _num_asked:
            raise
        raise BrokenTestsError(f"{type(error).__name__}: {error}") from error
    return module


def _try(holder: Any, name: str) -> tuple[str, str]:
    """One test function, method of a plain class, or unittest method."""
    import unittest  # only sessions of this kind need it

    if isinstance(holder, type) and issubclass(holder, unittest.TestCase):
        errors = _Errors()
        unittest.TestSuite([holder(name)]).run(errors.result)
        return _meaning(errors.first) if errors.first is not None else ("AC", "")
    if not isinstance(holder, type):
        getattr(holder, name)()
        return "AC", ""
    instance = holder()
    getattr(instance, "setup_method", _nothing)()
    try:
        getattr(instance, name)()
    finally:
        getattr(instance, "teardown_method", _nothing)()
    return "AC", ""


class _Errors:
    """The first thing that kept a unittest from passing."""

    def __init__(self) -> None:
        import unittest

        errors = self
        self.first: BaseException | None = None

        class Result(unittest.TestResult):
            def addError(self, test: Any, err: Any) -> None:
                errors.note(err[1])

            def addFailure(self, test: Any, err: Any) -> None:
                errors.note(err[1])

            def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
                if err is not None:
                    errors.note(err[1])

            def addSkip(self, test: Any, reason: str) -> None:
                errors.note(AssertionError("skipped"))

            def addUnexpectedSuccess(self, test: Any) -> None:
                errors.note(AssertionError("unexpected success"))

        self.result = Result()

    def note(self, error: BaseException) -> None:
        self.first = self.first or error


def _meaning(error: BaseException) -> tuple[str, str]:
    """The verdict of what a test raised. The text of the tests' own errors is left out: it may quote what was expected."""
    said = getattr(error, "__said__", None)
    if said is not None:
        return "RE", said
    if isinstance(error, AssertionError):
        return "WA", "an assertion of the test failed"
    return "WA", f"the test could not use what it was given ({type(error).__name__})"


def _nothing() -> None:
    """Stands for a fixture that a class does not have."""


# The proxy ------------------------------------------------------------------------------------------------------------


class _Proxy(types.ModuleType):
    """The candidate's module, as tests see it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return _asked("look_up", name, lambda: Remote(None, name))
        except AttributeError as error:
            return _Missing(error)  # so that `from solution import f` fails the tests that use f, and no others


class Remote:
    """A function or an object of the candidate. Compared by identity here; the candidate's own operators never decide an assertion."""

    def __init__(self, number: int | None, name: str) -> None:
        self.__number = number
        self.__name = name

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if self.__number is not None and not self.__name:
            return _invoke(self.__number, "__call__", arguments, keywords)
        return _invoke(self.__number, self.__name, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__number is None:
            return Remote(None, f"{self.__name}.{name}")
        return _asked("look_up", f"@{self.__number}.{name}", lambda: Remote(self.__number, name))

    def __bool__(self) -> NoReturn:
        raise TypeError("an object of the candidate is neither true nor false")

    def __len__(self) -> Any:
        return _invoke(self.__number, "__len__", (), {})

    def __getitem__(self, key: Any) -> Any:
        return _invoke(self.__number, "__getitem__", (key,), {})

    def __contains__(self, value: Any) -> bool:
        return _invoke(self.__number, "__contains__", (value,), {}) is True

    def __str__(self) -> str:
        return str(_invoke(self.__number, "__str__", (), {}))

    def __iter__(self) -> Iterator[Any]:
        iterator = _invoke(self.__number, "__iter__", (), {})
        if not isinstance(iterator, Remote):
            yield from iterator
            return
        while True:
            try:
                yield _invoke(_number_of(iterator), "__next__", (), {})
            except StopIteration:
                return


class _Missing:
    """What the candidate's module lacks: fails when it is used."""

    def __init__(self, error: AttributeError) -> None:
        self._error = error

    def __call__(self, *arguments: Any, **keywords: Any) -> NoReturn:
        raise self._error


def _number_of(remote: Remote) -> int | None:
    number: int | None = remote.__dict__["_Remote__number"]
    return number


def _invoke(number: int | None, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    question = {
        "object": number,
        "name": name,
        "arguments": encode(list(arguments), _handed_back),
        "keywords": encode(keywords, _handed_back),
    }
    return _asked("invoke", json.dumps(question), None)


def _handed_back(value: object) -> int:
    number = _number_of(value) if isinstance(value, Remote) else None
    if number is None:
        raise TypeError(f"a {type(value).__name__} cannot be handed to the candidate")
    return number


def _asked(verb: str, text: str, function: Any) -> Any:
    """The candidate's reply as a value; raises what it raised. `function` makes what stands for a callable."""
    global _num_asked
    _num_asked += 1
    _outbox.put({"ask": [verb, text]})
    try:
        reply = loads(_inbox.get())
        if not isinstance(reply, dict):
            raise TypeError
        if function is not None and reply.get("callable") is True:
            return function()
        value = decode(reply["value"], _handle) if "value" in reply else None
        error = None if "value" in reply else reply["error"]
    except Exception:  # noqa: BLE001 - hostile data may break decoding in any way
        raise _said(CandidateError("what the candidate answered is no answer")) from None
    if error is None:
        return value
    raise _exception(error)


def _handle(number: Any) -> Remote:
    if type(number) is not int:
        raise ValueError("an object is named by a number")
    return Remote(number, "")


def _exception(error: Any) -> Exception:
    try:
        names, text = error
        message = str(text)[:1000]
        shown = str(names[0])[:200]
        for name in names[:50]:
            kind = getattr(builtins, str(name), None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                return _said(kind(message), f"{shown}: {message}")
        return _said(CandidateError(f"{shown}: {message}"))
    except Exception:  # noqa: BLE001 - as above; some builtin exceptions also refuse a lone text
        return _said(CandidateError("the candidate raised what cannot be shown"))


def _said(error: Exception, text: str = "") -> Exception:
    """Mark as the candidate's own. An assertion it raises is no assertion of the test."""
    error.__said__ = text or str(error)  # type: ignore[attr-defined]
    return error
