"""The agent and the scorers of a task: which values it may have, and where a change of them is seen."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from rollmesh.demo.families.calc import CalcSource
from rollmesh.services.data.config import DataConfig, build_pools
from rollmesh.services.data.draws import RunDraws
from rollmesh.services.data.generated import GeneratedOptions
from rollmesh.services.data.pool import MemoryPool
from rollmesh.services.data.servicer import encode_task
from rollmesh.services.data.task import PoolTask, Split
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.domain.trajectory import Message
from rollmesh.shared.errors import ConfigError, CorruptSnapshot

from .builders import factory

PROMPT = (Message(role="user", content="2+2?"),)
SIZES = {"num_train": 3, "num_validation": 1, "num_test": 1}
DIGEST_BEFORE = "52c1dd34ba19abf887bc49e3483e91498f76827b27233b4d067687e93da66bf9"
"""Digest of `pool()` in releases without these fields."""


def task(**fields: Any) -> PoolTask:
    return PoolTask(task_id="t", messages=PROMPT, oracle_ref="calc:2+2", labels={"level": "1"}, **fields)


def pool(**fields: Any) -> MemoryPool:
    return MemoryPool([task(**fields)])


def test_the_message_has_both_and_an_old_message_has_neither() -> None:
    message = encode_task(task(agent="solver", scorers=("correct", "short")))
    assert (message.agent, list(message.scorers)) == ("solver", ["correct", "short"])
    plain = encode_task(task())
    assert (plain.agent, list(plain.scorers)) == ("", [])


@pytest.mark.parametrize("fields", [{"agent": "solver"}, {"scorers": ("a",)}, {"scorers": ("a", "b")}])
def test_a_change_of_either_changes_the_digest_of_the_pool(fields: dict[str, Any]) -> None:
    others = [pool(), pool(agent="other"), pool(scorers=("b",)), pool(agent="solver", scorers=("a", "b"))]
    assert pool(**fields).digest not in [other.digest for other in others]


def test_a_pool_without_them_has_the_digest_of_releases_that_lacked_them() -> None:
    assert pool().digest == DIGEST_BEFORE


def test_a_snapshot_of_tasks_with_another_agent_is_not_restored() -> None:
    def draws(found: MemoryPool) -> RunDraws:
        return RunDraws(pool=found, new_selector=factory(), success_reward="correct")

    state = draws(pool()).snapshot()
    draws(pool()).restore(state)
    with pytest.raises(CorruptSnapshot, match="of another task source"):
        draws(pool(agent="solver")).restore(state)
    assert msgpack.unpackb(state)["pool"] == pool().digest


@pytest.mark.parametrize(
    "fields",
    [
        {"agent": None},
        {"agent": 3},
        {"scorers": "correct"},
        {"scorers": ("a", "a")},
        {"scorers": ("a", "")},
        {"scorers": ("a", 3)},
        {"scorers": None},
    ],
)
def test_a_task_of_a_users_source_with_wrong_names_is_refused_with_the_value(fields: dict[str, Any]) -> None:
    (value,) = fields.values()
    with pytest.raises((ValueError, TypeError)) as caught:
        task(**fields)
    assert str(caught.value).endswith(f"got {value!r}")


def test_a_generated_source_gives_each_task_the_names_of_its_options() -> None:
    options = {**SIZES, "agent": "solver", "scorers": ["correct"]}
    pools = build_pools(config_from_dict(DataConfig, {"source": {"name": "calc", "options": options}}))
    assert {(one.task(0).agent, one.task(0).scorers) for one in pools.values()} == {("solver", ("correct",))}
    with pytest.raises(ConfigError, match="`scorers` must have different names, got correct, correct"):
        build_pools(
            config_from_dict(DataConfig, {"source": {"name": "calc", "options": {"scorers": ["correct", "correct"]}}})
        )


def test_a_family_chooses_the_names_by_the_key_and_the_tasks_stay_the_same() -> None:
    class Mixed(CalcSource):
        def agent(self, key: str) -> str:
            return "solver" if "*" in key else ""

        def scorers(self, key: str) -> tuple[str, ...]:
            return ("correct",) if "*" in key else ()

    options = GeneratedOptions(num_train=40, num_validation=0, num_test=0)
    mixed, plain = (list(cls(options=options).tasks()) for cls in (Mixed, CalcSource))
    assert [one.oracle_ref for one in mixed] == [one.oracle_ref for one in plain]
    assert {one.split for one in mixed} == {Split.TRAIN}
    named = {("*" in one.oracle_ref, one.agent, one.scorers) for one in mixed}
    assert named == {(True, "solver", ("correct",)), (False, "", ())}
