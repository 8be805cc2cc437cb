"""The router over real nodes: who gets a request, and what a request survives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.services.inference.engine import KvPolicy
from rollmesh.services.inference.node import InferenceNode
from rollmesh.services.weights.node import DepotNode
from rollmesh.shared.clients.generated import Generated, Target
from rollmesh.shared.clients.inference import InferenceRouter
from rollmesh.shared.clients.inference_nodes import RouterConfig
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.codec.trajectory import encode_version
from rollmesh.shared.domain.trajectory import FinishReason, SamplingParams
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import DeadlineExceeded, InfraFailure, InvalidInput, StaleWeights
from rollmesh.shared.membership.fleet import KnownFleet
from rollmesh.v1 import coordinator_pb2

from ..unit.shared.safetensors_files import write_safetensors
from .weight_mesh import ACCESS, FAKE, depot, inference, publish

PROMPT = np.array([3, 1, 4, 1, 5], np.int32)
LONG = 100_000
FAST = RouterConfig(deadline_s=20.0, penalty_s_min=0.001, penalty_s_max=0.01)


class Cell:
    """A depot, nodes, and the fleet as a coordinator would show it."""

    def __init__(self, folder: Path, store: DepotNode, stack: contextlib.AsyncExitStack) -> None:
        self.fleet = KnownFleet()
        self.nodes: dict[str, InferenceNode] = {}
        self._folder = folder
        self._store = store
        self._stack = stack
        self._stops: dict[str, contextlib.AsyncExitStack] = {}

    @property
    def depot_address(self) -> str:
        return self._store.address

    async def publish(self, step: int) -> PolicyVersion:
        path = write_safetensors(self._folder / f"{step}.safetensors", step)
        version, _ = await publish(self._store.address, step, {"m.safetensors": path})
        return version

    async def add(self, node_id: str, version: PolicyVersion, *, engine: str = FAKE, **options: Any) -> InferenceNode:
        stop = self._stops[node_id] = await self._stack.enter_async_context(contextlib.AsyncExitStack())
        node = await stop.enter_async_context(inference(self._folder, node_id, engine=engine, **options))
        await self.swap(node, version)
        self.nodes[node_id] = node
        self.show()
        return node

    async def swap(self, node: InferenceNode, version: PolicyVersion, *retain: PolicyVersion) -> None:
        await node.keeper.prepare(version, [self._store.address])
        await node.keeper.activate(version, KvPolicy.RECOMPUTE, retain)

    async def stop(self, node_id: str) -> None:
        del self.nodes[node_id]
        await self._stops[node_id].aclose()

    def show(self) -> None:
        """Updates the fleet."""
        self.fleet.replace([self._picture(node_id, node) for node_id, node in self.nodes.items()])

    def _picture(self, node_id: str, node: InferenceNode) -> coordinator_pb2.FleetNode:
        active = node.state.active
        return coordinator_pb2.FleetNode(
            node_id=node_id,
            kind=coordinator_pb2.NODE_KIND_INFERENCE,
            address=node.address,
            state=coordinator_pb2.NODE_STATE_READY,
            active=encode_version(active) if active else None,
            held=map(encode_version, node.state.held),
            capacity=8,
            capabilities=node.hello().capabilities,
        )

    def router(self, config: RouterConfig = FAST) -> InferenceRouter:
        return InferenceRouter(self.fleet, access=ACCESS, config=config, outputs=["entropy"])


@contextlib.asynccontextmanager
async def cell(folder: Path) -> AsyncIterator[Cell]:
    async with depot(folder) as store, contextlib.AsyncExitStack() as stack:
        yield Cell(folder, store, stack)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, "seed": 11, "temperature": 1.0, **fields})


def assert_equal(answer: Generated, reference: Generated) -> None:
    """Same tokens, log-probs, requested outputs, versions and finish."""
    assert answer.finish is reference.finish
    assert [segment.version for segment in answer.segments] == [segment.version for segment in reference.segments]
    for segment, expected in zip(answer.segments, reference.segments, strict=True):
        np.testing.assert_array_equal(segment.token_ids, expected.token_ids)
        np.testing.assert_array_equal(segment.logprobs, expected.logprobs)
        assert segment.logprobs_model is not None
        np.testing.assert_array_equal(segment.logprobs_model, expected.logprobs_model)
        assert segment.arrays.keys() == {"entropy"}
        np.testing.assert_array_equal(segment.arrays["entropy"], expected.arrays["entropy"])


async def generated(router: InferenceRouter, target: Target | None = None, **fields: Any) -> Generated:
    session = fields.pop("session", "")
    return await router.generate(PROMPT, params(**fields), target=target or Target(), session=session)


# Fail-over ------------------------------------------------------------------------------------------------------------


async def test_an_answer_after_a_failed_engine_equals_the_undisturbed_one(tmp_path: Path) -> None:
    async with cell(tmp_path) as it:
        version = await it.publish(1)
        await it.add("b", version)
        async with it.router() as router:
            reference = await generated(router)
        await it.add("a", version, engine="BreakingEngine", tokens_per_step=1)
        async with it.router() as router:
            answer = await generated(router)
        assert answer.num_failovers >= 1, "more where the broken node is tried again before the other is connected"
        assert len(reference.token_ids) == 60
        assert_equal(answer, reference)


@pytest.mark.parametrize("abrupt", [False, True])
async def test_an_answer_survives_the_loss_of_its_node(tmp_path: Path, abrupt: bool) -> None:
    async with cell(tmp_path) as it:
        version = await it.publish(1)
        node = await it.add("a", version, tokens_per_step=1, step_s=0.001)
        await it.add("b", version)
        async with it.router() as router, router.open(PROMPT, params(max_tokens=500), target=Target()) as generation:
            pieces = [await anext(generation)]
            if abrupt:
                assert node._server is not None
                await node._server.stop(0.0)
            else:
                await it.stop("a")
            pieces += [piece async for piece in generation]
            assert generation.num_failovers >= 1
            reference = await generated(router, max_tokens=500)
        assert np.concatenate([piece.token_ids for piece in pieces]).tolist() == reference.token_ids.tolist()
        assert generation.finish is FinishReason.LENGTH


async def test_a_stop_string_may_straddle_the_failover(tmp_path: Path) -> None:
    async with cell(tmp_path) as it:
        version = await it.publish(1)
        await it.add("b", version)
        async with it.router() as router:
            free = await generated(router)
            text = "".join(chr(32 + token) for token in free.token_ids.tolist())
            stop = (text[17:23],)  # the engine breaks after 20 tokens
            reference = await generated(router, stop=stop)
        assert (text.index(stop[0]), len(reference.token_ids)) == (17, 23)
        await it.add("a", version, engine="BreakingEngine", tokens_per_step=1)
        async with it.router() as router:
            answer = await generated(router, stop=stop)
        assert (answer.num_failovers, answer.finish) == (1, FinishReason.STOP)
        assert_equal(answer, reference)


async def test_an_answer_over_two_versions_becomes_two_segments(tmp_path: Path) -> None:
    async with cell(tmp_path) as it:
        old, new = await it.publish(1), await it.publish(2)
        node = await it.add("a", old, tokens_per_step=1, step_s=0.001, context_max=LONG)
        async with it.router() as router:
            answering = asyncio.create_task(generated(router, max_tokens=3000))
            async with router.open(PROMPT, params(max_tokens=LONG // 1000), target=Target()) as other:
                await anext(other)  # the engine is at work
            await it.swap(node, new)
            answer = await answering
        assert [segment.version for segment in answer.segments] == [old, new]
        assert sum(segment.token_ids.size for segment in answer.segments) == 3000
        assert [s.finish for s in answer.segments] == [FinishReason.UNFINISHED, FinishReason.LENGTH]


async def test_a_request_that_fails_everywhere_is_an_infra_failure(tmp_path: Path) -> None:
    async with cell(tmp_path) as it:
        node = await it.add("a", await it.publish(1))
        await node.engine.close()
        async with it.router() as router:
            with pytest.raises(InfraFailure, match="16 consecutive times.*engine is closed"):
                await generated(router)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("ForgetfulEngine", r"returned the arrays \[\], expected \[entropy\]"),
        ("DoubleEngine", r"malformed delta: .*arrays\[entropy\].dtype.* must be one of f32le.* got .float64"),
    ],
)
async def test_a_node_that_returns_other_outputs_than_requested_fails(
    tmp_path: Path, engine: str, message: str
) -> None:
    async with cell(tmp_path) as it:
        await it.add("a", await it.publish(1), engine=engine)
        async with it.router() as router:
            with pytest.raises(InfraFailure, match=message):
                await generated(router)


async def test_tokens_of_other_weights_than_the_fleet_lists_are_dropped(tmp_path: Path) -> None:
    """The node is listed with the published digest of step 1, but samples from other weights of step 1."""
    async with cell(tmp_path) as it:
        version = await it.publish(1)
        await it.add("b", version)
        async with it.router() as router:
            reference = await generated(router)
        path = write_safetensors(tmp_path / "other.safetensors", 2)
        other, _ = await publish(it.depot_address, 1, {"m.safetensors": path})
        await it.add("a", other)
        listed = list(it.fleet.nodes())
        for node in listed:
            node.active.CopyFrom(encode_version(version))
        it.fleet.replace(listed)
        async with it.router() as router:
            answer = await generated(router)
            assert answer.num_failovers >= 1
            assert_equal(answer, reference)
            it.fleet.replace([node for node in listed if node.node_id == "a"])
            with pytest.raises(InfraFailure, match=r"sampled from main@1.0 with digest .* but the fleet lists"):
                await generated(router)


async def test_a_request_that_no_node_can_run_is_not_tried_again(tmp_path: Path) -> None:
    async with cell(tmp_path) as it:
        await it.add("a", await it.publish(1))
        async with it.router() as router:
            with pytest.raises(InvalidInput, match="outside the vocabulary"):
                await router.generate(np.array([12345], np.int32), params(), target=Target())


# Choosing -------------------------------------------------------------------------------------------------------------


async def test_turns_of_a_session_go_to_one_node_and_reuse_its_prefix(tmp_path: Path) -> None:
    async with cell(tmp_path) as it:
        version = await it.publish(1)
        for node_id in ("a", "b", "c"):
            await it.add(node_id, version)
        async with it.router() as router:
            for session in ("x", "y", "z"):
                prefix = PROMPT
                for turn in range(3):
                    answer = await router.generate(prefix, params(), target=Target(), session=session)
                    if turn:  # all but the new tokens and the last sampled one, which was never fed
                        assert answer.num_prompt_prefilled == 1 + len(PROMPT)
                    prefix = np.concatenate([prefix, answer.token_ids, PROMPT]).astype(np.int32)


async def test_a_session_moves_on_when_its_node_is_gone(tmp_path: Path) -> None:
    async with cell(tmp_path) as it:
        version = await it.publish(1)
        await it.add("a", version)
        await it.add("b", version)
        async with it.router() as router:
            await generated(router, session="x")
            first = next(node_id for node_id, node in it.nodes.items() if node.engine.load().tokens_generated)
            await it.stop(first)
            it.show()
            answer = await generated(router, session="x")
            assert answer.num_failovers == 0
            await generated(router, session="x")


async def test_sessions_of_a_crowded_node_move_to_one_that_joins(tmp_path: Path) -> None:
    sessions = [f"s{number}" for number in range(8)]
    async with cell(tmp_path) as it:
        version = await it.publish(1)
        await it.add("a", version, step_s=0.001)
        async with it.router() as router:
            await asyncio.gather(*(generated(router, session=session) for session in sessions))
            await it.add("b", version, step_s=0.001)
            await asyncio.gather(*(generated(router, session=session) for session in sessions))
        made = {node_id: node.engine.load().tokens_generated // 60 for node_id, node in it.nodes.items()}
    assert made["a"] - len(sessions) >= 4, "a session stays while its node is not crowded"
    assert made["b"] >= 2


async def test_requests_spread_by_load(tmp_path: Path) -> None:
    async with cell(tmp_path) as it:
        version = await it.publish(1)
        for node_id in ("a", "b"):
            await it.add(node_id, version, step_s=0.001)
        async with it.router() as router:
            await asyncio.gather(*(generated(router, seed=seed) for seed in range(10)))
        assert [node.engine.load().tokens_generated for node in it.nodes.values()] == [300, 300]


async def test_requests_of_other_clients_count_once_a_node_has_reported_them(tmp_path: Path) -> None:
    async with cell(tmp_path) as it:
        version = await it.publish(1)
        await it.add("a", version, tokens_per_step=1, step_s=0.001, context_max=LONG)
        async with it.router() as other, it.router() as router, contextlib.AsyncExitStack() as stack:
            for seed in range(6):
                request = other.open(PROMPT, params(max_tokens=LONG // 2, seed=seed), target=Target())
                await anext(await stack.enter_async_context(request))
            await it.add("b", version)
            await router.generate(PROMPT, params(), target=Target(), session="x")
            assert it.nodes["b"].engine.load().tokens_generated == 0, "without a report both look idle"
            reported = router._pool._nodes["a", it.nodes["a"].address]
            assert reported.num_requests(SystemClock().monotonic_s()) == 6
            await generated(router)
        assert it.nodes["b"].engine.load().tokens_generated == 60


async def test_a_node_below_the_target_is_passed_by(tmp_path: Path) -> None:
    async with cell(tmp_path) as it:
        old, new = await it.publish(1), await it.publish(2)
        await it.add("a", old)
        await it.add("b", new)
        async with it.router() as router:
            answer = await generated(router, Target(step=2))
        assert (answer.num_failovers, answer.segments[0].version) == (0, new)


async def test_a_refusal_of_a_node_that_the_fleet_overrated_costs_one_failover(tmp_path: Path) -> None:
    async with cell(tmp_path) as it:
        old, new = await it.publish(1), await it.publish(2)
        await it.add("a", old)
        await it.add("b", new)
        picture = [coordinator_pb2.FleetNode.FromString(node.SerializeToString()) for node in it.fleet.nodes()]
        picture[0].active.step = 2
        it.fleet.replace(picture)
        async with it.router() as router:
            answer = await generated(router, Target(step=2))
        assert (answer.num_failovers, answer.segments[0].version) == (1, new)


async def test_a_request_waits_for_weights_and_says_so(tmp_path: Path) -> None:
    async with cell(tmp_path) as it:
        old, new = await it.publish(1), await it.publish(2)
        node = await it.add("a", old)
        async with it.router() as router:
            answering = asyncio.create_task(generated(router, Target(step=2)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert "a node that serves main at step 2 or later (1 request): no node does" in router.waiting_for
            assert "a READY at main@1.0" in router.waiting_for
            await it.swap(node, new)
            it.show()
            assert (await answering).segments[0].version == new
            assert router.waiting_for == ""


async def test_a_request_without_a_node_ends_at_its_deadline_with_the_cause(tmp_path: Path) -> None:
    async with InferenceRouter(KnownFleet(), access=ACCESS, config=RouterConfig(deadline_s=0.01)) as router:
        with pytest.raises(DeadlineExceeded, match="waiting for a node that serves main at step 0 or later: no node"):
            await generated(router)


async def test_an_exact_step_that_is_gone_is_refused_at_once(tmp_path: Path) -> None:
    async with cell(tmp_path) as it:
        await it.publish(1)
        await it.add("a", await it.publish(2))
        async with it.router() as router:
            with pytest.raises(StaleWeights, match="all have newer weights"):
                await generated(router, Target(step=1, exact=True))


async def test_an_exact_request_ends_stale_when_weights_change_under_it(tmp_path: Path) -> None:
    async with cell(tmp_path) as it:
        old, new = await it.publish(1), await it.publish(2)
        node = await it.add("a", old, tokens_per_step=1, step_s=0.001, context_max=LONG)
        async with it.router() as router:
            target = Target(step=1, exact=True)
            async with router.open(PROMPT, params(max_tokens=LONG), target=target) as generation:
                pieces = [await anext(generation)]
                await it.swap(node, new)
                it.show()
                with pytest.raises(StaleWeights):
                    pieces += [piece async for piece in generation]
            assert {piece.version for piece in pieces} == {old}


# Several versions at once ---------------------------------------------------------------------------------------------

PINNED = Target(pinned=True)


async def test_an_exact_step_is_found_at_the_node_that_still_holds_it(tmp_path: Path) -> None:
    async with cell(tmp_path) as it:
        old, new = await it.publish(1), await it.publish(2)
        await it.add("a", new)
        holder = await it.add("b", old, versions_max=2)
        await it.swap(holder, new, old)
        it.show()
        async with it.router() as router:
            exact = await asyncio.gather(*(generated(router, Target(step=1, exact=True)) for _ in range(3)))
            assert [[segment.version for segment in answer.segments] for answer in exact] == [[old]] * 3
            assert holder.engine.load().tokens_generated == 3 * 60
            (scored,) = await router.score([PROMPT], target=Target(step=1, exact=True))
            assert scored.version == old
            assert (await generated(router)).segments[0].version == new


async def test_a_pinned_response_finishes_under_its_version_at_another_node(tmp_path: Path) -> None:
    async with cell(tmp_path) as it:
        old, new = await it.publish(1), await it.publish(2)
        limits: dict[str, Any] = {"versions_max": 2, "tokens_per_step": 1, "step_s": 0.001, "context_max": LONG}
        await it.add("a", old, **limits)
        async with it.router() as router:
            undisturbed = await generated(router, PINNED, max_tokens=3000)
            other = await it.add("b", old, **limits)
            async with router.open(PROMPT, params(max_tokens=3000), target=PINNED) as generation:
                pieces = [await anext(generation)]
                await it.swap(it.nodes["a"], new)
                await it.swap(other, new, old)
                it.show()
                pieces.append(await anext(generation))
                await it.stop("a")
                it.show()
                pieces += [piece async for piece in generation]
            assert generation.num_failovers == 1
            assert {piece.version for piece in pieces} == {old}
            np.testing.assert_array_equal(
                np.concatenate([piece.token_ids for piece in pieces]), undisturbed.segments[0].token_ids
            )
            assert (await generated(router, PINNED)).segments[0].version == new


async def test_a_pinned_response_whose_version_is_gone_is_stale(tmp_path: Path) -> None:
    async with cell(tmp_path) as it:
        old, new = await it.publish(1), await it.publish(2)
        node = await it.add("a", old, versions_max=2, tokens_per_step=1, step_s=0.001, context_max=LONG)
        async with (
            it.router() as router,
            router.open(PROMPT, params(max_tokens=LONG), target=PINNED) as generation,
        ):
            pieces = [await anext(generation)]
            await it.swap(node, new)
            await node.keeper.discard(old)
            it.show()
            with pytest.raises(StaleWeights, match="no node serves main at step 1, because all have newer weights"):
                pieces += [piece async for piece in generation]
            assert {piece.version for piece in pieces} == {old}


async def test_pinned_responses_go_to_nodes_that_can_hold_their_version(tmp_path: Path) -> None:
    async with cell(tmp_path) as it:
        version = await it.publish(1)
        await it.add("a", version)
        async with it.router() as router:
            with pytest.raises(InvalidInput, match=r"responses under one version .an engine with `versions_max` >= 2"):
                await generated(router, PINNED)
            able = await it.add("b", version, versions_max=2)
            await asyncio.gather(*(generated(router, PINNED) for _ in range(4)))
            assert able.engine.load().tokens_generated == 4 * 60


# Cancelling -----------------------------------------------------------------------------------------------------------


async def test_cancelling_the_task_ends_the_request_at_the_node(tmp_path: Path) -> None:
    async with cell(tmp_path) as it:
        node = await it.add("a", await it.publish(1), engine="ContentEngine", step_s=0.001, context_max=LONG)
        engine: Any = node.engine
        async with it.router() as router:
            answering = asyncio.create_task(generated(router, max_tokens=LONG))
            await asyncio.wait_for(engine.emitted.wait(), 20)
            answering.cancel()
            with pytest.raises(asyncio.CancelledError):
                await answering
            await asyncio.wait_for(engine.ended.wait(), 20)
            assert (node.state.num_live, engine.load().num_running) == (0, 0)
            assert len((await generated(router)).token_ids) == 60  # the stream lives on
