"""The graph of scorers: who reads whose rewards, what runs at the same time, and what is scored in one call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from rollmesh.services.reward.config import RewardConfig, ScorerConfig, build_engine
from rollmesh.services.reward.engine import RewardEngine
from rollmesh.services.reward.item import ScoreItem, TaskView
from rollmesh.services.reward.oracles import Oracles
from rollmesh.services.reward.scorer import SCORERS, BatchScorer, Scorer, ScorerResult, not_applicable
from rollmesh.services.reward.scorer_run import ConfiguredScorer
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import Outcome, Reward
from rollmesh.shared.errors import ConfigError, InvalidInput
from rollmesh.trainer.estimators import make_estimator

from .builders import item


class Gives(Scorer):
    """Gives one result, or raises it."""

    def __init__(self, result: Any, *, reads: Sequence[str] = (), rewards: Sequence[str] = ()) -> None:
        self.result, self.reads, self.rewards = result, tuple(reads), tuple(rewards)
        self.seen: list[dict[str, float | None]] = []

    async def score(self, item: ScoreItem) -> ScorerResult:
        self.seen.append({name: item.reward(name) for name in self.reads})
        if isinstance(self.result, Exception):
            raise self.result
        return self.result  # type: ignore[no-any-return]


def scorer(name: str, made: Scorer, **settings: Any) -> ConfiguredScorer:
    return ConfiguredScorer(name=name, label=f"{name}@1", scorer=made, **{"timeout_s": 5.0, **settings})


def engine(*scorers: ConfiguredScorer, concurrency_max: int = 8) -> RewardEngine:
    return RewardEngine(
        scorers=scorers,
        finalizers=(),
        oracles=Oracles({}),
        estimator=make_estimator("grpo"),
        concurrency_max=concurrency_max,
        queue_samples_max=1000,
    )


def values(rewards: Sequence[Reward]) -> dict[str, float]:
    return {reward.name: reward.value for reward in rewards}


async def test_a_scorer_reads_the_rewards_of_others_wherever_it_is_in_the_list() -> None:
    reader = Gives(0.5, reads=("correct", "brief"))
    made = engine(
        scorer("gate", reader),
        scorer("correct", Gives([Reward(name="", value=1.0), Reward(name="brief", value=-2.0)], rewards=("brief",))),
    )
    (rewards,) = await made.score([item("x")])
    assert reader.seen == [{"correct": 1.0, "brief": -2.0}]
    assert list(values(rewards).items()) == [("gate", 0.5), ("correct", 1.0), ("brief", -2.0)], (
        "in the order of the list"
    )


async def test_a_reward_that_is_not_applicable_is_read_as_none_and_other_names_are_refused() -> None:
    reader, curious = Gives(0.5, reads=("judged",)), Gives(0.0)
    curious.reads = ("judged",)
    made = engine(scorer("judged", Gives(not_applicable("no question"))), scorer("gate", reader))
    (rewards,) = await made.score([item("x")])
    assert reader.seen == [{"judged": None}]
    assert [reward.outcome for reward in rewards] == [Outcome.NOT_APPLICABLE, Outcome.OK]
    with pytest.raises(LookupError, match=r"does not read the reward 'correct' \(it reads: none\); list it in `reads`"):
        item("x").reward("correct")


async def test_a_reader_of_a_failed_scorer_does_not_run_and_neither_does_its_reader() -> None:
    reader, second = Gives(0.5, reads=("correct",)), Gives(0.5, reads=("gate",))
    (rewards,) = await engine(
        scorer("correct", Gives(RuntimeError("down"))),
        scorer("gate", reader),
        scorer("bonus", second),
        scorer("other", Gives(1.0)),
    ).score([item("x")])
    assert (reader.seen, second.seen) == ([], [])
    assert [(r.name, r.outcome) for r in rewards] == [("correct", Outcome.INFRA_FAILURE), ("other", Outcome.OK)]


@pytest.mark.parametrize(
    ("scorers", "message"),
    [
        (
            [("a", Gives(1.0, reads=("b",))), ("b", Gives(1.0, reads=("c",))), ("c", Gives(1.0, reads=("a",)))],
            "read each other's rewards in a circle",
        ),
        ([("a", Gives(1.0, reads=("a",)))], "the scorers of a <- a read each other"),
        (
            [("correct", Gives(1.0)), ("gate", Gives(1.0, reads=("corect",)))],
            r"reads the reward `corect`, which no scorer gives \(did you mean 'correct'\?\); known: correct, gate",
        ),
        ([("a", Gives(1.0)), ("b", Gives(1.0, rewards=("a",)))], "two scorers give a reward called `a`: a@1 and b@1"),
    ],
)
def test_a_graph_that_cannot_run_is_refused(scorers: list[tuple[str, Scorer]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine(*(scorer(name, made) for name, made in scorers))


def test_the_longest_time_of_a_sample_is_that_of_scorers_that_read_each_other() -> None:
    made = engine(scorer("a", Gives(1.0)), scorer("b", Gives(1.0, reads=("a",))), scorer("c", Gives(1.0)))
    assert made.graph.longest_s([2.0, 3.0, 4.0]) == 5.0


class Meets(Scorer):
    """Waits until `num` scorers are in `score` at the same time."""

    def __init__(self, barrier: asyncio.Barrier) -> None:
        self.barrier = barrier

    async def score(self, item: ScoreItem) -> float:
        await self.barrier.wait()
        return 1.0


async def test_scorers_that_do_not_read_each_other_run_at_the_same_time() -> None:
    barrier = asyncio.Barrier(3)
    made = engine(*(scorer(name, Meets(barrier)) for name in "abc"))
    (rewards,) = await made.score([item("x")])
    assert values(rewards) == dict.fromkeys("abc", 1.0)


async def test_only_the_asked_scorers_run_and_those_that_they_read() -> None:
    unasked = Gives(1.0)
    made = engine(scorer("a", Gives(1.0)), scorer("b", unasked), scorer("c", Gives(2.0, reads=("a",))))
    (rewards,) = await made.score([structs.replace(item("x"), scorers=("c",))])
    assert (values(rewards), unasked.seen) == ({"a": 1.0, "c": 2.0}, [])
    with pytest.raises(InvalidInput, match="no scorer gives a reward called 'd'; known: a, b, c"):
        await made.score([structs.replace(item("x"), scorers=("d",))])
    assert made.num_queued == 0


async def test_the_scorers_of_a_task_run_unless_others_are_asked_for() -> None:
    made = engine(scorer("a", Gives(1.0)), scorer("b", Gives(2.0)))
    mine = structs.replace(item("x"), task=TaskView(task_id="t", scorers=("a",)))
    asked, unasked = await made.score([structs.replace(mine, scorers=("b",)), mine])
    assert (values(asked), values(unasked)) == ({"b": 2.0}, {"a": 1.0})


@pytest.mark.parametrize(
    ("of_task", "asked", "first", "runs"),
    [
        (("maths", "correct"), (), 1.0, ("maths",)),
        (("maths", "correct"), ("correct",), 1.0, ("maths",)),
        (("maths", "correct"), ("text", "correct"), 1.0, ("text", "maths")),
        (("correct",), (), 0.0, ("text", "maths")),
        ((), (), 0.0, ("text", "maths")),
    ],
)
async def test_the_first_reward_is_one_that_the_task_names(
    of_task: tuple[str, ...], asked: tuple[str, ...], first: float, runs: tuple[str, ...]
) -> None:
    """The key is 1/2: a scorer of texts, which another source names, must not judge 0.5."""
    givers = {"text": Gives(0.0), "maths": Gives(1.0)}
    made = engine(
        *(scorer(name, giver) for name, giver in givers.items()),
        scorer("correct", SCORERS.make(Extension("first", {"rewards": ["text", "maths"]}))),
    )
    task = TaskView(task_id="t", scorers=of_task)
    (rewards,) = await made.score([structs.replace(item("0.5"), task=task, scorers=asked)])
    assert values(rewards)["correct"] == first
    assert tuple(name for name, giver in givers.items() if giver.seen) == runs


class Ranks(BatchScorer):
    """Gives each sample of a call its place."""

    def __init__(self, sees: Any = "path", results: Any = None) -> None:
        self.sees, self.results = sees, results
        self.calls: list[list[str]] = []

    async def score_batch(self, items: Sequence[ScoreItem]) -> Any:
        self.calls.append([one.sample_id for one in items])
        if isinstance(self.results, Exception):
            raise self.results
        return [float(place) for place in range(len(items))] if self.results is None else self.results


def samples(*names: str) -> list[ScoreItem]:
    """Return samples such as "e0.1" of the episodes before the dot."""
    return [
        structs.replace(made, sample_id=name, key=structs.replace(made.key, episode=name.split(".")[0]))
        for name in names
        for made in [item("x")]
    ]


async def test_a_scorer_of_episodes_gets_all_samples_of_one_in_a_call() -> None:
    ranks = Ranks("episode")
    found = await engine(scorer("rank", ranks)).score(samples("e0.0", "e0.1", "e1.0"))
    assert sorted(ranks.calls) == [["e0.0", "e0.1"], ["e1.0"]]
    assert [values(rewards)["rank"] for rewards in found] == [0.0, 1.0, 0.0]


async def test_samples_of_one_episode_that_are_asked_for_apart_are_not_scored_together() -> None:
    ranks = Ranks("episode")
    first, second = samples("e0.0", "e0.1")
    found = await engine(scorer("rank", ranks)).score([first, structs.replace(second, request=1)])
    assert sorted(ranks.calls) == [["e0.0"], ["e0.1"]]
    assert [values(rewards)["rank"] for rewards in found] == [0.0, 0.0]


async def test_samples_of_several_requests_share_a_call_up_to_its_size() -> None:
    ranks = Ranks()
    made = engine(scorer("rank", ranks, batch_max=2, batch_wait_s=60.0))
    first = asyncio.ensure_future(made.score(samples("e0.0")))
    found = await made.score(samples("e1.0"))
    (call,) = ranks.calls
    assert sorted(call) == ["e0.0", "e1.0"]
    found = [*await first, *found]
    assert [values(rewards)["rank"] for rewards in found] == [call.index(name) for name in ("e0.0", "e1.0")]


async def test_a_call_that_is_not_full_is_sent_after_its_wait() -> None:
    ranks = Ranks()
    await engine(scorer("rank", ranks, batch_max=100, batch_wait_s=0.0)).score(samples("e0.0", "e1.0", "e2.0"))
    assert ranks.calls == [["e0.0", "e1.0", "e2.0"]]


@pytest.mark.parametrize(
    ("results", "causes"),
    [
        (RuntimeError("down"), ["RuntimeError: down"] * 2),
        ([1.0], ["TypeError: `score_batch` must return a list with one result for each of 2 samples, got 1"] * 2),
        (0.5, ["TypeError: `score_batch` must return a list with one result for each of 2 samples, got float"] * 2),
        ([1.0, float("nan")], ["", "ValueError: the scorer returned the value nan"]),
    ],
)
async def test_a_call_that_fails_fails_its_samples_and_a_wrong_result_only_its_own(
    results: Any, causes: list[str]
) -> None:
    found = await engine(scorer("rank", Ranks("episode", results))).score(samples("e0.0", "e0.1"))
    for (reward,), cause in zip(found, causes, strict=True):
        assert reward.outcome is (Outcome.INFRA_FAILURE if cause else Outcome.OK)
        assert reward.evidence.startswith(cause)


async def test_a_call_ends_when_all_that_wait_for_it_are_cancelled() -> None:
    entered, cancelled = asyncio.Event(), asyncio.Event()

    class Hangs(BatchScorer):
        async def score_batch(self, items: Sequence[ScoreItem]) -> list[float]:
            entered.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise
            return []

    made = engine(scorer("mine", Hangs(), batch_max=2, batch_wait_s=60.0))
    first, second = (asyncio.ensure_future(made.score(samples(name))) for name in ("e0.0", "e1.0"))
    await entered.wait()
    first.cancel()
    await asyncio.wait([first])
    assert not cancelled.is_set()
    second.cancel()
    async with asyncio.timeout(5):
        await cancelled.wait()


@pytest.mark.parametrize("base", [Scorer, BatchScorer])
async def test_a_scorer_that_awaits_what_others_have_cancelled_is_an_infra_failure(base: type[Scorer]) -> None:
    class Awaits(base):  # type: ignore[misc, valid-type]
        async def score(self, item: ScoreItem) -> float:
            answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
            answer.cancel()
            return await answer

        async def score_batch(self, items: Sequence[ScoreItem]) -> list[float]:
            return [await self.score(one) for one in items]

    made = engine(scorer("mine", Awaits()), scorer("other", Gives(1.0)))
    async with asyncio.timeout(10):
        (rewards,) = await made.score([item("x")])
    assert [(r.name, r.outcome) for r in rewards] == [("mine", Outcome.INFRA_FAILURE), ("other", Outcome.OK)]
    assert rewards[0].evidence.startswith("CancelledError")


async def test_an_error_that_cannot_be_recorded_ends_the_wait_of_its_samples() -> None:
    class Unreadable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    made = engine(scorer("rank", Ranks(results=Unreadable())), scorer("other", Gives(1.0)))
    with pytest.raises(ExceptionGroup):
        async with asyncio.timeout(10):
            await made.score(samples("e0.0"))


async def test_samples_that_wait_when_the_engine_closes_are_cancelled() -> None:
    entered = asyncio.Event()

    class Enters(Scorer):
        async def score(self, item: ScoreItem) -> float:
            entered.set()
            return 1.0

    made = engine(scorer("rank", Ranks(), batch_max=2, batch_wait_s=60.0), scorer("other", Enters()))
    waiting = asyncio.ensure_future(made.score(samples("e0.0")))
    await entered.wait()
    await made.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_what_a_scorer_says_about_itself_is_checked(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from rollmesh.services.reward.scorer import BatchScorer, Scorer\n"
        "class Word(Scorer):\n    reads = 'correct'\n    async def score(self, item):\n        return 1.0\n"
        "class Group(BatchScorer):\n    sees = 'group'\n    async def score_batch(self, items):\n        return []\n"
    )
    for name, message in (
        ("Word", r"`reads` must be a tuple of names such as \(\"correct\",\), got 'correct'"),
        ("Group", "`sees` must be one of path, episode, got 'group'"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_engine(RewardConfig(scorers=(ScorerConfig(name=f"own.py:{name}"),)), tmp_path)
