"""The checks of the dry run on its episode."""

from __future__ import annotations

import asyncio
import warnings

import msgspec
import pytest

from rollmesh.app.samples.dry_run import MEMBERS, call_estimator, refuse_no_action, refuse_not_awaited
from rollmesh.app.samples.samples import ACTION, RewardLine, SampleLine, SegmentLine, sample_lines, summary_of_line
from rollmesh.services.rollout.agent import Agent
from rollmesh.services.rollout.environment import Environment
from rollmesh.shared.codec.trajectory import encode_episode, summary_of
from rollmesh.shared.domain.trajectory import GroupContext
from rollmesh.shared.errors import ConfigError
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.trainer.estimators import make_estimator
from rollmesh.trainer.estimators.base import GroupEstimator
from rollmesh.v1 import types_pb2

from ..shared.episodes import rich_episode

LINE = SampleLine(
    sample_id="s", run="r", task="t", group="g", episode="e", rewards=[RewardLine(name="correct", value=1.0)]
)


class Raises(GroupEstimator):
    def of_group(self, group: GroupContext) -> dict[str, float]:
        raise KeyError(len(group.members))


def test_the_estimator_gets_a_group_of_copies_and_its_error_fails_the_dry_run() -> None:
    call_estimator("grpo", make_estimator("grpo"), [LINE])
    with pytest.raises(
        ConfigError, match=rf"group failed: estimator e.py:Raises: KeyError: {MEMBERS}\n.*\n.*raise KeyError"
    ):
        call_estimator("/tmp/e.py:Raises", Raises(weights={}), [LINE])


class NeverAwaits(Agent):
    async def run(self, task: object, env: Environment) -> None:
        env.generate()  # type: ignore[unused-coroutine]


def test_a_generate_that_was_not_awaited_fails_the_dry_run() -> None:
    mesh = LocalMesh(script=lambda _: "4<|end|>")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        asyncio.run(mesh.runner(NeverAwaits()).run(lease()))
    with pytest.raises(ConfigError, match="generate was not awaited"):
        refuse_not_awaited([str(one.message) for one in found])
    refuse_not_awaited(["coroutine 'Other.generate' was never awaited"])


def test_an_episode_without_an_action_fails_the_dry_run() -> None:
    with pytest.raises(ConfigError, match="returned without a turn"):
        refuse_no_action([LINE])
    action = SegmentLine(role=ACTION, source="policy", token_ids=[1])
    refuse_no_action([msgspec.structs.replace(LINE, segments=[action])])


def test_the_task_of_a_lease_has_labels() -> None:
    assert dict(lease(labels={"topic": "sums"}).task.labels) == {"topic": "sums"}


def test_the_summary_of_a_line_is_that_of_its_sample() -> None:
    made = rich_episode()
    task = types_pb2.Task(task_id=made.key.task)
    for line, sample in zip(sample_lines(encode_episode(made), task), made.samples, strict=True):
        assert summary_of_line(line, text_chars=40) == summary_of(made, sample, text_chars=40)
        assert summary_of(made, sample).turns
