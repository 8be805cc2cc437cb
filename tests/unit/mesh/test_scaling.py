"""Which numbers of nodes a running mesh accepts, and how a command and the supervisor talk about them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollmesh.mesh.config import CountsConfig, MeshConfig
from rollmesh.mesh.mesh_services import service_names
from rollmesh.mesh.scaling import (
    ANSWER,
    REQUEST,
    NotScalable,
    ScaleAnswer,
    answer_requests,
    check_counts,
    request_counts,
)
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.errors import ConfigError

ONE = CountsConfig()


def test_only_the_wanted_counts_change() -> None:
    assert check_counts({"rollout": 4, "inference": 2}, ONE, {}) == CountsConfig(rollout=4, inference=2)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            {"coordinator": 2},
            "`coordinator` must be one of inference, rollout, sandbox, reward: a mesh has one coordinator",
        ),
        ({"depot": 2}, "a mesh has one depot, from which the nodes fetch weights"),
        ({"learner": 2}, "a run has one learner; `learner.compute.ranks` spreads it over devices"),
        ({"gateway": 2}, "`rollmesh serve gateway --join HOST:PORT` adds another"),
        ({"endpoint-judge": 2}, "`endpoints.NAME.nodes` sets the number"),
        ({"rolout": 2}, "there is no such service"),
        ({"rollout": 1025}, r"`rollout` must be in \[0, 1024\], got 1025"),
        ({"inference": 0}, "`inference` must be >= 1, got 0: no other host has added one, so the run would wait"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_count_is_rejected_with_the_remedy(wanted: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_counts(wanted, ONE, {})


def test_a_kind_may_leave_this_host_if_another_host_has_it() -> None:
    assert check_counts({"rollout": 0}, ONE, {"rollout": 1}).rollout == 0
    assert check_counts({"sandbox": 0}, CountsConfig(sandbox=0), {}).sandbox == 0


def test_further_reward_nodes_have_a_number() -> None:
    names = service_names(MeshConfig(counts=CountsConfig(reward=3, rollout=0, inference=0, sandbox=0)))
    assert [name for name in names if name.startswith("reward")] == ["reward", "reward-1", "reward-2"]


async def test_a_request_gets_the_answer_of_the_supervisor(tmp_path: Path) -> None:
    asked: list[CountsConfig] = []

    async def scale(counts: CountsConfig) -> ScaleAnswer:
        asked.append(counts)
        if counts.rollout == 9:
            raise NotScalable("shares a process")
        if counts.rollout == 8:
            raise OSError("no space left")
        return ScaleAnswer(id="", started=("rollout-1",))

    clock = SystemClock()
    (tmp_path / REQUEST).write_text('{"id": "of an earlier supervisor", "counts": {}}')
    answering = asyncio.create_task(answer_requests(tmp_path, scale, clock))
    await asyncio.sleep(0)
    found = await request_counts(tmp_path, CountsConfig(rollout=2), limit_s=20.0, clock=clock)
    assert found.started == ("rollout-1",)
    with pytest.raises(NotScalable, match="shares a process"):
        await request_counts(tmp_path, CountsConfig(rollout=9), limit_s=20.0, clock=clock)
    with pytest.raises(NotScalable, match="no space left"):
        await request_counts(tmp_path, CountsConfig(rollout=8), limit_s=20.0, clock=clock)
    assert [counts.rollout for counts in asked] == [2, 9, 8]
    answering.cancel()
    await asyncio.wait([answering])


async def test_a_process_that_does_not_answer_is_reported_and_the_request_is_withdrawn(tmp_path: Path) -> None:
    with pytest.raises(NotScalable, match=r"has not answered within 0\.3 s.*processes.enabled=false"):
        await request_counts(tmp_path, ONE, limit_s=0.3, clock=SystemClock())
    assert not (tmp_path / REQUEST).exists()
    assert not (tmp_path / ANSWER).exists()
