"""RewardService over real gRPC: the wire, typed errors, and where the answer key may not be seen."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.services.reward.config import RewardConfig, build_engine
from rollmesh.services.reward.servicer import RewardServicer
from rollmesh.shared.codec.arrays import encode_array
from rollmesh.shared.codec.trajectory import encode_segment
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.domain.trajectory import FinishReason, Message, Role, Segment, Source
from rollmesh.shared.errors import InvalidInput, UnknownOracle
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.server import RpcServer
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.shared.store.jsonl import read_jsonl
from rollmesh.shared.store.records import FileRecord
from rollmesh.shared.store.row_files import RowFiles, open_rows
from rollmesh.v1 import reward_pb2, reward_pb2_grpc, types_pb2

OK = types_pb2.REWARD_OUTCOME_OK
INFRA = types_pb2.REWARD_OUTCOME_INFRA_FAILURE

BROKEN = """
class Broken:
    async def score(self, item):
        raise RuntimeError(f"the judge does not know {item.answer_key.answers[0]}")
"""


@asynccontextmanager
async def serving(
    settings: dict[str, Any], base_dir: Path | None = None
) -> AsyncIterator[reward_pb2_grpc.RewardServiceAsyncStub]:
    config = config_from_dict(RewardConfig, settings)
    engine = build_engine(config, base_dir)
    try:
        async with RpcServer(access=Access(token="t")) as server:
            server.add(
                reward_pb2_grpc.add_RewardServiceServicer_to_server,
                RewardServicer(engine),
            )
            await server.start()
            async with open_channel(server.address, access=Access(token="t")) as channel:
                yield reward_pb2_grpc.RewardServiceStub(channel)
    finally:
        await engine.close()


def segment(role: Role, text: str, parent: int, **fields: Any) -> types_pb2.Segment:
    action = role is Role.ACTION
    return encode_segment(
        Segment(
            parent=parent,
            role=role,
            source=Source.POLICY if action else Source.PROMPT,
            token_ids=np.arange(8, dtype=np.int32),
            finish=FinishReason.STOP if action else FinishReason.UNFINISHED,
            messages=(Message(role="assistant" if action else "user", content=text),),
            **fields,
        )
    )


def episode(said: str, *, oracle_ref: str = "calc:6*7", num_samples: int = 1, **fields: Any) -> reward_pb2.ScoreItem:
    return reward_pb2.ScoreItem(
        key=types_pb2.EpisodeKey(run="r", task="t", group="g0", episode="g0.0", attempt=1),
        task=types_pb2.Task(task_id="t", oracle_ref=oracle_ref),
        segments=[
            segment(Role.CONTEXT, "6*7", -1),
            *(segment(Role.ACTION, said, 0, **fields) for _ in range(num_samples)),
        ],
        samples=[
            types_pb2.Sample(sample_id=f"s{i}", leaf=i + 1, finish=types_pb2.FINISH_REASON_STOP)
            for i in range(num_samples)
        ],
    )


def request(*items: reward_pb2.ScoreItem) -> reward_pb2.RewardServiceScoreRequest:
    return reward_pb2.RewardServiceScoreRequest(run="r", items=items)


def group(*values: float) -> reward_pb2.FinalizeGroupRequest:
    members = [
        types_pb2.MemberOutcome(
            sample_id=f"s{i}",
            rewards=[types_pb2.Reward(name="correct", value=value, segment=-1, outcome=OK)],
            end="ready",
        )
        for i, value in enumerate(values)
    ]
    return reward_pb2.FinalizeGroupRequest(run="r", group=types_pb2.GroupContext(group="g0", task="t", members=members))


async def test_every_sample_is_scored_on_the_text_of_its_own_path() -> None:
    item = episode("<answer>42</answer>", num_samples=2)
    item.segments[2].messages[0].content = "no idea"
    async with serving({}) as stub:
        response = await stub.Score(request(item))
        assert [sample.rewards[0].value for sample in response.samples] == [1.0, 0.0]
        del item.segments[2]
        with (
            pytest.raises(InvalidInput, match=r"samples\[1\].leaf` must be the index of one of 2 segments, got 2"),
            typed_errors(),
        ):
            await stub.Score(request(item))


async def test_scores_come_per_sample_in_order_with_scorer_and_outcome() -> None:
    settings = {
        "scorers": [
            {"name": "exact", "reward": "correct"},
            {"name": "length", "options": {"form": "linear", "scale_tokens": 8}},
        ]
    }
    async with serving(settings) as stub:
        response = await stub.Score(
            request(episode("<answer>42</answer>", num_samples=2), episode("<answer>7</answer>"))
        )
    assert [sample.sample_id for sample in response.samples] == ["s0", "s1", "s0"]
    found = [[(r.name, r.value, r.scorer, r.segment, r.outcome) for r in s.rewards] for s in response.samples]
    length = ("length", -1.0, "length@1", -1, OK)
    assert found[0] == [("correct", 1.0, "exact@1", -1, OK), length]
    assert found[2] == [("correct", 0.0, "exact@1", -1, OK), length]


@pytest.mark.parametrize("names", [["short"], ["correct", "short"], ["correct", "correct"], [""], ["a" * 70_000]])
async def test_scorers_of_a_task_that_the_service_does_not_have_are_refused(names: list[str]) -> None:
    right, wrong = episode("<answer>42</answer>"), episode("<answer>42</answer>")
    right.task.scorers.append("correct")
    wrong.task.scorers.extend(names)
    async with serving({}) as stub:
        assert (await stub.Score(request(right))).samples[0].rewards[0].value == 1.0
        with (
            pytest.raises(
                InvalidInput,
                match=r"`items\[1\].task.scorers` must have different names of rewards among \[correct\], got",
            ),
            typed_errors(),
        ):
            await stub.Score(request(right, wrong))


async def test_a_scorer_reads_which_scorers_the_task_names(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from rollmesh.shared.domain.trajectory import Reward\n"
        "class Named:\n"
        "    async def score(self, item):\n"
        "        return Reward(name='', value=1.0, evidence=','.join(item.task.scorers))\n"
    )
    settings = {"scorers": [{"name": "own.py:Named", "reward": "named"}]}
    plain, named = episode("6"), episode("6")
    named.task.scorers.append("named")
    async with serving(settings, tmp_path) as stub:
        response = await stub.Score(request(plain, named))
    assert [sample.rewards[0].evidence for sample in response.samples] == ["", "named"]


@pytest.mark.parametrize("source", ["jsonl", "files"])
async def test_the_answer_key_of_a_file_is_used_and_never_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"question": "?", "answer": "#### Zanzibar"}) + "\n")
    (tmp_path / "own.py").write_text(BROKEN)
    digest = open_rows([str(path)]).digest if source == "files" else read_jsonl(path, num_lines_max=9).digest
    ref = f"{source}:mine@{digest[:16]}#1"
    threads: list[threading.Thread] = []
    read = RowFiles.rows

    def recorded(files: RowFiles, rows: Sequence[int]) -> list[FileRecord]:
        threads.append(threading.current_thread())
        return read(files, rows)

    monkeypatch.setattr(RowFiles, "rows", recorded)
    settings = {
        "scorers": [{"name": "exact", "reward": "correct"}, {"name": "own.py:Broken"}],
        "answer_files": {"mine": {"path": "mine.jsonl", "source": source, "answer_pattern": r"#### (\S+)"}},
    }
    async with serving(settings, tmp_path) as stub:
        response = await stub.Score(request(episode("<answer>Paris</answer>", oracle_ref=ref)))
        right = await stub.Score(request(episode("<answer>Zanzibar</answer>", oracle_ref=ref)))
        wrong_file = f"{source}:mine@{'0' * 16}#1"
        with pytest.raises(UnknownOracle) as caught, typed_errors():
            await stub.Score(request(episode("x", oracle_ref=wrong_file)))
    assert len(threads) == (source == "files")  # the key is read once, and not by the event loop
    assert threading.main_thread() not in threads
    assert right.samples[0].rewards[0].value == 1.0
    assert response.samples[0].rewards[0].value == 0.0
    assert response.samples[0].rewards[1].outcome == INFRA
    assert response.samples[0].rewards[1].evidence.startswith("RuntimeError: the judge does not know [answer key]\n")
    assert b"Zanzibar" not in response.SerializeToString()
    assert "Zanzibar" not in str(caught.value)


async def test_a_group_is_kept_or_filtered_with_its_reason() -> None:
    async with serving({}) as stub:
        assert (await stub.FinalizeGroup(group(1.0, 0.0))).decision == reward_pb2.GROUP_DECISION_KEEP
        filtered = await stub.FinalizeGroup(group(1.0, 1.0))
        assert (filtered.decision, filtered.reason) == (reward_pb2.GROUP_DECISION_FILTER, "ZERO_VARIANCE")
    async with serving({"finalizers": [{"name": "zero_variance", "options": {"extend_by": 3}}]}) as stub:
        extended = await stub.FinalizeGroup(group(1.0, 1.0))
        assert (extended.decision, extended.num_extend) == (reward_pb2.GROUP_DECISION_EXTEND, 3)
        full = group(1.0, 1.0)
        full.num_extend_max = 0
        assert (await stub.FinalizeGroup(full)).decision == reward_pb2.GROUP_DECISION_FILTER


async def test_a_finalizer_may_adjust_rewards_by_looking_at_the_group(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(
        "from msgspec.structs import replace\n"
        "from rollmesh.services.reward.finalizer import FinalizerDecision, Verdict\n"
        "class Ranks:\n"
        "    def decide(self, group):\n"
        "        ranked = sorted(group.members, key=lambda m: m.rewards[0].value)\n"
        "        adjusted = {m.sample_id: (replace(m.rewards[0], value=float(n)),) for n, m in enumerate(ranked)}\n"
        "        return Verdict(decision=FinalizerDecision.KEEP, adjusted=adjusted)\n"
    )
    async with serving({"finalizers": ["ranks.py:Ranks"]}, tmp_path) as stub:
        response = await stub.FinalizeGroup(group(0.9, 0.1, 0.5))
    assert {s.sample_id: s.rewards[0].value for s in response.adjusted} == {"s0": 2.0, "s1": 0.0, "s2": 1.0}


async def test_scorers_are_listed_with_what_they_are() -> None:
    async with serving({}) as stub:
        response = await stub.ListScorers(reward_pb2.ListScorersRequest())
    assert response.finalizer == "zero_variance"
    (info,) = response.scorers
    assert (info.name, info.scorer, list(info.rewards)) == ("correct", "exact@1", ["correct"])
    assert info.description.startswith("Compare the extracted answer")


READERS = """
from rollmesh.services.reward.scorer import Scorer

