"""SandboxService over real gRPC: multiplexing, order, rejections, outcomes, leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollmesh.services.sandbox.config import ProfileConfig, SandboxConfig, TenantQuota, TenantsConfig
from rollmesh.services.sandbox.node import SandboxCore
from rollmesh.services.sandbox.output_relay import OutputRelay
from rollmesh.services.sandbox.sessions import SessionEnd
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.ids import RandomIds
from rollmesh.shared.errors import InvalidInput, UnknownProfile
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.server import RpcServer, ServerConfig
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import sandbox_pb2 as pb
from rollmesh.v1 import sandbox_pb2_grpc

ACCESS = Access(token="t")
WAIT_S = 20.0


class Client:
    """One Work stream with responses by request id."""

    def __init__(self, stub: Any) -> None:
        self.stub = stub
        self._stream = stub.Work()
        self._num = 0

    async def send(self, session_id: str, **command: Any) -> str:
        self._num += 1
        request_id = str(self._num)
        await self._stream.write(pb.WorkRequest(request_id=request_id, session_id=session_id, **command))
        return request_id

    async def read(self) -> pb.WorkResponse:
        async with asyncio.timeout(WAIT_S):
            answer: pb.WorkResponse = await self._stream.read()
            return answer

    async def ask(self, session_id: str, **command: Any) -> pb.WorkResponse:
        request_id = await self.send(session_id, **command)
        answer = await self.read()
        assert (answer.request_id, answer.session_id) == (request_id, session_id)
        return answer

    async def open(self, session_id: str = "s", profile: str = "python", **fields: Any) -> None:
        answer = await self.ask(session_id, open=pb.OpenSession(profile=profile, owner="test", **fields))
        assert answer.WhichOneof("answer") == "opened", answer

    async def run(self, code: str, session_id: str = "s", wall_s: float = 0) -> pb.ExecResult:
        answer = await self.ask(session_id, run=pb.RunCode(language="python", code=code, wall_s=wall_s))
        assert answer.WhichOneof("answer") == "result", answer
        return answer.result

    def cancel(self) -> None:
        self._stream.cancel()


@asynccontextmanager
async def serving(state_dir: Path, **changes: Any) -> AsyncIterator[tuple[SandboxCore, Any, ManualClock]]:
    config, clock = SandboxConfig(**changes), ManualClock()
    async with (
        SandboxCore(config, state_dir=state_dir, clock=clock, ids=RandomIds()) as node,
        RpcServer(ServerConfig(stop_s=0.0), access=ACCESS) as server,
    ):
        server.add(sandbox_pb2_grpc.add_SandboxServiceServicer_to_server, node.servicer)
        await server.start()
        async with open_channel(server.address, access=ACCESS) as channel:
            yield node, sandbox_pb2_grpc.SandboxServiceStub(channel), clock


async def test_session_keeps_state_over_a_stream(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, stub, _):
        client = Client(stub)
        await client.open()
        assert (await client.run("x = 20")).outcome == pb.EXEC_OUTCOME_OK
        result = await client.run("print('hi')\nx + 1")
        assert (result.stdout, result.result, result.error, result.session_alive) == ("hi\n", "21", "", True)
        result = await client.run("x / 0")
        assert (result.outcome, result.error) == (pb.EXEC_OUTCOME_ERROR, "ZeroDivisionError: division by zero")
        assert "line 1" in result.stderr
        assert (await client.ask("s", close=pb.CloseSession())).WhichOneof("answer") == "closed"
        assert (await client.ask("s", close=pb.CloseSession())).WhichOneof("answer") == "closed"


async def test_exit_ends_the_code_of_a_call_and_not_the_session(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, stub, _):
        client = Client(stub)
        await client.open()
        for code in ("exit()", "quit(3)", "(lambda: exit('text'))()"):
            result = await client.run(f"x = 1\n{code}\nx = 2")
            assert (result.error.partition(":")[0], result.session_alive) == ("SystemExit", True)
            assert (await client.run("import sys; x, sys.stdin.read()")).result == "(1, '')"
        down = "def down(n): return 0 if n == 0 else 1 + down(n - 1)\n"
        assert (await client.run(f"{down}down(985)")).result == "985"
        client.cancel()


async def test_commands_of_a_session_keep_their_order_and_sessions_do_not_wait_for_each_other(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, stub, _):
        client = Client(stub)
        await client.send("slow", open=pb.OpenSession(profile="python"))
        await client.send("slow", run=pb.RunCode(code="order = []\nwhile True: pass", wall_s=5.0))
        for number in range(5):
            await client.send("slow", run=pb.RunCode(code=f"order.append({number})\nstr(order)"))
        await client.send("slow", close=pb.CloseSession())
        await client.send("quick", open=pb.OpenSession(profile="calc"))
        await client.send("quick", call=pb.CallFunction(function="call", arguments=["6*7"]))
        answers = [await client.read() for _ in range(10)]
        quick = [number for number, answer in enumerate(answers) if answer.session_id == "quick"]
        slow = [answer for answer in answers if answer.session_id == "slow"]
        assert max(quick) <= 3, "while the slow session was still in its loop"
        assert answers[quick[-1]].result.result == "42"
        assert [answer.request_id for answer in slow] == ["1", "2", "3", "4", "5", "6", "7", "8"]
        assert slow[1].result.outcome == pb.EXEC_OUTCOME_TIME_LIMIT
        assert slow[6].result.result == repr("[0, 1, 2, 3, 4]")


async def test_limits_become_outcomes(tmp_path: Path) -> None:
    async with serving(tmp_path, grace_s=0.3) as (node, stub, _):
        client = Client(stub)
        await client.open(limits=pb.SandboxLimits(memory_bytes=64 << 20, processes_max=4, output_bytes=10))
        memory = await client.run("bytes(1 << 30)")
        assert (memory.outcome, memory.session_alive) == (pb.EXEC_OUTCOME_MEMORY_LIMIT, True)
        cut = await client.run("'x' * 50")
        assert (cut.outcome, cut.result, cut.truncated) == (pb.EXEC_OUTCOME_OK, "'xxxxxxxxx", True)
        processes = await client.run("import os\nwhile True: os.fork()")
        assert (processes.outcome, processes.session_alive) == (pb.EXEC_OUTCOME_PROCESS_LIMIT, False)
        answer = await client.ask("s", run=pb.RunCode(code="1"))
        assert answer.failure.reason == "UNKNOWN_SESSION"
        await client.open("killed")
        killed = await client.run("sum(iter(int, 1))", "killed", 0.2)
        assert (killed.outcome, killed.session_alive) == (pb.EXEC_OUTCOME_TIME_LIMIT, False)
        assert node.sessions.counts().ended[SessionEnd.EXITED] == 2


@pytest.mark.parametrize(
    ("command", "code", "reason"),
    [
        ({"run": pb.RunCode(code="1")}, 5, "UNKNOWN_SESSION"),
        ({"open": pb.OpenSession(profile="cobol")}, 5, "UNKNOWN_PROFILE"),
        ({"open": pb.OpenSession(profile="calc", limits=pb.SandboxLimits(wall_s=1e9))}, 3, "INVALID_INPUT"),
        ({"open": pb.OpenSession(profile="calc", ttl_s=1e9)}, 3, "INVALID_INPUT"),
        ({"put_files": pb.PutFiles(files=[pb.SandboxFile(path="../x")])}, 3, "INVALID_INPUT"),
        ({"get_files": pb.GetFiles(paths=["/etc/passwd"])}, 3, "INVALID_INPUT"),
        ({"snapshot": pb.SnapshotSession()}, 5, "UNKNOWN_SESSION"),
        ({"fork": pb.ForkSession(snapshot_id="x")}, 5, "UNKNOWN_SNAPSHOT"),
        ({"restore": pb.RestoreSession(snapshot_id="x")}, 5, "UNKNOWN_SNAPSHOT"),
        ({}, 3, "INVALID_INPUT"),
    ],
)
async def test_refusals_are_typed_and_leave_the_stream(
    tmp_path: Path, command: dict[str, Any], code: int, reason: str
) -> None:
    async with serving(tmp_path, engine=Extension("fake")) as (node, stub, _):
        client = Client(stub)
        failure = (await client.ask("s", **command)).failure
        assert (failure.code, failure.reason) == (code, reason)
        assert failure.message
        await client.open(profile="calc")
        assert node.sessions.counts().live == 1


async def test_full_node_says_when_to_come_back(tmp_path: Path) -> None:
    async with serving(tmp_path, engine=Extension("fake"), sessions_max=1) as (_, stub, _):
        client = Client(stub)
        await client.open("a", profile="calc")
        failure = (await client.ask("b", open=pb.OpenSession(profile="calc"))).failure
        assert (failure.code, failure.reason, failure.retry_after_s) == (8, "OVERLOADED", 0.5)
        await client.ask("a", close=pb.CloseSession())
        await client.open("b", profile="calc")


async def test_files_travel_both_ways(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, stub, _):
        client = Client(stub)
        await client.open()
        put = pb.PutFiles(files=[pb.SandboxFile(path="a/in.txt", content=b"1 2 3")])
        assert (await client.ask("s", put_files=put)).WhichOneof("answer") == "files"
        await client.run("open('out.bin', 'wb').write(open('a/in.txt', 'rb').read()[::-1])")
        answer = await client.ask("s", get_files=pb.GetFiles(paths=["out.bin"]))
        assert [(file.path, file.content) for file in answer.files.files] == [("out.bin", b"3 2 1")]


async def test_links_to_elsewhere_read_nothing_of_the_host(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, stub, _):
        client = Client(stub)
        await client.open()
        await client.run("import os; os.symlink('/etc/shadow', 'a'); os.symlink('/dev/zero', 'b'); os.mkfifo('c')")
        for name in "abc":
            failure = (await client.ask("s", get_files=pb.GetFiles(paths=[name]))).failure
            assert "no such file" in failure.message or "not a regular file" in failure.message


async def test_session_outlives_its_broken_stream(tmp_path: Path) -> None:
    async with serving(tmp_path) as (node, stub, _):
        first = Client(stub)
        await first.open()
        await first.run("x = 5")
        await first.send("s", run=pb.RunCode(code="import time; time.sleep(0.2); x = 6"))
        await first.send("other", run=pb.RunCode(code="1"))
        await first.read()  # the rejection arrived, so the previous command has started
        first.cancel()
        assert (await Client(stub).run("x")).result == "6"
        assert node.sessions.counts().live == 1


async def test_reaper_ends_what_is_not_used(tmp_path: Path) -> None:
    async with serving(tmp_path, ttl_s=50.0) as (node, stub, clock):
        client = Client(stub)
        await client.open("short", ttl_s=10.0)
        await client.open("long")
        await clock.run_for(9.0)
        assert (await client.run("1", "short")).result == "1"
        await clock.run_for(9.5)
        assert node.sessions.counts().live == 2
        await clock.run_for(2.0)
        assert node.sessions.owners() == {"long": "test"}
        assert node.sessions.counts().ended[SessionEnd.EXPIRED] == 1
        failure = (await client.ask("short", run=pb.RunCode(code="1"))).failure
        assert failure.reason == "UNKNOWN_SESSION"


async def test_a_lease_is_renewed_without_a_command(tmp_path: Path) -> None:
    async with serving(tmp_path, engine=Extension("fake")) as (node, stub, clock):
        client = Client(stub)
        await client.open("kept", profile="calc", ttl_s=10.0)
        await client.open("left", profile="calc", ttl_s=10.0)
        await clock.run_for(8.0)
        assert (await client.ask("kept", renew=pb.RenewSession())).WhichOneof("answer") == "done"
        await clock.run_for(8.0)
        assert list(node.sessions.owners()) == ["kept"]
        failure = (await client.ask("left", renew=pb.RenewSession())).failure
        assert failure.reason == "UNKNOWN_SESSION"


async def test_a_tenant_beyond_its_quota_gets_a_back_off_time(tmp_path: Path) -> None:
    tenants = TenantsConfig(by_name={"small": TenantQuota(sessions_max=1)})
    async with serving(tmp_path, engine=Extension("fake"), tenants=tenants) as (_, stub, _):
        client = Client(stub)
        await client.open("a", profile="calc", tenant="small")
        failure = (await client.ask("b", open=pb.OpenSession(profile="calc", tenant="small"))).failure
        assert (failure.code, failure.reason, failure.retry_after_s) == (8, "OVERLOADED", 0.5)
        assert failure.metadata["tenant"] == "small"
        await client.open("b", profile="calc", tenant="large")


async def test_exec_runs_once_and_leaves_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as (node, stub, _):
        response = await stub.Exec(pb.ExecRequest(profile="python", run=pb.RunCode(code="print(1)\n2")))
        assert (response.result.stdout, response.result.result, response.result.session_alive) == ("1\n", "2", False)
        counts = node.sessions.counts()
        assert (counts.created, counts.live, counts.ended[SessionEnd.CLOSED]) == (1, 0, 1)
        with pytest.raises(UnknownProfile), typed_errors():
            await stub.Exec(pb.ExecRequest(profile="cobol"))
        with pytest.raises(InvalidInput, match="language"), typed_errors():
            await stub.Exec(pb.ExecRequest(profile="python", run=pb.RunCode(language="cobol", code="1")))


async def test_stopping_the_node_ends_running_code(tmp_path: Path) -> None:
    async with serving(tmp_path, stop_s=0.1) as (node, stub, _):
        client = Client(stub)
        await client.open()
        await client.send("s", run=pb.RunCode(code="while True: pass"))
        await client.send("other", run=pb.RunCode(code="1"))
        await client.read()
        client.cancel()
    counts = node.sessions.counts()
    assert (counts.created, counts.live) == (1, 0)


async def test_the_node_describes_its_profiles_languages_and_mechanisms(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, stub, _):
        said = await stub.DescribeSandbox(pb.DescribeSandboxRequest())
    enforced = {mechanism.name: mechanism.enforced for mechanism in said.mechanisms}
    assert said.driver == "jail"
    assert enforced["seccomp"]
    assert enforced["pid namespace"]
    assert "python" in said.languages
    profiles = {profile.name: profile for profile in said.profiles}
    assert profiles["python"].limits.memory_bytes == 512 << 20
    assert len({profile.digest for profile in profiles.values()}) == len(profiles)


FORGED = """
import json, os, struct
body = json.dumps({forged}).encode()
frame = memoryview(struct.pack("<I", len(body)) + body)
while frame:
    frame = frame[os.write(3, frame):]
