"""The sandbox and reward clients over real gRPC: spreading, refusals, lost nodes, cancellation, gathering."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollmesh.services.sandbox.config import SandboxConfig, TenantQuota, TenantsConfig
from rollmesh.services.sandbox.node import SandboxNode
from rollmesh.shared.clients.reward import RewardClient, RewardClientConfig
from rollmesh.shared.clients.sandbox import ExecOutcome, RemoteSession, SandboxClient, SandboxClientConfig
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.errors import (
    ConnectionLost,
    MeshError,
    NoNode,
    Overloaded,
    PayloadTooLarge,
    Unavailable,
    UnknownOracle,
    UnknownProfile,
)
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.server import RpcServer, ServerConfig
from rollmesh.v1 import reward_pb2, reward_pb2_grpc, types_pb2

ACCESS = Access(token="t")
WAIT_S = 20.0


def connect(address: str) -> grpc.aio.Channel:
    return open_channel(address, access=ACCESS)


async def until(condition: Callable[[], object]) -> None:
    """Polls: what it waits for happens in gRPC's own time."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


# Sandbox --------------------------------------------------------------------------------------------------------------


def sandbox_node(folder: Path, name: str, **changes: Any) -> SandboxNode:
    server = ServerConfig(stop_s=0.0)
    return SandboxNode(
        SandboxConfig(**{"engine": Extension("fake"), **changes}),
        node_id=name,
        access=ACCESS,
        state_dir=folder / name,
        server=server,
    )


@asynccontextmanager
async def sandbox_client(*nodes: SandboxNode | str, **changes: Any) -> AsyncIterator[SandboxClient]:
    addresses = [node if isinstance(node, str) else node.address for node in nodes]
    client = SandboxClient(lambda: addresses, connect, SystemClock(), SandboxClientConfig(**changes))
    try:
        yield client
    finally:
        await client.close()


def live(node: SandboxNode) -> int:
    return node.core.sessions.counts().live


async def test_a_command_refused_for_the_tenants_quota_is_sent_again(tmp_path: Path) -> None:
    tenants = TenantsConfig(by_name={"run": TenantQuota(commands_inflight_max=1)})
    async with (
        sandbox_node(tmp_path, "a", engine=Extension("jail"), tenants=tenants, retry_after_s=0.02) as node,
        sandbox_client(node) as client,
        client.session("python", session_id="s", tenant="run") as slow,
        client.session("python", session_id="t", tenant="run") as quick,
    ):
        order: list[str] = []

        async def run(session: RemoteSession, code: str) -> None:
            order.append((await session.run(code)).result)

        await asyncio.gather(run(slow, "import time; time.sleep(0.3); 1"), run(quick, "2"))
        assert order == ["1", "2"]


async def test_commands_of_many_sessions_share_one_stream(tmp_path: Path) -> None:
    async with sandbox_node(tmp_path, "a") as node, sandbox_client(node) as client:

        async def one(number: int) -> str:
            async with client.session("calc", session_id=f"s{number}") as session:
                return (await session.call("call", f"{number}+1")).result

        results = await asyncio.gather(*(one(number) for number in range(30)))
        assert results == [str(number + 1) for number in range(30)]
        await until(lambda: live(node) == 0)
        assert (client.num_sessions, client.num_pending) == (0, 0)


async def test_sessions_go_to_the_node_with_fewest_and_past_full_ones(tmp_path: Path) -> None:
    async with (
        sandbox_node(tmp_path, "a", sessions_max=2) as small,
        sandbox_node(tmp_path, "b", sessions_max=4) as large,
        sandbox_client(small, large, open_s_max=0.3) as client,
    ):
        sessions = [client.session("calc", session_id=f"s{i}") for i in range(7)]
        for session in sessions[:4]:
            await session.__aenter__()
        assert (live(small), live(large)) == (2, 2)
        for session in sessions[4:6]:
            await session.__aenter__()
        assert (live(small), live(large)) == (2, 4)
        with pytest.raises(Overloaded):
            await sessions[6].__aenter__()
        assert client.num_sessions == 6
        for session in sessions[:6]:
            await session.__aexit__(None, None, None)
        await until(lambda: live(small) + live(large) == 0)


async def test_an_opener_waits_for_a_place(tmp_path: Path) -> None:
    async with sandbox_node(tmp_path, "a", sessions_max=1) as node, sandbox_client(node) as client:
        async with client.session("calc", session_id="first"):
            waiting = asyncio.ensure_future(_called(client, "second"))
            await until(lambda: client.num_sessions == 2 or client.num_pending)
            await until(lambda: client.waiting_for.startswith("a sandbox for 1 session: "))
            assert not waiting.done()
        async with asyncio.timeout(WAIT_S):
            assert await waiting == "2"
        assert client.waiting_for == ""


async def _called(client: SandboxClient, session_id: str) -> str:
    async with client.session("calc", session_id=session_id) as session:
        return (await session.call("call", "1+1")).result


