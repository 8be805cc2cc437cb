"""Attacks on sessions that the calls of stateless functions share: text as code, data for other calls, exhaustion,
forgery."""

from __future__ import annotations

import asyncio
import functools

from rollmesh.sandbox_runtime.program import Program
from rollmesh.shared.errors import InvalidInput, UnknownSession

from ..arena import Scene
from ..attack import Attack, Family, Verdict

HARMLESS = Verdict.HARMLESS
_TEXTS = (
    "__import__('os')._exit(9)", "1+1)\nimport os; os._exit(9)", "{0.__class__.__mro__}", "%s %n", "\0", '"}],"verb":"run","code":"1/0"',
    "$(kill -9 1)", "../../etc/passwd", "[[[[" * 500,
)  # fmt: skip
_LEAKS = (
    "by_global", "by_list", "by_default", "by_file", "by_directory", "by_environment", "by_builtin", "by_function", "by_child",
)  # fmt: skip
_INNOCENT = [("add", f"{number}+1") for number in range(4)]


async def _text_as_code(scene: Scene) -> None:
    same = [(await scene.shared("echo", text)).result == text for text in _TEXTS]
    scene.say(f"returned {sum(same)} of {len(same)}")
    scene.say(f"sessions {scene.num_shared}")


async def _other_functions(scene: Scene) -> None:
    for name in ("eval", "exec", "__import__", "print", "os.system", "Hidden", "KEPT", "look.__globals__", ""):
        try:
            await scene.shared(name, "1")
        except InvalidInput:
            continue
        scene.say(f"called {name}")
    scene.say("asked")


async def _leave(scene: Scene, *, together: bool) -> None:
    clean = (await scene.shared("look", "")).result
    for leak in _LEAKS:
        if together:
            _, seen = await asyncio.gather(scene.shared(leak, "secret"), scene.shared("look", ""))
        else:
            await scene.shared(leak, "secret")
            seen = await scene.shared("look", "")
        scene.say(f"{leak} {seen.result == clean}")


async def _exhaust(scene: Scene, function: str) -> None:
    bad, *good = await asyncio.gather(
        scene.shared(function, "1"), *(scene.shared(name, text) for name, text in _INNOCENT)
    )
    scene.say(f"guilty {bad.outcome.value}")
    scene.say(f"innocent {[one.result for one in good]}")


async def _name_it(scene: Scene) -> None:
    await scene.shared("add", "1+1")
    for session_id in scene.shared_ids:
        for attempt in (
            functools.partial(scene.leases.run, session_id, Program(code="1"), 1.0),
            functools.partial(scene.leases.call, session_id, "hide", ["x"], 1.0),
            functools.partial(scene.leases.put_files, session_id, {"left": b"x"}),
        ):
            try:
                await attempt()
                scene.say("reached")
            except UnknownSession:
                scene.say("unknown")


async def _another_tenant(scene: Scene) -> None:
    await scene.shared("hide", "secret", tenant="one")
    for tenant in ("two", "On", "one "):
        scene.say((await scene.shared("find", "", tenant=tenant)).result)


async def _mistaken_tool(scene: Scene, text: str) -> None:
    """A tool that evaluates its argument, which the contract forbids: it still affects only its run."""
    bad, *good = await asyncio.gather(
        scene.shared("evaluate", text), *(scene.shared(name, text) for name, text in _INNOCENT)
    )
    scene.received.append(str(bad))
    scene.say(f"innocent {[one.result for one in good]}")
    scene.say((await scene.shared("find", "", tenant="another")).result)


_RESULTS = r"innocent \['1', '2', '3', '4'\]"
_FORGED = "__import__('os').write(3, {!r})"
_SECRETS = "[open(p).read() for p in ('/etc/shadow', '/root/.ssh/id_rsa', '/proc/1/environ') if __import__('os').path.exists(p)]"

ATTACKS = (
    Attack(
        name="arguments that look like code, frames and formats", verdict=HARMLESS, quick=True, source="", drive=_text_as_code,
        held=[rf"returned {len(_TEXTS)} of {len(_TEXTS)}", "sessions 1"],
    ),
    Attack(
        name="call what is not declared stateless", verdict=HARMLESS, quick=True, source="", drive=_other_functions, held=["asked"],
    ),
    Attack(
        name="leave data for the next call", verdict=HARMLESS, quick=True, source="",
        drive=functools.partial(_leave, together=False), held=[f"{leak} True" for leak in _LEAKS],
    ),
    Attack(
        name="leave data for calls of the same request", verdict=HARMLESS, source="",
        drive=functools.partial(_leave, together=True), held=[f"{leak} True" for leak in _LEAKS],
    ),
    *(
        Attack(
            name=f"exhaust a shared session: {what}", verdict=HARMLESS, quick=function == "leave", source="",
            drive=functools.partial(_exhaust, function=function), held=[f"guilty {outcome}", _RESULTS],
        )
        for what, function, outcome in (
            ("time", "spin", "time"), ("memory", "eat", "memory"), ("output", "flood", "output"),
            ("processes", "fork", "(processes|time|error)"), ("exit", "leave", "exited"), ("stack", "recurse", "error"),
        )
    ),
    Attack(
        name="reach a shared session by its id", verdict=HARMLESS, quick=True, source="", drive=_name_it,
        held=["unknown"] * 3,
    ),
    Attack(
        name="read what another tenant's call hid", verdict=HARMLESS, quick=True, source="", drive=_another_tenant,
        held=["nothing"] * 3,
    ),
    *(
        Attack(
            name=f"a tool that evaluates text by mistake: {what}", verdict=HARMLESS, source="",
            drive=functools.partial(_mistaken_tool, text=text), held=[_RESULTS, "nothing"],
        )
        for what, text in (
            ("a broken frame", _FORGED.format(b"\xff\xff\xff\xff")),
            ("too many results", _FORGED.format(b"\x14\x00\x00\x00" + b'{"replies":[{},{},{}')),
            ("an unrequested frame", _FORGED.format(b"\x02\x00\x00\x00{}")),
            ("close the socket", "__import__('os').close(3)"),
            ("kill everything", "__import__('os').kill(-1, 9) or __import__('os')._exit(1)"),
            ("the host's files", _SECRETS),
            ("the shared session's parent", "__import__('os').kill(__import__('os').getppid(), 9)"),
        )
    ),
)  # fmt: skip

FAMILY = Family(name="shared sessions", attacks=ATTACKS)
