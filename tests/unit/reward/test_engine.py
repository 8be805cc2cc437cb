"""Running scorers: every failure is an infra failure with its cause, and never a reward of 0."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from rollmesh.services.reward.config import RewardConfig, ScorerConfig, build_engine, build_scorer
from rollmesh.services.reward.engine import RewardEngine
from rollmesh.services.reward.finalizer import Finalizer, FinalizerDecision, Group, Verdict
from rollmesh.services.reward.finalizer_list import ConfiguredFinalizer
from rollmesh.services.reward.item import ScoreItem, TaskView
from rollmesh.services.reward.oracles import Oracles
from rollmesh.services.reward.policy import PolicyClient
from rollmesh.services.reward.scorer import Scorer
from rollmesh.services.reward.scorer_run import EVIDENCE_CHARS_MAX, ConfiguredScorer, Uses
from rollmesh.shared.clients.inference import InferenceRouter
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome, Outcome, Reward
from rollmesh.shared.endpoints.client import Endpoints
from rollmesh.shared.endpoints.config import EndpointConfig
from rollmesh.shared.errors import ConfigError, GroupCodeFailed, Overloaded
from rollmesh.shared.membership.fleet import KnownFleet
from rollmesh.shared.rpc.access import Access
from rollmesh.testing.rollout import CharTokenizer
from rollmesh.trainer.estimators import make_estimator
from rollmesh.trainer.estimators.base import GroupEstimator

from ..shared.chat_server import ChatServer, chat_server, failure
from .builders import item, rewards_by


class Returns(Scorer):
    """A scorer that returns or raises a given result."""

    version = "3"

    def __init__(self, result: Any) -> None:
        self.result = result

    async def score(self, item: ScoreItem) -> Any:
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


class Hangs(Scorer):
    """A scorer that waits until `release`."""

    def __init__(self) -> None:
        self.entered, self.release = asyncio.Event(), asyncio.Event()

    async def score(self, item: ScoreItem) -> float:
        self.entered.set()
        await self.release.wait()
        return 1.0


def configured(scorer: Any, timeout_s: float = 30.0) -> ConfiguredScorer:
    return ConfiguredScorer(name="mine", label="Mine@3", scorer=scorer, timeout_s=timeout_s)


def engine(
    *scorers: ConfiguredScorer, queue_samples_max: int = 8, finalizers: Sequence[ConfiguredFinalizer] = ()
) -> RewardEngine:
    return RewardEngine(
        scorers=scorers,
        finalizers=finalizers,
        oracles=Oracles({}),
        estimator=make_estimator("grpo"),
        concurrency_max=2,
        queue_samples_max=queue_samples_max,
    )


@pytest.mark.parametrize(
    ("result", "names_and_values"),
    [
        (0.5, [("mine", 0.5)]),
        (True, [("mine", 1.0)]),
        (Reward(name="", value=2.0), [("mine", 2.0)]),
        ([Reward(name="", value=1.0), Reward(name="other", value=3.0)], [("mine", 1.0), ("other", 3.0)]),
    ],
)
async def test_rewards_get_their_name_and_the_scorers_version(
    result: Any, names_and_values: list[tuple[str, float]]
) -> None:
    rewards = await rewards_by(configured(Returns(result)), item())
    assert [(r.name, r.value) for r in rewards] == names_and_values
    assert {r.scorer for r in rewards} == {"Mine@3"}


@pytest.mark.parametrize(
    ("result", "cause"),
    [
        (RuntimeError("judge is down"), "RuntimeError: judge is down"),
        (TimeoutError("judge timed out"), "TimeoutError: judge timed out"),
        (None, "TypeError"),
        ("1.0", "expected a number, a Reward"),
        ([], "no reward"),
        (float("nan"), "nan"),
        ([Reward(name="", value=float("inf"))], "inf"),
        ([Reward(name="a", value=1.0), Reward(name="a", value=2.0)], "two rewards of one name"),
    ],
)
async def test_a_scorer_that_fails_is_an_infra_failure_with_its_cause(result: Any, cause: str) -> None:
    (reward,) = await rewards_by(configured(Returns(result)), item())
    assert reward.outcome is Outcome.INFRA_FAILURE
    assert reward.name == "mine"
    assert cause in reward.evidence


async def test_a_scorer_beyond_its_time_limit_is_an_infra_failure() -> None:
    (reward,) = await rewards_by(configured(Hangs(), timeout_s=0.01), item())
    assert reward.outcome is Outcome.INFRA_FAILURE
    assert reward.evidence.startswith("no result within 0.01 s\n")


async def test_the_cause_of_a_failure_does_not_quote_the_answer_key() -> None:
    (reward,) = await rewards_by(configured(Returns(ValueError("cannot read Zanzibar"))), item(answer="Zanzibar"))
    cause, _, frames = reward.evidence.partition("\n")
    assert cause == "ValueError: cannot read [answer key]"
    assert "test_engine.py" in frames
    assert "Zanzibar" not in frames


@pytest.mark.parametrize(
    ("answer", "message", "expected"),
    [
        ("a", "'function' object has no attribute 'strip'", "'function' object has no attribute 'strip'"),
        ("a", "invalid literal for int() with base 10: 'a'", "invalid literal for int() with base 10: '[answer key]'"),
        ("the", "cannot read the other theme", "cannot read [answer key] other theme"),
        ("$5.00", "got $5.00, not 5", "got [answer key], not 5"),
        ("ValueError", "bad", "bad"),
    ],
)
async def test_the_answer_key_is_redacted_only_where_it_is_a_whole_value(
    answer: str, message: str, expected: str
) -> None:
    (reward,) = await rewards_by(configured(Returns(ValueError(message))), item(answer=answer))
    assert reward.evidence.partition("\n")[0] == f"ValueError: {expected}"


async def test_a_method_used_as_a_value_is_reported_with_the_line_of_the_users_code() -> None:
    class Mistaken(Scorer):
        async def score(self, item: ScoreItem) -> float:
            return float(item.response.strip() == "4")  # type: ignore[attr-defined]

    (reward,) = await rewards_by(configured(Mistaken()), item())
    cause, _, frames = reward.evidence.partition("\n")
    assert cause.endswith("(`response` is a method; call it: `response()`)")
    assert 'return float(item.response.strip() == "4")' in frames
    assert "reward/engine.py" not in frames, "the frames begin with the user's code"


async def test_cancelling_is_not_recorded_but_passes() -> None:
    scorer = Hangs()
    running = asyncio.create_task(rewards_by(configured(scorer), item()))
    await scorer.entered.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_one_failing_scorer_leaves_the_others_rewards() -> None:
    (rewards,) = await engine(
        configured(Returns(RuntimeError("x"))),
        ConfiguredScorer(name="b", label="b@1", scorer=Returns(1.0), timeout_s=1),
    ).score([item()])
    assert [(r.name, r.outcome) for r in rewards] == [("mine", Outcome.INFRA_FAILURE), ("b", Outcome.OK)]


async def test_more_samples_than_the_queue_holds_are_refused_and_room_comes_back() -> None:
    scorer = Hangs()
    scoring = engine(configured(scorer), queue_samples_max=2)
    first = asyncio.create_task(scoring.score([item(), item()]))
    await scorer.entered.wait()
    with pytest.raises(Overloaded):
        await scoring.score([item()])
    scorer.release.set()
    assert len(await first) == 2
    assert len(await scoring.score([item()])) == 1


OWN = """
import msgspec

