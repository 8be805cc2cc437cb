"""The fields of SubmitSamples are checked on arrival: an error names the episode and the field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollmesh.services.coordinator import sample_submissions
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.facts import SegmentSource
from rollmesh.shared.codec.arrays import encode_floats, encode_ints
from rollmesh.shared.errors import InvalidInput, PayloadTooLarge, TokenizerMismatch
from rollmesh.v1 import run_pb2
from rollmesh.v1 import types_pb2 as PB

PEER, DATASET, POLICY = PB.SEGMENT_SOURCE_PEER, PB.SEGMENT_SOURCE_DATASET, PB.SEGMENT_SOURCE_POLICY
TOOL, PROMPT = PB.SEGMENT_SOURCE_TOOL, PB.SEGMENT_SOURCE_PROMPT
ACTION, OBSERVATION, CONTEXT = PB.SEGMENT_ROLE_ACTION, PB.SEGMENT_ROLE_OBSERVATION, PB.SEGMENT_ROLE_CONTEXT
DIGEST = "ab" * 32
LIMITS = i.SubmissionLimits(total_max=9, waiting_max=9, waiting_bytes_max=9)


def task(task_id: str = "t") -> PB.Task:
    return PB.Task(task_id=task_id, messages=[PB.Message(role="user", content="1+1?")], agent="mine")


def said(text: str = "2", parent: int = -1, **fields: Any) -> PB.Segment:
    values: dict[str, Any] = {"role": ACTION, "source": PEER} | fields
    return PB.Segment(parent=parent, messages=[PB.Message(content=text)] if text else [], **values)


def tokens(parent: int, num: int = 2, **fields: Any) -> PB.Segment:
    ids = encode_ints(np.arange(num, dtype=np.int32))
    values: dict[str, Any] = {"role": ACTION, "source": PEER, "token_ids": ids} | fields
    return PB.Segment(parent=parent, **values)


def prompt(**fields: Any) -> PB.Segment:
    return tokens(-1, **({"role": CONTEXT, "source": PROMPT} | fields))


def episode(*segments: PB.Segment, key: str = "k", name: str = "e", of: str = "t", **fields: Any) -> PB.Episode:
    return PB.Episode(key=PB.EpisodeKey(task=of, group=key, episode=name), segments=segments or (said(),), **fields)


def request(*episodes: PB.Episode, **fields: Any) -> run_pb2.SubmitSamplesRequest:
    values: dict[str, Any] = {"run": "r", "tasks": [task()], "source": PEER} | fields
    return run_pb2.SubmitSamplesRequest(episodes=episodes or (episode(),), **values)


def check(asked: run_pb2.SubmitSamplesRequest, known: str = DIGEST) -> None:
    sample_submissions.check(asked, task_bytes_max=10_000, tokenizer_digest=known)


FLOATS = encode_floats(np.zeros(2, dtype=np.float32))
AT = "episodes[0] (group k)"


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (run_pb2.SubmitSamplesRequest(run="r", source=PEER), "episodes"),
        (request(*[episode()] * 1025), "episodes"),
        (request(source=POLICY), "source"),
        (request(source=0), "source"),
        (request(source=99), "source"),
        (request(tasks=[]), f"{AT}.key.task"),
        (request(tasks=[task(), task("u")]), "tasks"),
        (request(episode(key="a b")), "episodes[0] (group a b).key.group"),
        (request(episode(name="")), f"{AT}.key.episode"),
        (request(episode(), episode()), "episodes[1] (group k).key.episode"),
        (request(episode(), episode(of="u"), tasks=[task(), task("u")]), "episodes[1] (group k).key.task"),
        (request(provenance={"run": "x" * 257}), "provenance.run"),
        (request(provenance={"step": -1}), "provenance.step"),
        (request(PB.Episode(key=episode().key)), f"{AT}.segments"),
        (request(episode(samples=[PB.Sample()])), f"{AT}.samples"),
        (request(episode(said(parent=0))), f"{AT}.segments[0].parent"),
        (request(episode(said(source=POLICY))), f"{AT}.segments[0].source"),
        (request(episode(said(source=DATASET))), f"{AT}.segments[0].source"),
        (request(episode(said(text=""))), f"{AT}.segments[0].messages"),
        (request(episode(said(), said(parent=0))), f"{AT}.segments[1].role"),
        (request(episode(said(role=OBSERVATION, source=TOOL))), f"{AT}.segments[0].role"),
        (request(episode(said(role=99, source=TOOL))), f"{AT}.segments[0].role"),
        (request(episode(said(), said(parent=0, role=OBSERVATION, source=TOOL))), f"{AT}.segments"),
        (request(episode(said(logprobs=FLOATS))), f"{AT}.segments[0].logprobs"),
        (request(episode(tokens(-1))), f"{AT}.segments[0].role"),
        (request(episode(prompt(), said(parent=0))), f"{AT}.segments[1].token_ids"),
        (request(episode(prompt(loss_mask=b"\1\1"), tokens(0))), f"{AT}.segments[0].loss_mask"),
        (request(episode(prompt(), tokens(0, loss_mask=b"\0\0"))), f"{AT}.segments"),
        (request(episode(prompt(), tokens(0, loss_mask=b"\1"))), f"{AT}.segments[1].loss_mask"),
        (request(episode(prompt(), tokens(0, logprobs=FLOATS[:4]))), f"{AT}.segments[1].logprobs"),
        (request(episode(prompt(), tokens(0, token_ids=b"123"))), f"{AT}.segments[1].token_ids"),
        (request(episode(prompt(), tokens(0, logprobs=FLOATS), tokens(1))), f"{AT}.segments"),
        (request(episode(prompt(), tokens(0)), tokenizer_digest=""), "tokenizer_digest"),
        (request(episode(prompt(), tokens(0, kv_step_oldest=3))), f"{AT}.segments[1].kv_step_oldest"),
    ],
)
def test_a_wrong_field_is_named(asked: run_pb2.SubmitSamplesRequest, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check(asked)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_tokens_of_another_tokenizer_are_rejected_and_text_is_not() -> None:
    given = episode(prompt(), tokens(0))
    check(request(given, tokenizer_digest=DIGEST))
    with pytest.raises(TokenizerMismatch, match="submit the episodes as text") as caught:
        check(request(given, tokenizer_digest="cd" * 32))
    assert caught.value.metadata["tokenizer_digest"] == DIGEST
    check(request())
    check(request(), known="")
    with pytest.raises(InvalidInput, match="does not know the tokenizer"):
        check(request(given, tokenizer_digest=DIGEST), known="")


def test_a_call_that_is_too_large_is_rejected() -> None:
    with pytest.raises(PayloadTooLarge, match="SubmitSamples must have at most 2097152 bytes"):
        check(request(episode(said("x" * 2**21))))


def test_a_request_becomes_groups_in_their_order_without_keys_and_agents() -> None:
    asked = request(
        episode(key="b", name="0"), episode(key="a", name="0"), episode(key="b", name="1"),
        provenance={"mesh": "m", "run": "s", "step": 4},
    )  # fmt: skip
    check(asked)
    found = sample_submissions.to_input(1, asked, "1-x", LIMITS)
    assert found.source is SegmentSource.PEER
    assert [(group.key, len(group.episodes), group.task.agent, group.task.split) for group in found.groups] == [
        ("b", 2, "", "train"), ("a", 1, "", "train"),
    ]  # fmt: skip
    assert (found.provenance.mesh, found.provenance.run, found.provenance.step) == ("m", "s", 4)
    stored = PB.Episode.FromString(found.groups[1].episodes[0])
    assert not stored.HasField("key")
    assert [segment.sampling for segment in stored.segments] == [-1]
    assert found.groups[0].episodes[0] == found.groups[1].episodes[0], "the names of episodes are not content"


def test_the_task_of_each_group_counts_for_the_size_of_a_call() -> None:
    large = PB.Task(task_id="t", messages=[PB.Message(role="user", content="x" * 9_000)])
    groups = [episode(key=f"k{number}") for number in range(300)]
    check(request(*groups[:200], tasks=[large]))
    with pytest.raises(PayloadTooLarge, match="with the task of each group") as caught:
        check(request(*groups, tasks=[large]))
    assert int(caught.value.metadata["bytes"]) > 300 * 9_000
