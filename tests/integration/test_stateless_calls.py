"""Calls of stateless functions in real jails over real gRPC: what they cannot pass to each other, limits, faults,
ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from rollmesh.services.rollout.config import ToolConfig
from rollmesh.services.rollout.tools import ToolBox
from rollmesh.services.sandbox.config import ProfileConfig, SandboxConfig, SharedConfig
from rollmesh.services.sandbox.node import SandboxNode
from rollmesh.services.sandbox.sessions import SessionEnd
from rollmesh.shared.clients.sandbox import ExecOutcome, SandboxClient, SandboxClientConfig
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.domain.trajectory import EpisodeKey
from rollmesh.shared.errors import InvalidInput, UnknownSession
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.v1 import sandbox_pb2 as pb

from .process_tree import descendants

ACCESS = Access(token="t")
PRELUDE = '''
import builtins, glob, json, os, signal, sys, threading, time

class Array:
    """Compares as an array does: without one truth value."""
    def __eq__(self, other): return self
    def __bool__(self): raise ValueError("ambiguous")
COUNT, SEEN, BIG = 0, [], {n: 0 for n in range(1000)}
def look(_):
    """Everything that a call could find of earlier ones."""
    return json.dumps({
        "count": COUNT, "seen": SEEN, "big": len(BIG), "defaults": list(by_default.__defaults__[0]), "files": os.listdir("."),
        "cwd": os.getcwd(), "environment": os.environ.get("LEFT", ""), "builtins": [abs(-1), len("ab")], "attribute": hasattr(by_attribute, "left"),
        "new": "LEFT" in globals(), "path": "left" in sys.path, "threads": threading.active_count(), "handler": str(signal.getsignal(signal.SIGINT)),
        "text": add("1+2"),
    })
def add(text): a, b = text.split("+"); return int(a) + int(b)
def by_global(text):
    global COUNT
    COUNT += 1
def by_array(text): globals()["SEEN"] = Array()
def by_array_in_a_list(text): SEEN[:] = [Array()]
def by_new_name(text): globals()["LEFT"] = text
def by_list(text): SEEN.append(text)
def by_big_dict(text): BIG[text] = 1
def by_default(text, seen=[]): seen.append(text)
def by_attribute(text): by_attribute.left = text
def by_replaced_function(text): globals()["add"] = lambda text: "left"
def by_code(text): add.__code__ = by_list.__code__
def by_builtin(text): builtins.abs = lambda thing: 7
def by_builtin_of_the_jail(text): builtins.len = lambda thing: 7
def by_file(text): open("left", "w").write(text)
def by_directory(text): os.mkdir("left"); os.chdir("left")
def by_environment(text): os.environ["LEFT"] = text
def by_path(text): sys.path.append("left")
def by_child(text):
    if not os.fork(): time.sleep(100)
def by_thread(text): threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
def by_handler(text): signal.signal(signal.SIGINT, signal.SIG_IGN)
def nap(text): time.sleep(float(text)); return text
def spin(text):
    while True: pass
def eat(text): return len(bytearray(int(text)))
def leave(text): os._exit(3)
def shout(text): return text * 1_000_000
def chatter(text): print(text); return text
def flood(text):
    while True: print("x" * 1000)
def fail(text): raise ValueError(text)
'''
LEAKS = [line.split("(")[0][4:] for line in PRELUDE.splitlines() if line.startswith("def by_")]
HIDDEN = """
class Holder: pass
def hide(text): Holder.left = text
def find(_): return getattr(Holder, "left", "")
"""


def functions_of(prelude: str) -> tuple[str, ...]:
    return tuple(line.split("(")[0][4:] for line in prelude.splitlines() if line.startswith("def "))


LIMITS: dict[str, int | float] = {
    "call_s": 3.0, "cpu_s": 3.0, "memory_bytes": 256 << 20, "processes_max": 8, "disk_bytes": 1 << 20, "output_bytes": 4096,
    "flood_bytes": 65536,
}  # fmt: skip


@asynccontextmanager
async def serving(
    folder: Path, prelude: str = PRELUDE, **shared: float
) -> AsyncIterator[tuple[SandboxNode, SandboxClient]]:
    config = SandboxConfig(
        profiles={
            "tools": ProfileConfig(prelude=prelude, stateless=functions_of(prelude), limits=LIMITS),
            "python": ProfileConfig(),
        },
        shared=SharedConfig(**shared),  # type: ignore[arg-type]
        reap_every_s=0.1,
        grace_s=0.5,
    )
    async with SandboxNode(config, node_id="sandbox-0", access=ACCESS, state_dir=folder) as node:
        client = SandboxClient(
            lambda: [node.address], lambda address: open_channel(address, access=ACCESS), SystemClock(),
            SandboxClientConfig(open_s_max=20.0),
        )  # fmt: skip
        try:
            yield node, client
        finally:
            await client.close()


async def until(check: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not check():  # noqa: ASYNC110 - the state of another process has no event
            await asyncio.sleep(0.02)


async def test_no_call_finds_what_an_earlier_one_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path) as (node, client):

        async def call(function: str, text: str = "secret of an episode") -> str:
            return (await client.call_stateless("tools", function, text, tenant="run")).result

        clean = json.loads(await call("look"))
        assert clean["text"] == 3
        for leak in LEAKS:
            caplog.clear()
            # together with it, so that it shares its request and session, and later
            _, together = await asyncio.gather(call(leak), call("look"))
            assert json.loads(together) == clean, leak
            assert json.loads(await call("look")) == clean, leak
            if leak != "by_builtin_of_the_jail":  # the jail's own code fails, which is the end of the session
                assert f"function {leak} of profile 'tools' is declared stateless and left state" in caplog.text
        assert node.core.sessions.counts().created > len(LEAKS)


async def test_state_that_the_contract_excludes_passes_only_within_a_tenant(tmp_path: Path) -> None:
    """The check is not an isolation mechanism. State that it cannot find stays in the sessions of one run."""
    async with serving(tmp_path, HIDDEN) as (_, client):
        await client.call_stateless("tools", "hide", "x", tenant="a")
        assert (await client.call_stateless("tools", "find", "", tenant="a")).result == "x"
        assert (await client.call_stateless("tools", "find", "", tenant="b")).result == ""


async def test_text_of_a_model_is_an_argument_and_never_code(tmp_path: Path) -> None:
    texts = (
        "__import__('os')._exit(3)",
        "1+1\nimport os",
        "'); os._exit(1); ('",
        "\0",
        "{}",
        "[1,2]",
        "\ud800".encode("utf-8", "replace").decode(),
    )
    async with serving(tmp_path) as (node, client):
        for text in texts:
            result = await client.call_stateless("tools", "chatter", text, tenant="run")
            assert (result.outcome, result.result) == (ExecOutcome.OK, text)
        for name in ("__import__", "eval", "exec", "print", "os.getcwd", ""):
            with pytest.raises(InvalidInput, match="must be declared stateless"):
                await client.call_stateless("tools", name, "1", tenant="run")
        assert node.core.sessions.counts().created == 1


async def test_limits_hold_per_call_and_innocent_calls_get_their_results(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client):

        async def call(function: str, text: str = "1") -> tuple[str, str]:
            result = await client.call_stateless("tools", function, text, tenant="run")
            return result.outcome.name, result.result

        guilty = [
            ("spin", "TIME_LIMIT"),
            ("leave", "EXITED"),
            ("eat", "MEMORY_LIMIT"),
            ("flood", "OUTPUT_LIMIT"),
            ("fail", "ERROR"),
        ]
        for function, outcome in guilty:
            text = str(1 << 30) if function == "eat" else "1"
            bad, *good = await asyncio.gather(call(function, text), *(call("add", f"{n}+1") for n in range(5)))
            assert bad[0] == outcome, function
            assert good == [("OK", str(n + 1)) for n in range(5)], function
        result = await client.call_stateless("tools", "shout", "ab", tenant="run")
        assert (len(result.result), result.truncated) == (4096, True)
        both = await asyncio.gather(*(client.call_stateless("tools", "chatter", text, tenant="run") for text in "ab"))
        assert [(one.stdout, one.result) for one in both] == [("a\n", "a"), ("b\n", "b")]
        error = await client.call_stateless("tools", "fail", "why", tenant="run")
        assert error.error == "ValueError: why"


async def test_a_slow_call_does_not_hold_up_the_others(tmp_path: Path) -> None:
    async with serving(tmp_path, slice_s=0.01, sessions_max=2) as (node, client):
        await client.call_stateless("tools", "add", "1+1", tenant="run")
        slow = asyncio.ensure_future(client.call_stateless("tools", "nap", "1.5", tenant="run"))
        await until(lambda: node.core.stateless.num_calls)
        num_fast = 0
        while not slow.done():
            await client.call_stateless("tools", "add", "1+1", tenant="run")
            num_fast += not slow.done()
        assert (await slow).outcome is ExecOutcome.OK
        assert num_fast > 3


async def test_a_lost_jail_is_an_infra_failure_that_the_client_retries(tmp_path: Path) -> None:
    async with serving(tmp_path) as (node, client):
        await client.call_stateless("tools", "add", "1+1", tenant="run")
        waiting = [asyncio.ensure_future(client.call_stateless("tools", "nap", "0.3", tenant="run")) for _ in range(3)]
        await asyncio.sleep(0.1)
        zygotes = [process.pid for process in descendants(os.getpid()) if "python" in process.command]
        for pid in zygotes:
            with suppress(ProcessLookupError):  # it ended with its parent
                os.kill(pid, signal.SIGKILL)
        assert [one.outcome for one in await asyncio.gather(*waiting)] == [ExecOutcome.OK] * 3
        assert node.core.sessions.counts().ended[SessionEnd.LOST] >= 1


async def test_shared_sessions_end_when_idle_and_with_their_node(tmp_path: Path) -> None:

    def living() -> set[int]:  # an exited process that nothing has waited for has no command
        return {process.pid for process in descendants(os.getpid()) if process.command}

    others = living()
    async with serving(tmp_path, idle_s=0.3) as (node, client):
        for tenant in "ab":
            await client.call_stateless("tools", "add", "1+1", tenant=tenant)
        assert node.core.sessions.counts().live == 2
        await until(lambda: not node.core.sessions.counts().live)
        await client.call_stateless("tools", "add", "1+1", tenant="a")
        noted = living() - others
        assert noted
    await until(lambda: not living() & noted)


async def test_a_client_cannot_name_a_shared_session(tmp_path: Path) -> None:
    async with serving(tmp_path) as (node, client):
        await client.call_stateless("tools", "add", "1+1", tenant="run")
        (shared,) = node.core.sessions.owners()
        link = client._links[node.address]
        for command in (
            pb.WorkRequest(run=pb.RunCode(code="globals().update(left=1)")),
            pb.WorkRequest(call=pb.CallFunction(function="add", arguments=["1+1"])),
            pb.WorkRequest(put_files=pb.PutFiles(files=[pb.SandboxFile(path="left", content=b"x")])),
            pb.WorkRequest(snapshot=pb.SnapshotSession()),
            pb.WorkRequest(renew=pb.RenewSession()),
        ):
            command.session_id = shared
            with pytest.raises(UnknownSession):
                await link.request(command, limit_s=10)
        closing = pb.WorkRequest(session_id=shared, close=pb.CloseSession())
        await link.request(closing, limit_s=10)
        assert list(node.core.sessions.owners()) == [shared]


async def test_judgments_and_single_executions_never_use_shared_sessions(tmp_path: Path) -> None:
    manifest = {"kind": "stdio", "profile": "python", "tests": [{"stdin": "", "stdout": "4"}]}
    async with serving(tmp_path) as (node, client):
        await client.call_stateless("tools", "add", "1+1", tenant="run")
        (shared,) = node.core.sessions.owners()
        ran: list[str] = []
        engine = node.core._engine
        call_all = engine.call_all

        async def noted(session_id: str, *arguments: object) -> object:
            ran.append(session_id)
            return await call_all(session_id, *arguments)  # type: ignore[arg-type]

        engine.call_all = noted  # type: ignore[method-assign, assignment]
        report = await client.run_tests({"solution.py": b"print(2 + 2)"}, manifest=json.dumps(manifest))
        assert report.accepted_share == 1
        assert ran == []
        assert list(node.core.sessions.owners()) == [shared]


async def test_a_toolbox_opens_a_session_only_for_tools_that_need_one(tmp_path: Path) -> None:
    tools = {
        "add": ToolConfig(profile="tools", function="add", stateless=True),
        "code": ToolConfig(profile="tools"),
        "python": ToolConfig(profile="python"),
    }
    key = EpisodeKey(run="run", task="t", group="g", episode="e", attempt=1)
    async with serving(tmp_path) as (node, client):
        async with ToolBox(client, tools, ["add", "code"], key, 60) as box:
            await box.open()
            assert client.num_sessions == 0
            assert (await box.call("add", "1+2")).text == "3"
            assert client.num_sessions == 0
            assert (await box.call("code", "by_list('x'); SEEN")).text == "['x']"
            assert client.num_sessions == 1
            twin = await box.fork()
            assert (await twin.call("add", "1+2")).text == "3"
            assert not (await box.call("add", "nonsense")).ok
        async with ToolBox(client, tools, ["add", "python"], key, 60) as box:
            await box.open()
            assert client.num_sessions == 1
        owners = node.core.sessions.owners().values()
        assert "run: stateless calls" in owners