class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    bonus: float = 0.0

class Scorer:
    Options = Options
    version = "7"

    def __init__(self, *, options):
        self.bonus = options.bonus

    async def score(self, item):
        return item.response().count("!") + self.bonus

class Plain:
    async def score(self, item):
        return float(item.answer_key.answers[0] in item.response())

class NotAsync:
    def score(self, item):
        return 1.0
"""


async def test_a_users_own_scorer_is_loaded_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    config = config_from_dict(
        RewardConfig,
        {
            "scorers": [
                {"name": "own.py:Scorer", "reward": "joy", "options": {"bonus": 0.5}},
                {"name": "own.py:Plain"},
            ]
        },
    )
    (rewards,) = await build_engine(config, tmp_path).score([item("42!!")])
    assert [(r.name, r.value, r.scorer) for r in rewards] == [("joy", 2.5, "Scorer@7"), ("Plain", 1.0, "Plain@1")]


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        (ScorerConfig(name="own.py:NotAsync"), "async def score"),
        (ScorerConfig(name="own.py:Missing"), "Missing"),
        (ScorerConfig(name="none.py:Scorer"), "none.py"),
        (ScorerConfig(name="own.py:Scorer", options={"bonis": 1}), "bonis.*did you mean `bonus`"),
        (ScorerConfig(name="own.py:Plain", options={"x": 1}), "x"),
    ],
)
def test_a_users_scorer_that_cannot_be_used_is_named(tmp_path: Path, scorer: ScorerConfig, message: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(ConfigError, match=message):
        build_engine(RewardConfig(scorers=(scorer,)), tmp_path)


def test_a_weight_for_a_reward_of_no_scorer_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"`reward.weights` must name rewards of scorers \(correct\), got 'corect' \(did you mean 'correct'\?\)",
    ):
        build_engine(RewardConfig(weights={"corect": 1.0}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scorers": []}, "scorers"),
        ({"scorers": [{"name": "exact", "timeout_s": 0}]}, "timeout_s"),
        ({"concurrency_max": 0}, "concurrency_max.*0"),
        ({"weights": {"correct": float("nan")}}, "`weights.correct` must be finite, got nan"),
        ({"weights": {"correct": 0.0}}, "`weights` must contain a weight other than 0"),
    ],
)
def test_settings_out_of_range_name_field_and_value(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_dict(RewardConfig, settings)


class Misnamed(GroupEstimator):
    def of_group(self, group: GroupContext) -> dict[str, float]:
        return {member.sample_id: member.rewardz for member in group.members}  # type: ignore[attr-defined]


def test_an_estimator_that_raises_is_reported_with_its_name_and_the_users_line() -> None:
    broken = engine()
    broken.estimator, broken.estimator_name = Misnamed(weights={}), "mine.py:Misnamed"
    group = GroupContext(group="g", task="t", members=(MemberOutcome(sample_id="a", rewards=(), end="ready"),))
    with pytest.raises(GroupCodeFailed) as caught:
        broken.advantages(group)
    cause, _, frames = str(caught.value).partition("\n")
    assert cause == "estimator mine.py:Misnamed: AttributeError: 'MemberOutcome' object has no attribute 'rewardz'"
    assert "member.rewardz for member in group.members" in frames
    assert "reward/engine.py" not in frames


class _Says(Finalizer):
    """A finalizer with a given verdict."""

    def __init__(self, verdict: Any) -> None:
        self._verdict = verdict

    def decide(self, group: Group) -> Any:
        return self._verdict


def _filter(**values: Any) -> Verdict:
    return Verdict(**{"decision": FinalizerDecision.FILTER, **values})


def _adjusted(*rewards: Reward) -> Verdict:
    return Verdict(decision=FinalizerDecision.KEEP, adjusted={"a": rewards})


@pytest.mark.parametrize(
    ("verdict", "cause"),
    [
        (None, "the finalizer returned a NoneType, expected a Verdict"),
        (_filter(decision=77), "`Verdict.decision` must be a FinalizerDecision, got 77"),
        (_filter(reason="mean 0.123"), "`Verdict.reason` must have at most 64 characters of A-Z a-z 0-9 _ . : / -, got 'mean 0.123'"),
        (_filter(reason="x" * 3_000_000), "`Verdict.reason` must have at most 64 characters"),
        (_filter(decision=FinalizerDecision.EXTEND, num_extend=-5), "`Verdict.num_extend` must be in [1, 49152] for EXTEND, got -5"),
        (_filter(decision=FinalizerDecision.EXTEND, num_extend=2**31 - 1), "must be in [1, 49152] for EXTEND, got 2147483647"),
        (_filter(decision=FinalizerDecision.EXTEND), "must be in [1, 49152] for EXTEND, got 0"),
        (_adjusted(Reward(name="n" * 100_000, value=1.0)), "the name of a reward must have 1 to 64 characters, got 'nnnn"),
        (_adjusted(*[Reward(name=f"r{n}", value=1.0) for n in range(10_000)]), "at most 1024 rewards, got 10000"),
        (_adjusted(Reward(name="r", value=float("inf"))), "Verdict.adjusted['a'][0].value"),
        (_filter(dropped=["a"]), "`Verdict.dropped` must be a mapping from sample id to reason, got a list"),
        (_filter(dropped={"b" * 3_000_000: "LOOP"}), "must name members of `group.members` by `sample_id`, got 'bbbb"),
        (_filter(dropped={"a": ""}), "`Verdict.dropped['a']` must have 1 to 64 characters of A-Z a-z 0-9 _ . : / -, got ''"),
        (_filter(dropped={"a": "mean 0.1"}), "`Verdict.dropped['a']` must have 1 to 64 characters of A-Z"),
        (_filter(dropped={"a": "x" * 3_000_000}), "`Verdict.dropped['a']` must have 1 to 64 characters of A-Z"),
        (_filter(dropped={"a": None}), "`Verdict.dropped['a']` must have 1 to 64 characters of A-Z"),
    ],
)  # fmt: skip
def test_a_verdict_out_of_range_names_the_finalizer(verdict: Any, cause: str) -> None:
    broken = engine(finalizers=[ConfiguredFinalizer(name="mine.py:Mine", finalizer=_Says(verdict))])
    member = MemberOutcome(sample_id="a", rewards=(), end="ready")
    with pytest.raises(GroupCodeFailed) as caught:
        broken.finalize(Group(group="g", task=TaskView(task_id="t"), members=(member,)))
    assert str(caught.value).startswith("finalizer mine.py:Mine: ")
    assert cause in str(caught.value)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    ("result", "cause"),
    [
        (Reward(name="n" * 100_000, value=1.0), "ValueError: the name of a reward must have 1 to 64 characters"),
        ([Reward(name=f"r{n}", value=1.0) for n in range(10_000)], "ValueError: a sample must have at most 1024 rewards"),
    ],
)  # fmt: skip
async def test_a_scorer_with_too_many_rewards_or_too_long_names_fails_with_the_cause(result: Any, cause: str) -> None:
    (reward,) = await rewards_by(configured(Returns(result)), item("42"))
    assert reward.outcome is Outcome.INFRA_FAILURE
    assert reward.evidence.startswith(cause)


async def test_the_evidence_of_a_reward_is_cut() -> None:
    (reward,) = await rewards_by(configured(Returns(Reward(name="", value=1.0, evidence="e" * 9_000_000))), item("42"))
    assert reward.outcome is Outcome.OK
    assert len(reward.evidence) == EVIDENCE_CHARS_MAX


# Columns --------------------------------------------------------------------------------------------------------------


def test_columns_that_are_no_names_are_rejected(tmp_path: Path) -> None:
    for value in ('"entropy"', "(1, 2)"):
        source = f"class Reads:\n    columns = {value}\n    async def score(self, item):\n        return 0.0\n"
        (tmp_path / f"own{len(value)}.py").write_text(source)
        with pytest.raises(ConfigError, match="`columns` must be a tuple of names such as"):
            build_scorer(ScorerConfig(name=f"own{len(value)}.py:Reads"), tmp_path)


async def test_a_written_answer_has_no_columns() -> None:
    scorer = Returns(1.0)
    scorer.columns = ("entropy",)
    (reward,) = await rewards_by(configured(scorer), item("42"))
    assert reward.outcome is Outcome.INFRA_FAILURE
    assert reward.evidence.startswith(
        "ValueError: the scorer reads the columns [entropy], but the sample has no sampled tokens"
    )


async def test_a_scorer_of_the_policy_gets_its_client(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "class Asks:\n    def use_policy(self, policy):\n        self.policy = policy\n"
        "    async def score(self, item):\n        return float(self.policy.encode(item.response()).size)\n"
    )
    client = PolicyClient(InferenceRouter(KnownFleet(), access=Access(token="t")), policy="main")
    config = RewardConfig(scorers=(ScorerConfig(name="own.py:Asks"),))
    made = build_engine(config, tmp_path, policy=client)
    ((failed,),) = await made.score([item("abc")])
    assert (failed.outcome, failed.evidence.startswith("ConfigError: the reward node has no tokenizer")) == (
        Outcome.INFRA_FAILURE,
        True,
    )
    client.encoder = CharTokenizer()
    ((reward,),) = await made.score([item("abc")])
    assert reward.value == 3.0


JUDGE = """
class Judge:
    def use_endpoints(self, endpoints):
        self.endpoints = endpoints
    async def score(self, item):
        return float((await self.endpoints.ask("judge", item.response())).text)
