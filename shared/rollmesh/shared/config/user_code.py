"""Describe user code, such as an agent or a scorer: its errors with a hint and its frames, and whether a call would fit
it."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rollmesh.shared.config.moved import import_hint
from rollmesh.shared.errors import MeshError

TRACEBACK_CHARS_MAX = 4000
MEMORY_REMEDY = "lower `learner.packing.row_tokens`, or use more ranks or a device with more memory"
_CALLERS = ("rollmesh.", "importlib.", "_frozen_importlib")
"""Modules that call a user's code: services, trainer, mesh and command line all do. A user's file is never in the
package."""


def explain(error: BaseException) -> str:
    """Return the error in one line, with the probable mistake."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, ImportError) and (hint := import_hint(error)):
        return f"{text} ({hint})"
    owner = error.obj if isinstance(error, AttributeError) else None
    if inspect.isfunction(owner) or inspect.ismethod(owner):
        return f"{text} (`{owner.__name__}` is a method; call it: `{owner.__name__}()`)"
    if inspect.iscoroutine(owner):
        return f"{text} (`{owner.__name__}` is a coroutine; await it: `await ...{owner.__name__}(...)`)"
    return text


@contextmanager
def reported(what: str, failure: type[MeshError]) -> Iterator[None]:
    """Raise `failure` with the error and the user's lines if the code inside raises. `what` begins the message.

    The error of a process without memory is raised unchanged, with a note. It can occur at any line, so the user's code
    is not its cause.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            error.add_note(f"{what} was running, and may not be the cause; {MEMORY_REMEDY}")
            raise
        raise failure(f"{what} failed: {explain(error)}\n{user_traceback(error)}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether host or device had no memory left. The allocator of torch on the CPU raises a plain
    RuntimeError."""
    torch = sys.modules.get("torch")  # this package does not import it
    return (
        isinstance(error, MemoryError)
        or (torch is not None and isinstance(error, torch.OutOfMemoryError))
        or (isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in str(error))
    )


def takes_arguments(function: Callable[..., object], number: int) -> bool:
    """Return whether a function can be called with `number` positional arguments. True if its signature cannot be
    read."""
    try:
        inspect.signature(function).bind(*range(number))
    except TypeError:
        return False
    except ValueError:  # a function in C without a signature
        return True
    return True


def user_traceback(error: BaseException) -> str:
    """Return the frames from the user's code on, without the error's message: the last `TRACEBACK_CHARS_MAX`
    characters."""
    begin: TracebackType | None = error.__traceback__
    while begin is not None and begin.tb_frame.f_globals.get("__name__", "").startswith(_CALLERS):
        begin = begin.tb_next
    frames = "".join(traceback.format_tb(begin or error.__traceback__))
    return frames[-TRACEBACK_CHARS_MAX:].rstrip("\n")
