"""The small parts: draws, latency, limits by a manual clock, texts, configuration."""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

import numpy as np
import pytest

from rollmesh.services.rollout.config import (
    FormatConfig,
    LimitsConfig,
    RolloutConfig,
    SamplingConfig,
    StagesConfig,
    ToolConfig,
    ToolLatencyConfig,
    WorkerConfig,
)
from rollmesh.services.rollout.failures import retry_call
from rollmesh.services.rollout.recorder import Recorder
from rollmesh.services.rollout.tool_latency import SlowSandbox, latency_s
from rollmesh.services.rollout.tools import result_text, shorten
from rollmesh.shared.clients.sandbox import ExecOutcome, ExecResult
from rollmesh.shared.clock import ManualClock, time_limit
from rollmesh.shared.config.loader import config_from_dict, load_config, to_yaml
from rollmesh.shared.domain.trajectory import ROOT, Role, Source
from rollmesh.shared.errors import InvalidInput, Unavailable
from rollmesh.testing.rollout import LocalSandbox
from rollmesh.v1 import sandbox_pb2

UNIFORMS = (np.arange(20_000) + 0.5) / 20_000


def given(recorder: Recorder, parent: int) -> int:
    return recorder.add_given(parent, Role.CONTEXT, Source.PROMPT, np.arange(3, dtype=np.int32))


# Draws ----------------------------------------------------------------------------------------------------------------


def test_draw_keys_depend_on_the_place_in_the_tree_only() -> None:
    one, other = Recorder(5), Recorder(5)
    a, b = given(one, ROOT), given(one, ROOT)
    first = [one.draw_key(a), one.draw_key(a), one.draw_key(b)]
    a, b = given(other, ROOT), given(other, ROOT)
    last_first = [other.draw_key(b), other.draw_key(a), other.draw_key(a)]
    assert first == [last_first[1], last_first[2], last_first[0]]
    assert len(set(first)) == 3
    assert all(0 <= key < 2**64 for key in first)
    assert Recorder(6).draw_key(ROOT) != Recorder(5).draw_key(ROOT)


# Latency --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("distribution", "shape"), [("lognormal", 0.5), ("lognormal", 1.0), ("pareto", 2.5), ("pareto", 4.0)]
)
def test_latency_has_the_configured_mean(distribution: Any, shape: float) -> None:
    config = ToolLatencyConfig(distribution=distribution, mean_s=2.0, shape=shape, max_s=1e9)
    assert statistics.fmean(latency_s(config, u) for u in UNIFORMS) == pytest.approx(2.0, rel=0.02)


def test_latency_of_the_default_shape_is_long_tailed() -> None:
    for distribution in ("lognormal", "pareto"):
        config = ToolLatencyConfig(distribution=distribution, max_s=1e9)
        drawn = sorted(latency_s(config, u) for u in UNIFORMS)
        assert sum(drawn[-2_000:]) / sum(drawn) > 0.4
    assert latency_s(ToolLatencyConfig(distribution="pareto", max_s=3.0), 1 - 1e-12) == 3.0
    assert latency_s(ToolLatencyConfig(), 0.9) == 0.0


async def test_slow_sandbox_waits_by_the_clock_and_alike_for_a_session() -> None:
    async def waits(seed: int, session_id: str) -> list[float]:
        clock = ManualClock()
        config = ToolLatencyConfig(distribution="lognormal", seed=seed)
        sandbox = SlowSandbox(LocalSandbox({"call": str.upper}), config, clock)
        seen = []
        async with sandbox.session("calc", session_id=session_id) as session:
            for _ in range(3):
                call = asyncio.ensure_future(session.call("call", "x"))
                await asyncio.sleep(0)
                assert not call.done()
                seen.append(clock.next_deadline_s() - clock.monotonic_s())
                clock.advance(seen[-1])
                assert (await call).result == "X"
        return seen

    drawn = await waits(1, "s")
    assert len(set(drawn)) == 3
    assert drawn == pytest.approx(await waits(1, "s"))
    assert drawn != pytest.approx(await waits(1, "t"))
    assert drawn != pytest.approx(await waits(2, "s"))


async def test_slow_sandbox_delays_a_stateless_call_by_its_key() -> None:
    async def wait_of(key: str) -> float:
        clock = ManualClock()
        sandbox = SlowSandbox(LocalSandbox({"call": str.upper}), ToolLatencyConfig(distribution="lognormal"), clock)
        call = asyncio.ensure_future(sandbox.call_stateless("calc", "call", "x", tenant="run", call_key=key))
        await asyncio.sleep(0)
        delay_s = clock.next_deadline_s() - clock.monotonic_s()
        clock.advance(delay_s)
        assert (await call).result == "X"
        return delay_s

    assert await wait_of("e.1") == await wait_of("e.1") != await wait_of("e.2")


# Time -----------------------------------------------------------------------------------------------------------------


async def test_time_limit_ends_its_body_by_the_clock_and_only_then() -> None:
    clock = ManualClock()

    async def limited() -> None:
        async with time_limit(clock, 5.0):
            await clock.sleep(4.0)
        async with time_limit(clock, 5.0):
            await asyncio.get_running_loop().create_future()

    task = asyncio.ensure_future(limited())
    await clock.run_for(8.9)
    assert not task.done()
    await clock.run_for(0.2)
    with pytest.raises(TimeoutError):
        await task
    assert clock.num_sleepers() == 0