"""


async def judged(server: ChatServer, tmp_path: Path, *, timeout_s: float = 30.0) -> tuple[list[Reward], Uses]:
    """Score two samples with a judge."""
    (tmp_path / "own.py").write_text(JUDGE)
    entry = {"kind": "openai", "base_url": server.url, "model": "m", "retry_s": 0.0}
    endpoints = Endpoints({"judge": config_from_dict(EndpointConfig, entry)})
    config = RewardConfig(scorers=(ScorerConfig(name="own.py:Judge", reward="judged", timeout_s=timeout_s),))
    uses: Uses = {}
    try:
        made = build_engine(config, tmp_path, endpoints=endpoints)
        scored = await made.score(
            [structs.replace(item("a"), sample_id="a"), structs.replace(item("b"), sample_id="b")], uses
        )
    finally:
        await endpoints.close()
    return [reward for (reward,) in scored], uses


async def test_a_scorer_asks_a_judge_and_each_sample_has_its_use(tmp_path: Path) -> None:
    async with chat_server(lambda body: "0.25" if body["messages"][0]["content"] == "a" else "0.75") as server:
        rewards, uses = await judged(server, tmp_path)
    assert [reward.value for reward in rewards] == [0.25, 0.75]
    assert {reward.scorer for reward in rewards} == {"Judge@1+judge:m"}, "the scorer, the endpoint and its model"
    assert {use.model for found in uses.values() for use in found} == {"m"}
    assert {name: [(use.endpoint, use.caller, use.calls) for use in found] for name, found in uses.items()} == {
        name: [("judge", "Judge@1", 1)] for name in "ab"
    }


async def test_a_judge_that_fails_or_is_late_is_named_in_the_infra_failure(tmp_path: Path) -> None:
    async with chat_server(lambda body: failure(500, "down")) as server:
        rewards, uses = await judged(server, tmp_path)
        assert {reward.outcome for reward in rewards} == {Outcome.INFRA_FAILURE}
        assert "EndpointFailed: endpoint `judge`: POST" in rewards[0].evidence
        assert not uses
        server.gate = asyncio.Event()
        rewards, _ = await judged(server, tmp_path, timeout_s=0.05)
    assert rewards[0].evidence.startswith("no result within 0.05 s; it awaited endpoint `judge`")
