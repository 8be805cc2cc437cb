"""Answer keys of submitted tasks come from the coordinator, once for each task, and a bounded number is held."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rollmesh.services.reward import submitted_oracle
from rollmesh.services.reward.oracles import Oracles
from rollmesh.services.reward.submitted_oracle import SubmittedOracle
from rollmesh.shared.errors import UnknownOracle
from rollmesh.v1 import types_pb2


class Source:
    """Knows every key, and returns at most `num_max` at once."""

    def __init__(self, num_max: int = 100) -> None:
        self.asked: list[list[str]] = []
        self._num_max = num_max

    async def find(self, refs: Sequence[str]) -> list[types_pb2.AnswerKey]:
        self.asked.append(list(refs))
        return [types_pb2.AnswerKey(task_id=ref, answers=[ref[-1]]) for ref in refs[: self._num_max]]


def refs(names: str) -> list[str]:
    return [f"submitted:r/1-ab/{name}" for name in names]


async def test_a_key_is_asked_for_once_and_in_parts() -> None:
    source = Source(num_max=2)
    oracles = Oracles({"submitted": SubmittedOracle(source)})
    fetched = await oracles.fetch([*refs("abca"), "calc:1+1", ""])
    assert source.asked == [refs("abc"), refs("c")]
    assert set(await oracles.fetch(refs("cb"))) == set(refs("cb"))
    assert len(source.asked) == 2
    keys = [oracles.resolve(ref, fetched) for ref in refs("abc")]
    assert [key.answers for key in keys if key is not None] == [("a",), ("b",), ("c",)]


async def test_the_oldest_keys_are_dropped_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submitted_oracle, "KEYS_HELD_MAX", 2)
    source = Source()
    oracle = SubmittedOracle(source)
    fetched = await oracle.fetch(["a", "b", "c"])
    await oracle.fetch(["d", "e"])
    assert [fetched[name].answers for name in "abc"] == [("a",), ("b",), ("c",)], "also those that are dropped since"
    source.asked.clear()
    await oracle.fetch(["e", "d"])
    await oracle.fetch(["c"])
    assert source.asked == [["submitted:c"]]
    monkeypatch.setattr(submitted_oracle, "BYTES_HELD_MAX", 1)
    assert set(await oracle.fetch(["f", "d"])) == {"f", "d"}
    source.asked.clear()
    await oracle.fetch(["d"])
    assert source.asked == [["submitted:d"]]


async def test_tests_and_record_are_objects() -> None:
    class One(Source):
        async def find(self, refs: Sequence[str]) -> list[types_pb2.AnswerKey]:
            return [types_pb2.AnswerKey(tests=' {"tests": [1]}', record='{"a": 1}'), types_pb2.AnswerKey(tests="ref")]

    oracle = SubmittedOracle(One())
    fetched = await oracle.fetch(["a", "b"])
    assert (fetched["a"].tests, fetched["a"].record) == ({"tests": [1]}, {"a": 1})
    assert fetched["b"].tests == "ref"


async def test_outside_a_mesh_no_key_is_known() -> None:
    oracles = Oracles({})
    await oracles.fetch(refs("a"))
    with pytest.raises(UnknownOracle, match="only the mesh to which the task was submitted"):
        oracles.resolve(refs("a")[0])
