"""Run hidden tests that call the candidate, in the oracle's jail without the candidate: `import solution` gives a
proxy.

A test runs in a thread. When it uses the proxy, the request is returned as the reply to the service's request, and the
candidate's reply arrives with the next one:

    service             oracle's jail (this module)            candidate's jail (`remote`)
    start(test)  ---->  test calls solution.f(1)
                 <----  {"ask": ["invoke", ...]}
    invoke       ------------------------------------------->  f(1)
    resume(reply) --->  solution.f(1) returns
                 <----  {"end": ["AC", ""]}

`proxy` implements the test's view of the candidate.
"""

from __future__ import annotations

import ast
import json
import sys
import types
from typing import Any

from rollmesh.sandbox_runtime.judging.proxy import BrokenTestsError, Channel, Module, UnsupportedError

_TESTS = "hidden_tests"
WHOLE_SOURCE = "module"
"""Name of the only test of a source without test functions: its statements."""
_PIECE_CHARS = 16_000
"""Characters of a message in one reply. Its encoding as a part of JSON must not exceed `output_bytes`."""
_channel = Channel()
_pieces: list[str] = []
"""Pieces of the current message that the service has not requested, the next one last."""


def start(source: str, test: str, module: str, objects: str) -> str:
    """Start one test. `objects`, `yes` or `no`, says whether the candidate may return objects. Return the first request
    or the end as JSON."""
    import threading  # imported late, not in the zygote

    global _channel
    _channel = Channel(objects=objects == "yes")
    sys.modules[module] = Module(module, _channel)
    threading.Thread(target=_run, args=(source, test), daemon=True).start()
    return _next_message()


def resume(reply: str) -> str:
    """Continue with the candidate's reply. Return the next request or the end as JSON."""
    _channel.inbox.put(reply)
    return _next_message()


def more() -> str:
    """Return the next piece of a message that is too long for one reply: `{"piece": text, "last": bool}`."""
    return json.dumps({"piece": _pieces.pop(), "last": not _pieces})


def _next_message() -> str:
    text = json.dumps(_channel.outbox.get())
    if len(text) <= _PIECE_CHARS:
        return text
    _pieces.extend(text[start : start + _PIECE_CHARS] for start in reversed(range(0, len(text), _PIECE_CHARS)))
    return more()


# The test's thread ----------------------------------------------------------------------------------------------------


def _run(source: str, test: str) -> None:
    try:
        verdict, message = _judged(source, test)
        _channel.outbox.put({"end": [verdict, message]})
    except BrokenTestsError as error:
        _channel.outbox.put({"broken": str(error)})


def _judged(source: str, test: str) -> tuple[str, str]:
    try:
        target = _load(source)
        if test == WHOLE_SOURCE:
            if not _channel.num_asked:
                raise BrokenTestsError("they do not use the candidate")
            return "AC", ""
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
    tree = ast.parse(source)
    _channel.used = frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    _channel.defined = module.__dict__
    _channel.loading = True
    try:
        exec(compile(source, f"{_TESTS}.py", "exec"), module.__dict__)  # noqa: S102 - the operator's own code
    except Exception as error:
        own_import = isinstance(error, ModuleNotFoundError) and not hasattr(error, "__candidate_text__")
        if _channel.num_asked and not own_import:
            raise
        raise BrokenTestsError(f"{type(error).__name__}: {error}") from error
    finally:
        _channel.loading = False
    return module


def _try(holder: Any, name: str) -> tuple[str, str]:
    """Run one test function, method of a plain class, or unittest method."""
    import unittest  # only sessions of this kind need it

    for target in (holder, getattr(holder, name)):
        if getattr(target, "__unittest_skip__", False) and not _channel.num_asked:
            raise BrokenTestsError(f"{name} is skipped by its decorator: {target.__unittest_skip_why__}")
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
    """Records the first error of a unittest."""

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
    """Return the verdict for an exception of a test. The text of the tests' own errors is omitted, because it may quote
    expected values."""
    text = getattr(error, "__candidate_text__", None)
    if text is not None:
        return "RE", text
    if isinstance(error, UnsupportedError):
        return "WA", str(error)
    if isinstance(error, ImportError) and isinstance(sys.modules.get(error.name or ""), Module):
        return "RE", str(error)
    if isinstance(error, AssertionError):
        return "WA", "an assertion of the test failed"
    return "WA", f"the test failed on the value that it got ({type(error).__name__})"


def _nothing() -> None:
    """Replaces a fixture that a class lacks."""
