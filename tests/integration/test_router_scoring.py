"""Scoring over real nodes: the same choice of nodes as generation, parts of one version, and outputs that nodes can or
cannot return."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.services.inference.engine import EngineBroken, ScoreResult
from rollmesh.services.inference.node import InferenceNode
from rollmesh.shared.clients.generated import Target
from rollmesh.shared.clients.inference import InferenceRouter
from rollmesh.shared.clients.inference_nodes import RouterConfig
from rollmesh.shared.domain.trajectory import IntArray
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import DeadlineExceeded, InfraFailure, InvalidInput, PayloadTooLarge, StaleWeights
from rollmesh.testing.fake_policy import FakePolicy

from .content_engine import VOCAB
from .test_router import Cell, cell, generated
from .weight_mesh import ACCESS


def rows(*lengths: int) -> list[IntArray]:
    return [np.arange(n, n + length, dtype=np.int32) % VOCAB for n, length in enumerate(lengths)]


def expected(version: PolicyVersion, tokens: IntArray) -> Any:
    logprobs = FakePolicy(version, VOCAB).logprobs_model(tokens, np.arange(len(tokens)))
    logprobs[0] = 0.0
    return logprobs


def router(it: Cell, **fields: Any) -> InferenceRouter:
    config = RouterConfig(deadline_s=20.0, penalty_s_min=0.001, penalty_s_max=0.01, **fields)
    return InferenceRouter(it.fleet, access=ACCESS, config=config, num_top=3)


def watch(node: InferenceNode, before: Any = None) -> list[int]:
    """Record the number of sequences of each call of the engine; `before` is awaited in each call."""
    engine: Any = node.engine
    calls: list[int] = []
    score = engine.score

    async def watched(sequences: Sequence[IntArray], **wishes: Any) -> list[ScoreResult]:
        calls.append(len(sequences))
        if before is not None:
            await before(len(calls))
        found: list[ScoreResult] = await score(sequences, **wishes)
        return found

    engine.score = watched
    return calls


async def test_parts_go_to_all_nodes_and_keep_the_order(tmp_path: Path) -> None:
    async with cell(tmp_path) as it:
        version = await it.publish(1)
        calls = [watch(await it.add(name, version)) for name in ("a", "b")]
        sequences = rows(3, 5, 40, 1, 2, 7, 8, 8)
        async with router(it, score_tokens_max=8) as routed:
            found = await routed.score(sequences, target=Target(step=1))
        assert [sorted(each) for each in (calls[0] + calls[1],)] == [[1, 1, 1, 1, 2, 2]]
        assert all(calls), "both nodes score"
        for scored, tokens in zip(found, sequences, strict=True):
            assert scored.version == version
            assert scored.arrays == {}
            np.testing.assert_array_equal(scored.logprobs, expected(version, tokens))


async def test_all_parts_are_of_one_version_when_weights_change_between_them(tmp_path: Path) -> None:
    async with cell(tmp_path) as it:
        old, new = await it.publish(1), await it.publish(2)
        node = await it.add("a", old)

        async def change(call: int) -> None:
            if call == 2:
                await it.swap(node, new)
                it.show()

        calls = watch(node, change)
        sequences = rows(6, 6, 6)
        async with router(it, score_tokens_max=6, score_calls_max=1) as routed:
            found = await routed.score(sequences, target=Target(step=1))
            assert {scored.version for scored in found} == {new}
            np.testing.assert_array_equal(found[0].logprobs, expected(new, sequences[0]))
            assert len(calls) >= 5, "the first part was scored again"
            with pytest.raises(StaleWeights):
                await routed.score(sequences, target=Target(step=1, exact=True))


async def test_a_failed_call_goes_to_another_node_and_then_fails_the_request(tmp_path: Path) -> None:
    async def fail(call: int) -> None:
        raise EngineBroken("device lost")

    async with cell(tmp_path) as it:
        version = await it.publish(1)
        broken = watch(await it.add("a", version), fail)
        async with router(it, failures_max=3) as routed:
            with pytest.raises(InfraFailure, match="failed 3 consecutive times; last error: device lost"):
                await routed.score(rows(4), target=Target())
            assert len(broken) == 3
            await it.add("b", version)
            (found,) = await routed.score(rows(4), target=Target())
        np.testing.assert_array_equal(found.logprobs, expected(version, rows(4)[0]))


async def test_only_nodes_whose_engine_has_the_output_are_asked(tmp_path: Path) -> None:
    async with cell(tmp_path) as it:
        version = await it.publish(1)
        without = watch(await it.add("a", version))
        await it.add("b", version, engine="WideEngine")
        async with router(it) as routed:
            for _ in range(3):
                found = await routed.score(rows(4, 6), target=Target(), outputs=["place"])
                assert [scored.arrays["place"].tolist() for scored in found] == [list(range(4)), list(range(6))]
                assert found[1].after(4).arrays["place"].tolist() == [4, 5]
        assert not without


async def test_an_output_that_no_node_has_is_refused_at_once_with_the_engines(tmp_path: Path) -> None:
    async with cell(tmp_path) as it:
        version = await it.publish(1)
        await it.add("a", version, engine="WideEngine")
        async with router(it) as routed:
            with pytest.raises(
                InvalidInput,
                match=r"a scoring call asks for: hidden\. Engines of the fleet: .*WideEngine returns \[place, wide\]",
            ):
                await routed.score(rows(4), target=Target(), outputs=["place", "hidden"])
        async with it.router() as routed:  # asks for entropy in each generation
            with pytest.raises(InvalidInput, match=r"a generation asks for: entropy\. .*WideEngine returns \[\]"):
                await generated(routed)
            await it.add("b", version)
            assert len((await generated(routed)).token_ids) == 60


async def test_a_node_without_capabilities_scores_and_has_no_outputs(tmp_path: Path) -> None:
    async with cell(tmp_path) as it:
        await it.add("a", await it.publish(1))
        nodes = it.fleet.nodes()
        for node in nodes:
            node.ClearField("capabilities")
        it.fleet.replace(nodes)
        async with router(it) as routed:
            assert len(await routed.score(rows(4), target=Target())) == 1
            with pytest.raises(InvalidInput, match=r"entropy\. Engines of the fleet: a returns \[\]"):
                await routed.score(rows(4), target=Target(), outputs=["entropy"])
        nodes[0].capabilities.engine = "mute"
        it.fleet.replace(nodes)
        async with router(it) as routed:
            with pytest.raises(InvalidInput, match="asks for: score"):
                await routed.score(rows(4), target=Target())


async def test_a_response_beyond_the_message_limit_is_requested_in_smaller_parts(tmp_path: Path) -> None:
    async with cell(tmp_path) as it:
        calls = watch(await it.add("a", await it.publish(1), engine="WideEngine"))
        async with router(it) as routed:
            found = await routed.score(rows(100, 100, 20), target=Target(), outputs=["wide"])
            assert [scored.arrays["wide"].shape for scored in found] == [(100, 16384), (100, 16384), (20, 16384)]
            assert calls[0] == 3
            assert max(calls[-2:]) < 3
            with pytest.raises(PayloadTooLarge, match="send less at once"):
                await routed.score(rows(200), target=Target(), outputs=["wide"])


async def test_calls_of_a_process_are_bounded(tmp_path: Path) -> None:
    entered, release, inside, most = asyncio.Event(), asyncio.Event(), 0, 0

    async def hold(call: int) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if inside == 2:
            entered.set()
        await release.wait()
        inside -= 1

    async with cell(tmp_path) as it:
        calls = watch(await it.add("a", await it.publish(1)), hold)
        async with router(it) as routed:
            requests = [asyncio.create_task(routed.score(rows(4), target=Target())) for _ in range(6)]
            await asyncio.wait_for(entered.wait(), 20)
            requests.pop().cancel()
            release.set()
            await asyncio.gather(*requests)
        assert most == 2
        assert len(calls) == 5, "the cancelled one never reached the node"


async def test_a_score_without_a_node_ends_at_its_deadline_with_the_cause(tmp_path: Path) -> None:
    async with cell(tmp_path) as it, router(it) as routed:
        with pytest.raises(DeadlineExceeded, match="waiting for a node that serves main at step 0 or later: no node"):
            await routed.score(rows(4), target=Target(), deadline_s=0.05)
        with pytest.raises(InvalidInput, match="sequence 1 must be a row of at least one token id"):
            await routed.score([rows(4)[0], np.empty(0, np.int32)], target=Target())