class Cheap(Scorer):
    reads = ("correct",)

    async def score(self, item):
        return item.reward("correct") - sum(use.price for use in item.endpoints)
"""


async def test_a_scorer_reads_other_rewards_and_what_the_agent_asked_of_endpoints(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(READERS)
    settings = {
        "scorers": [
            {"name": "own.py:Cheap", "reward": "cheap"},
            {"name": "exact", "reward": "correct"},
            {"name": "format"},
        ]
    }
    item = episode("<answer>42</answer>")
    item.endpoints.add(endpoint="strong", caller="agent", calls=1, price=0.25)
    async with serving(settings, tmp_path) as stub:
        listed = await stub.ListScorers(reward_pb2.ListScorersRequest())
        assert [list(scorer.reads) for scorer in listed.scorers] == [["correct"], [], []]
        item.scorers.append("cheap")
        response = await stub.Score(request(item))
        assert [(r.name, r.value) for r in response.samples[0].rewards] == [("cheap", 0.75), ("correct", 1.0)]
        item.scorers.append("cheep")
        with (
            pytest.raises(InvalidInput, match=r"no scorer gives a reward called 'cheep' \(did you mean 'cheap'\?\)"),
            typed_errors(),
        ):
            await stub.Score(request(item))


async def test_two_questions_about_one_episode_in_a_message_are_answered_apart(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from rollmesh.services.reward.scorer import BatchScorer\n"
        "class Others(BatchScorer):\n"
        "    sees = 'episode'\n"
        "    async def score_batch(self, items):\n"
        "        return [float(len(items) - 1)] * len(items)\n"
    )
    both = episode("6", num_samples=2)
    one, other = episode("6"), episode("6")
    async with serving({"scorers": [{"name": "own.py:Others", "reward": "others"}]}, tmp_path) as stub:
        response = await stub.Score(request(both, one, other))
    assert [sample.rewards[0].value for sample in response.samples] == [1.0, 1.0, 0.0, 0.0]


READING = """
class Reads:
    columns = ("logprobs", "entropy")

    async def score(self, item):
        prompt, answer = item.path
        assert (prompt.index, prompt.role.name, prompt.text, dict(prompt.arrays)) == (0, "CONTEXT", "6*7", {})
        assert (answer.index, answer.source.name, answer.finish.name) == (1, "POLICY", "STOP")
        assert item.prompt_ids.tolist() == item.answer_ids.tolist() == list(range(8))
        return float(item.column("entropy").sum() + item.column("logprobs").sum())
