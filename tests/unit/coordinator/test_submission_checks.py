"""The fields of SubmitTasks are checked on arrival: an error names the task and the field, and never quotes a key."""

from __future__ import annotations

from typing import Any, cast

import pytest

from rollmesh.services.coordinator import validation
from rollmesh.services.coordinator.mesh_description import MeshDescriber, MeshDescription
from rollmesh.shared.errors import InvalidInput, PayloadTooLarge
from rollmesh.v1 import run_pb2, types_pb2

Key = types_pb2.AnswerKey
KNOWN = ["correct", "brief"]


def task(task_id: str = "a", **fields: Any) -> types_pb2.Task:
    prompt = [types_pb2.Message(role="user", content="1+1?")]
    return types_pb2.Task(**({"task_id": task_id, "messages": prompt} | fields))


def check(*tasks: types_pb2.Task, keys: tuple[Key, ...] = (), known: list[str] = KNOWN, **fields: Any) -> None:
    request = run_pb2.SubmitTasksRequest(run="r", tasks=tasks, answer_keys=keys, **fields)
    validation.check_submission(request, task_bytes_max=10_000)
    validation.check_submitted_scorers(request, known)


@pytest.mark.parametrize(
    ("tasks", "keys", "field"),
    [
        ((), (), "tasks"),
        ((task(),) * 1025, (), "tasks"),
        ((task(), task()), (), "tasks.task_id"),
        ((task(""),), (), "tasks[0].task_id"),
        ((task("b"), task("a/b")), (), "tasks[1].task_id"),
        ((task("x" * 257),), (), "tasks[0].task_id"),
        ((task(messages=[]),), (), "tasks[0] (task a).messages"),
        ((task(messages=[types_pb2.Message(content="x")]),), (), "tasks[0] (task a).messages[0].role"),
        ((task(split="test"),), (), "tasks[0] (task a).split"),
        ((task(agent="x" * 257),), (), "tasks[0] (task a).agent"),
        ((task(extras={"files": "{"}),), (), "tasks[0] (task a).extras"),
        ((task(extras={"a b": "1"}),), (), "tasks[0] (task a).extras"),
        ((task(extras={"files": '"' + "x" * 70_000 + '"'}),), (), "tasks[0] (task a).extras"),
        ((task(scorers=["wrong"]),), (), "tasks[0] (task a).scorers"),
        ((task(scorers=["correct", "correct"]),), (), "tasks[0] (task a).scorers"),
        ((task(oracle_ref="submitted:r/1-ab/b"),), (), "tasks[0] (task a).oracle_ref"),
        ((task(oracle_ref="tests:x"),), (Key(task_id="a", answers=["2"]),), "tasks[0] (task a).oracle_ref"),
        ((task(),), (Key(task_id="a"),), "tasks[0] (task a).answer_key"),
        ((task(),), (Key(task_id="a", tests="{Zanzibar"),), "tasks[0] (task a).answer_key.tests"),
        ((task(),), (Key(task_id="a", record="[1]"),), "tasks[0] (task a).answer_key.record"),
        ((task(),), (Key(task_id="a", record="Zanzibar"),), "tasks[0] (task a).answer_key.record"),
        ((task(),), (Key(task_id="b", answers=["2"]),), "answer_keys.task_id"),
        ((task(),), (Key(task_id="a", answers=["2"]),) * 2, "answer_keys.task_id"),
    ],
)
def test_a_wrong_field_is_named(tasks: tuple[types_pb2.Task, ...], keys: tuple[Key, ...], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check(*tasks, keys=keys)
    assert [violation.field for violation in caught.value.violations] == [field]
    assert "Zanzibar" not in str(caught.value)


@pytest.mark.parametrize("field", ["record", "tests"])
@pytest.mark.parametrize("levels", [101, 50_000])
@pytest.mark.parametrize("nest", [("[", "]"), ('{"b": ', "}")])
def test_a_deeply_nested_object_is_rejected(field: str, levels: int, nest: tuple[str, str]) -> None:
    def nested(num: int) -> Key:
        inner = nest[0] * (num - 1) + "1" + nest[1] * (num - 1)
        return Key(task_id="a", **cast(Any, {field: f'{{"a": {inner}}}'}))

    request = run_pb2.SubmitTasksRequest(run="r", tasks=[task()], answer_keys=[nested(levels)])
    with pytest.raises(InvalidInput, match="at most 100 levels"):
        validation.check_submission(request, task_bytes_max=1 << 20)
    check(task(), keys=(nested(100),))


def test_a_mesh_without_scorers_takes_no_task() -> None:
    with pytest.raises(InvalidInput, match="have a scorer"):
        check(task(), known=[])


@pytest.mark.parametrize("agent", ["hinted", ""])
def test_an_agent_with_private_extras_or_an_unknown_oracle_gets_no_submitted_task(agent: str) -> None:
    mesh = MeshDescriber(
        MeshDescription(
            config_yaml="",
            coordinator="",
            bus_url="",
            policy="main",
            base_dir="",
            agents=("hinted", "other"),
            private_agents=("hinted", ""),
            oracles=("tests",),
        ),
        runs=cast(Any, None),
        keeper=cast(Any, None),
    )
    mesh.check_tasks([task(agent="other", oracle_ref="tests:x")])
    for unknown in ("foo:bar", "nocolon"):
        with pytest.raises(InvalidInput, match="oracle_ref.*reward.oracles"):
            mesh.check_tasks([task(agent="other", oracle_ref=unknown)])
    with pytest.raises(InvalidInput, match="rollout.private_extras") as caught:
        mesh.check_tasks([task(agent=agent)])
    assert [violation.field for violation in caught.value.violations] == ["tasks[0] (task a).agent"]


def test_what_passes() -> None:
    check(finish=True)
    check(task(scorers=["brief"], split="train"), task("b.1:c-_"), keys=(Key(task_id="a", tests="stored"),))
    check(task(oracle_ref="tests:stored"), finish=True)
    check(task(), keys=(Key(task_id="a", tests='{"tests": []}', record='{"a": 1}'),))


def test_a_task_and_a_call_have_a_size() -> None:
    with pytest.raises(PayloadTooLarge, match="task `a` has .* at most 10000") as caught:
        check(task(), keys=(Key(task_id="a", answers=["x" * 10_000]),))
    assert caught.value.metadata["task_id"] == "a"
    long = [types_pb2.Message(role="user", content="x" * 9_000)]
    with pytest.raises(PayloadTooLarge, match="make several calls"):
        check(*(task(f"t{number}", messages=long) for number in range(300)))
