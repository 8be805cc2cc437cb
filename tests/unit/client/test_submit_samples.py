"""The client divides submitted samples into calls of whole groups, each with the tasks and keys of its groups."""

from __future__ import annotations

from typing import Any, cast

import pytest

from rollmesh.client.client import Run
from rollmesh.shared.errors import InvalidInput, SampleQuota
from rollmesh.v1 import run_pb2, types_pb2

PEER = types_pb2.SEGMENT_SOURCE_PEER


class Recording(Run):
    """Accepts everything."""

    def __init__(self) -> None:
        super().__init__(cast(Any, None), "r", "main", "main")
        self.accepted: list[run_pb2.SubmitSamplesRequest] = []

    async def ask(self, verb: str, request: Any, limit_s: float | None = None) -> Any:
        assert verb == "SubmitSamples"
        self.accepted.append(request)
        return run_pb2.SubmitSamplesResponse()


def episode(group: str, name: str, task: str, num_chars: int = 1) -> types_pb2.Episode:
    said = types_pb2.Segment(messages=[types_pb2.Message(content="x" * num_chars)])
    return types_pb2.Episode(key=types_pb2.EpisodeKey(group=group, episode=name, task=task), segments=[said])


async def test_groups_stay_whole_and_bring_their_tasks_and_keys() -> None:
    mesh = Recording()
    large = 300_000
    episodes = [
        episode("a", "0", "t", large), episode("b", "0", "u", large), episode("a", "1", "t", large),
        episode("c", "0", "t", large), episode("d", "0", "v"),
    ]  # fmt: skip
    tasks = [types_pb2.Task(task_id=name) for name in "tuv"]
    keys = [types_pb2.AnswerKey(task_id=name) for name in "tv"]
    await mesh.submit_samples(episodes, tasks, source=PEER, answer_keys=keys, tokenizer_digest="d")
    assert [[f"{one.key.group}{one.key.episode}" for one in part.episodes] for part in mesh.accepted] == [
        ["a0", "a1", "b0"], ["c0", "d0"],
    ]  # fmt: skip
    assert [[task.task_id for task in part.tasks] for part in mesh.accepted] == [["t", "u"], ["t", "v"]]
    assert [[key.task_id for key in part.answer_keys] for part in mesh.accepted] == [["t"], ["t", "v"]]
    assert {(part.run, part.source, part.tokenizer_digest) for part in mesh.accepted} == {("r", PEER, "d")}


async def test_a_call_has_at_most_1024_episodes() -> None:
    mesh = Recording()
    episodes = [episode(f"g{number // 512}", str(number), "t") for number in range(512 * 3)]
    await mesh.submit_samples(episodes, [types_pb2.Task(task_id="t")], source=PEER)
    assert [len(part.episodes) for part in mesh.accepted] == [1024, 512]


async def test_the_answer_keys_of_a_call_count() -> None:
    mesh = Recording()
    names = [f"t{number}" for number in range(4)]
    tasks = [types_pb2.Task(task_id=name) for name in names]
    keys = [types_pb2.AnswerKey(task_id=name, answers=["x" * 400_000]) for name in names]
    await mesh.submit_samples([episode(name, "0", name) for name in names], tasks, source=PEER, answer_keys=keys)
    assert [len(part.answer_keys) for part in mesh.accepted] == [2, 2]
    alike = [episode(f"g{number}", "0", "t0") for number in range(4)]
    await mesh.submit_samples(alike, tasks[:1], source=PEER, answer_keys=keys[:1])
    assert [len(part.episodes) for part in mesh.accepted[2:]] == [4], "groups of one task share its key"


@pytest.mark.parametrize(
    ("tasks", "keys", "field"),
    [
        ("tt", "", "tasks.task_id"),
        ("tu", "", "tasks"),
        ("t", "tt", "answer_keys.task_id"),
        ("t", "u", "answer_keys.task_id"),
    ],
)
async def test_what_belongs_to_no_episode_is_an_error(tasks: str, keys: str, field: str) -> None:
    given = [types_pb2.Task(task_id=name) for name in tasks]
    of = [types_pb2.AnswerKey(task_id=name) for name in keys]
    with pytest.raises(InvalidInput) as caught:
        await Recording().submit_samples([episode("a", "0", "t")], given, source=PEER, answer_keys=of)
    assert [violation.field for violation in caught.value.violations] == [field]


async def test_a_mesh_with_a_smaller_quota_gets_halves() -> None:
    class Small(Recording):
        async def ask(self, verb: str, request: Any, limit_s: float | None = None) -> Any:
            if len({one.key.group for one in request.episodes}) > 2:
                raise SampleQuota("too many", groups_per_call=2)
            return await super().ask(verb, request)

    mesh = Small()
    await mesh.submit_samples([episode(name, "0", "t") for name in "abcde"], [types_pb2.Task(task_id="t")], source=PEER)
    assert ["".join(one.key.group for one in part.episodes) for part in mesh.accepted] == ["ab", "c", "de"]