async def test_a_wrong_request_is_refused_at_once_and_a_missing_fleet_named(tmp_path: Path) -> None:
    async with sandbox_node(tmp_path, "a") as node, sandbox_client(node) as client:
        with pytest.raises(UnknownProfile):
            await client.session("ruby", session_id="s").__aenter__()
    async with sandbox_client(open_s_max=0.1) as client:
        with pytest.raises(NoNode, match="no sandbox node has joined"):
            await client.session("calc", session_id="s").__aenter__()


async def test_a_lost_node_fails_what_is_in_flight_and_is_passed_by(tmp_path: Path) -> None:
    async with sandbox_node(tmp_path, "b") as second:
        async with sandbox_node(tmp_path, "a") as first:
            addresses = [first.address]
            client = SandboxClient(lambda: addresses, connect, SystemClock(), SandboxClientConfig(close_s_max=0.2))
            session = client.session("calc", session_id="s")
            opened = await session.__aenter__()
            assert (await opened.call("call", "2+3")).outcome is ExecOutcome.OK
        addresses.append(second.address)
        with pytest.raises(MeshError) as caught:
            await opened.call("call", "1+1")
        assert caught.value.retryable
        await session.__aexit__(None, None, None)
        assert await _called(client, "s2") == "2"
        await client.close()


async def test_cancelling_an_opener_leaves_no_session(tmp_path: Path) -> None:
    async with sandbox_node(tmp_path, "a") as node, sandbox_client(node) as client:
        for turns in range(12):  # cancelled at another point each time
            task = asyncio.ensure_future(_called(client, f"s{turns}"))
            for _ in range(turns):
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.wait([task])
        await until(lambda: live(node) == 0)
        assert (client.num_sessions, client.num_pending) == (0, 0)


# Reward ---------------------------------------------------------------------------------------------------------------


class Scorers(reward_pb2_grpc.RewardServiceServicer):
    """Counts what it is asked; refuses an item whose task is "bad", and loses the connection for one whose task is
    "deadly"; `errors` are raised first."""

    def __init__(self, errors: Sequence[MeshError] = ()) -> None:
        self.errors = list(errors)
        self.sizes: list[int] = []
        self.num_running = 0
        self.num_listed = 0
        self.held = asyncio.Event()
        self.held.set()

    async def ListScorers(self, request: reward_pb2.ListScorersRequest, context: Any) -> reward_pb2.ListScorersResponse:
        self.num_listed += 1
        if self.errors:
            raise self.errors.pop(0)
        infos = [reward_pb2.ScorerInfo(columns=columns) for columns in (["entropy", "logprobs"], [], ["entropy"])]
        return reward_pb2.ListScorersResponse(scorers=infos)

    async def Score(
        self, request: reward_pb2.RewardServiceScoreRequest, context: Any
    ) -> reward_pb2.RewardServiceScoreResponse:
        self.sizes.append(len(request.items))
        self.num_running += 1
        try:
            await self.held.wait()
        finally:
            self.num_running -= 1
        if self.errors:
            raise self.errors.pop(0)
        if any(item.task.task_id == "bad" for item in request.items):
            raise UnknownOracle("no such key")
        if any(item.task.task_id == "deadly" for item in request.items):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        reward = types_pb2.Reward(name="r", value=1.0, segment=-1, outcome=types_pb2.REWARD_OUTCOME_OK)
        samples = [sample.sample_id for item in request.items for sample in item.samples]
        return reward_pb2.RewardServiceScoreResponse(
            samples=[reward_pb2.SampleRewards(sample_id=sample_id, rewards=[reward]) for sample_id in samples]
        )


def scorers_of(errors: Sequence[MeshError] = ()) -> Scorers:
    return Scorers(errors)  # type: ignore[abstract]  # the other verbs answer UNIMPLEMENTED


@asynccontextmanager
async def reward_client(scorers: Scorers, **changes: Any) -> AsyncIterator[RewardClient]:
    async with RpcServer(ServerConfig(stop_s=0.0), access=ACCESS) as server:
        server.add(reward_pb2_grpc.add_RewardServiceServicer_to_server, scorers)
        await server.start()
        config = RewardClientConfig(backoff_s=0.01, **changes)
        client = RewardClient(lambda: [server.address], connect, SystemClock(), config)
        try:
            yield client
        finally:
            await client.close()


def item(name: str, *, num_samples: int = 1, task: str = "good") -> reward_pb2.ScoreItem:
    samples = [types_pb2.Sample(sample_id=f"{name}-{i}", policy="main") for i in range(num_samples)]
    return reward_pb2.ScoreItem(task=types_pb2.Task(task_id=task), samples=samples)


async def test_the_columns_of_the_scorers_are_asked_once() -> None:
    scorers = scorers_of([Unavailable("restarting", retry_after_s=0.0)])
    async with reward_client(scorers) as client:
        assert sorted(await client.columns()) == ["entropy", "logprobs"]
        assert sorted(await client.columns()) == ["entropy", "logprobs"]
    assert scorers.num_listed == 2, "one failed"