async def test_time_limit_lets_a_cancellation_from_outside_pass() -> None:
    clock = ManualClock()

    async def limited() -> None:
        async with time_limit(clock, 5.0):
            await asyncio.get_running_loop().create_future()

    task = asyncio.ensure_future(limited())
    await clock.run_for(1.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert clock.num_sleepers() == 0


async def test_persist_doubles_its_pauses_and_gives_up() -> None:
    clock = ManualClock()
    asked: list[float] = []

    async def fail() -> None:
        asked.append(clock.monotonic_s())
        raise Unavailable("away")

    task = asyncio.ensure_future(
        retry_call(fail, WorkerConfig(backoff_s=1.0, backoff_s_max=4.0, give_up_s=10.0), clock)
    )
    await clock.run_for(30.0)
    assert asked == [0.0, 1.0, 3.0, 7.0, 11.0]
    with pytest.raises(Unavailable):
        await task


async def test_persist_does_not_repeat_what_cannot_succeed() -> None:
    async def fail() -> None:
        raise InvalidInput("no")

    with pytest.raises(InvalidInput):
        await retry_call(fail, WorkerConfig(), ManualClock())


# Texts ----------------------------------------------------------------------------------------------------------------


def test_result_text_shows_output_and_value_or_the_error() -> None:
    ok = ExecResult(outcome=ExecOutcome.OK, stdout="a\nb\n", result="3")
    assert result_text(ok) == "a\nb\n3"
    failed = ExecResult(outcome=ExecOutcome.ERROR, stdout="a\n", error="ZeroDivisionError: division by zero")
    assert result_text(failed) == "a\nerror: ZeroDivisionError: division by zero"
    assert result_text(ExecResult(outcome=ExecOutcome.OK)) == ""


def test_result_text_of_a_failed_program_shows_what_it_wrote_to_stderr() -> None:
    failed = ExecResult(
        outcome=ExecOutcome.ERROR, stderr="main.c:1: error: no\n", error="CompileError: main.c", exit_status=1
    )
    assert result_text(failed) == "main.c:1: error: no\nerror: CompileError: main.c"


def test_tool_is_a_function_or_code_in_a_language() -> None:
    assert ToolConfig(profile="shell", language="bash").language == "bash"
    with pytest.raises(ValueError, match="`function` must be empty"):
        ToolConfig(profile="shell", language="bash", function="call")


def test_shorten_keeps_both_ends_within_the_limit() -> None:
    text = "a" * 500 + "b" * 500
    cut = shorten(text, 100)
    assert len(cut) <= 100
    assert cut.startswith("aaa")
    assert cut.endswith("bbb")
    assert "900 characters cut" in cut
    assert shorten(text, 1000) == text
    assert len(shorten(text, 16)) <= 16


def test_outcomes_equal_the_contract() -> None:
    contract = {name: number for name, number in sandbox_pb2.ExecOutcome.items() if number}
    assert {f"EXEC_OUTCOME_{outcome.name}": outcome.value for outcome in ExecOutcome} == contract


# Configuration --------------------------------------------------------------------------------------------------------


def test_default_config_survives_yaml(tmp_path: Any) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(to_yaml(RolloutConfig()))
    assert load_config(RolloutConfig, path) == RolloutConfig()
    changed = config_from_dict(RolloutConfig, {"tools": {"py": {"profile": "python"}}, "limits": {"turns_max": 3}})
    assert (list(changed.tools), changed.limits.turns_max) == (["py"], 3)


@pytest.mark.parametrize(
    ("type_", "values"),
    [
        (FormatConfig, {"observation": "no place"}),
        (FormatConfig, {"turn_end": ""}),
        (SamplingConfig, {"temperature": -0.1}),
        (SamplingConfig, {"top_p": 0.0}),
        (SamplingConfig, {"top_k": -1}),
        (SamplingConfig, {"max_tokens": 0}),
        (LimitsConfig, {"turns_max": 0}),
        (LimitsConfig, {"run_s_max": 0.0}),
        (LimitsConfig, {"observation_chars_max": 1}),
        (StagesConfig, {"run_max": 0}),
        (StagesConfig, {"score_s_max": 0.0}),
        (ToolLatencyConfig, {"distribution": "pareto", "shape": 1.0}),
        (ToolLatencyConfig, {"mean_s": -1.0}),
        (WorkerConfig, {"episodes_max": 5000}),
        (WorkerConfig, {"acquire_wait_s": 61.0}),
        (WorkerConfig, {"backoff_s": 3.0, "backoff_s_max": 2.0}),
        (RolloutConfig, {"session_ttl_s": 0.0}),
    ],
)
def test_config_out_of_range_names_field_and_value(type_: Any, values: dict[str, Any]) -> None:
    name, value = list(values.items())[-1]
    with pytest.raises(ValueError, match=name) as caught:
        type_(**values)
    assert str(value) in str(caught.value)