"""


async def test_a_scorer_reads_the_columns_that_it_declares(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(READING)
    columns = {"entropy": np.full(8, 2.0, np.float32)}
    settings = {"scorers": [{"name": "own.py:Reads"}, {"name": "exact", "reward": "correct"}]}
    async with serving(settings, tmp_path) as stub:
        listed = await stub.ListScorers(reward_pb2.ListScorersRequest())
        assert [list(scorer.columns) for scorer in listed.scorers] == [["logprobs", "entropy"], []]
        item = episode("<answer>42</answer>", logprobs=np.full(8, -0.5, np.float32), arrays=columns)
        with_them = await stub.Score(request(item))
        without = await stub.Score(request(episode("<answer>42</answer>", arrays=columns)))
    assert [reward.value for reward in with_them.samples[0].rewards] == [12.0, 1.0]
    failed, other = without.samples[0].rewards
    assert (failed.outcome, other.value) == (INFRA, 1.0)
    assert "the sample has no array logprobs; list its output in `rollout.outputs`" in failed.evidence


async def test_bad_requests_name_the_field() -> None:
    no_samples, no_task, uneven, unknown = (episode("x") for _ in range(4))
    del no_samples.samples[:]
    no_task.ClearField("task")
    uneven.segments[1].arrays["entropy"].CopyFrom(encode_array(np.zeros(7, np.float32), ""))
    later = episode("x")
    later.segments[0].parent = 1
    unknown.samples[0].finish = 99  # type: ignore[assignment]
    cases = {
        r"items\[0\].samples": request(no_samples),
        r"items\[1\].task": request(episode("x"), no_task),
        r"items\[0\].segments\[1\].arrays\[entropy\]` must have 8 rows, one per token, got 7": request(uneven),
        r"items\[0\].segments\[0\].parent` must be -1 \(root\) or the index of an earlier segment, below 0, got 1": request(
            later
        ),
        r"items\[0\].samples\[0\].finish": request(unknown),
        "items` must have at most 256 entries, got 257": request(*[episode("x")] * 257),
    }
    async with serving({}) as stub:
        for message, bad in cases.items():
            with pytest.raises(InvalidInput, match=message), typed_errors():
                await stub.Score(bad)
        with pytest.raises(InvalidInput, match=r"group.members"), typed_errors():
            await stub.FinalizeGroup(group())