async def test_a_batch_beyond_the_message_limit_is_sent_in_parts() -> None:
    scorers = scorers_of()
    large = item("e")
    large.segments.add(token_ids=bytes(3 * 2**20))
    too_large = item("f")
    too_large.segments.add(token_ids=bytes(9 * 2**20))
    async with reward_client(scorers) as client:
        answers = await asyncio.gather(
            *(client.score("run", large) for _ in range(4)), client.score("run", too_large), return_exceptions=True
        )
    assert [len(answer) for answer in answers[:4] if not isinstance(answer, BaseException)] == [1] * 4
    assert isinstance(answers[4], PayloadTooLarge)
    assert sorted(scorers.sizes) in ([1, 1, 2], [2, 2])


async def test_episodes_that_end_together_are_scored_in_one_request() -> None:
    scorers = scorers_of()
    async with reward_client(scorers) as client:
        answers = await asyncio.gather(*(client.score("run", item(f"e{i}", num_samples=1 + i % 2)) for i in range(50)))
    assert scorers.sizes == [50]
    assert [len(answer) for answer in answers] == [1, 2] * 25
    assert answers[0][0][0].value == 1.0


async def test_batches_are_bounded_and_runs_kept_apart() -> None:
    scorers = scorers_of()
    async with reward_client(scorers, batch_max=8) as client:
        await asyncio.gather(*(client.score(f"run{i % 2}", item(f"e{i}")) for i in range(16)))
    assert sorted(scorers.sizes) == [4, 4, 4, 4]


async def test_a_refused_item_does_not_take_its_company_with_it() -> None:
    scorers = scorers_of()
    async with reward_client(scorers) as client:
        items = [item(f"e{i}", task="bad" if i == 3 else "good") for i in range(8)]
        answers = await asyncio.gather(*(client.score("run", i) for i in items), return_exceptions=True)
    refused = [i for i, answer in enumerate(answers) if isinstance(answer, BaseException)]
    assert refused == [3]
    assert isinstance(answers[3], UnknownOracle)


async def test_an_item_that_ends_its_node_does_not_take_its_company_with_it() -> None:
    scorers = scorers_of()
    async with reward_client(scorers, tries_max=3) as client:
        items = [item(f"e{i}", task="deadly" if i == 3 else "good") for i in range(8)]
        answers = await asyncio.gather(*(client.score("run", i) for i in items), return_exceptions=True)
    assert [i for i, answer in enumerate(answers) if isinstance(answer, BaseException)] == [3]
    assert isinstance(answers[3], ConnectionLost)
    assert scorers.sizes == [8, 4, 2, 2, 1, 1, 1, 1, 4], "each batch once, and the item itself three times"


async def test_a_busy_service_is_asked_again_a_limited_number_of_times() -> None:
    busy = Overloaded("busy", retry_after_s=0.01)
    scorers = scorers_of([busy, Unavailable("restarting", retry_after_s=0.01)])
    async with reward_client(scorers) as client:
        assert await client.score("run", item("e"))
    scorers = scorers_of([busy] * 9)
    async with reward_client(scorers, tries_max=3) as client:
        with pytest.raises(Overloaded):
            await client.score("run", item("e"))
    assert len(scorers.sizes) == 3


async def test_scoring_waits_for_a_node_that_is_away_longer_than_its_attempts_take() -> None:
    scorers, addresses = scorers_of(), list[str]()
    config = RewardClientConfig(backoff_s=0.001, backoff_s_max=0.001, tries_max=1)
    client = RewardClient(lambda: addresses, connect, SystemClock(), config)
    scoring = asyncio.ensure_future(client.score("run", item("e")))
    await until(lambda: "no reward node has joined" in client.waiting_for)
    addresses.append("127.0.0.1:1")  # a node that was killed, and is still listed
    await until(lambda: client.waiting_for != "" and "no reward node has joined" not in client.waiting_for)
    async with RpcServer(ServerConfig(stop_s=0.0), access=ACCESS) as server:
        server.add(reward_pb2_grpc.add_RewardServiceServicer_to_server, scorers)
        await server.start()
        addresses[:] = [server.address]
        assert await scoring
        await client.close()


async def test_without_a_reward_node_the_error_says_that_no_node_serves() -> None:
    client = RewardClient(list, connect, SystemClock(), RewardClientConfig(backoff_s=0.001, wait_s_max=0.01))
    with pytest.raises(NoNode, match=r"no reward node served for 0.01 s: no reward node has joined"):
        await client.score("run", item("e"))
    await client.close()


async def test_a_request_ends_when_all_who_wait_for_it_are_cancelled() -> None:
    scorers = scorers_of()
    scorers.held.clear()
    async with reward_client(scorers) as client:
        tasks = [asyncio.ensure_future(client.score("run", item(f"e{i}"))) for i in range(3)]
        await until(lambda: scorers.num_running == 1)
        tasks[0].cancel()
        tasks[1].cancel()
        await asyncio.wait(tasks[:2])
        assert client.num_pending == 1
        tasks[2].cancel()
        await until(lambda: scorers.num_running == 0 and client.num_pending == 0)