"""


@pytest.mark.parametrize(
    "forged",
    [
        "{'refused': 'A' * 12_000_000}",
        "{'refused': 'A' * 4_000_000}",
        "{'outcome': 'ok', 'exit_status': 10**12}",
        "{'outcome': 'ok', 'lost': [''] * 500_000}",
    ],
    ids=["refusal above a frame", "refusal", "exit status", "lost"],
)
async def test_what_one_session_answers_breaks_no_other_sessions_call(tmp_path: Path, forged: str) -> None:
    async with serving(tmp_path) as (_, stub, _):
        client = Client(stub)
        await client.open("victim")
        await client.open("attacker")
        await client.send(
            "victim", run=pb.RunCode(language="python", code="input_ = 0\nimport time; time.sleep(2)\n6*7")
        )
        answer = await client.ask(
            "attacker", run=pb.RunCode(language="python", code=FORGED.replace("{forged}", forged))
        )
        assert answer.result.outcome == pb.EXEC_OUTCOME_EXITED, answer
        assert (await client.read()).result.result == "42"


async def test_an_answer_above_a_message_is_refused_alone(tmp_path: Path) -> None:
    limits: dict[str, int | float] = {"disk_bytes": 32 << 20}
    profiles = {"python": ProfileConfig(limits=limits)}
    async with serving(tmp_path, files_bytes_max=16 << 20, profiles=profiles) as (_, stub, _):
        client = Client(stub)
        await client.open()
        await client.run("open('large', 'wb').write(bytes(10 << 20))")
        answer = await client.ask("s", get_files=pb.GetFiles(paths=["large"]))
        assert (answer.failure.reason, answer.failure.code) == ("PAYLOAD_TOO_LARGE", 8), answer
        assert (await client.run("6*7")).result == "42"


async def test_a_session_that_says_why_at_length_is_refused_in_a_few_words(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, stub, _):
        client = Client(stub)
        await client.open()
        answer = await client.ask("s", call=pb.CallFunction(function="f" * 100_000))
        assert answer.failure.reason == "INVALID_INPUT"
        assert 900 < len(answer.failure.message) <= 1500
        assert (await client.run("6*7")).result == "42"


async def test_output_above_a_message_comes_in_several() -> None:
    answers: asyncio.Queue[Any] = asyncio.Queue()
    relay = OutputRelay(pb.WorkRequest(request_id="1", session_id="s"), answers, 40)
    relay.pass_on(1, "x" * 25)
    relay.pass_on(2, "y")
    assert [(piece.output.descriptor, piece.output.text) for piece in relay.take()] == [
        (1, "x" * 10), (1, "x" * 10), (1, "x" * 5), (2, "y"),
    ]  # fmt: skip
