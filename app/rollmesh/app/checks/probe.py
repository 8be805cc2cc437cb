"""`rollmesh check --probe`: score answers that solve nothing, and list the tasks that pay them.

Two adversaries (`tricks`) answer a sample of the training tasks. A task pays an answer if the weighted sum of its
rewards (`reward.weights`) is above that of no work, 0, and at least half of what the task pays for its own answer key,
or of the positive weights if the key has no answer. Answers that are the same for every task, such as `0` or `B`, are
right for some tasks by chance; they are listed if they are right for at least half of the tasks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from rollmesh.app.checks.scorers_alone import check_scorers
from rollmesh.app.checks.tricks import CONSTANT, FRAMES, NOTHING, answers_of
from rollmesh.app.config import TrainConfig
from rollmesh.mesh.mesh_services import blocking_endpoints, reward_config
from rollmesh.services.data.config import build_pools
from rollmesh.services.data.task import PoolTask, Split
from rollmesh.services.reward.config import build_engine
from rollmesh.services.reward.engine import RewardEngine
from rollmesh.services.reward.item import AnswerKey, ScoreItem, TaskView
from rollmesh.shared.domain.trajectory import WHOLE_SAMPLE, EpisodeKey, Message, Outcome, Reward
from rollmesh.shared.endpoints.client import Endpoints
from rollmesh.trainer.estimators.base import weight_of

CONSTANT_SHARE_MIN = 0.5
"""Share of the tasks for which a constant answer has to be right to be listed."""
PAID_SHARE = 0.5
"""Share of the reward of a right answer from which an answer is paid."""
TASKS_MIN_CONSTANT = 4
"""Least number of probed tasks with which constant answers are judged."""
ALL_TASKS = "*"
"""Stands for the task of an answer that many tasks pay."""
ANSWER_CHARS = 60
"""Characters of an answer that are shown."""


class PaidAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that solves nothing, and that a task pays."""

    task: str
    """Id of the task; `*` for an answer that many tasks pay."""
    kind: str
    """The trick."""
    answer: str
    """The beginning of the text."""
    reward: float
    """The weighted sum of its rewards; for `*` the share of the tasks that pay it."""


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a probe."""

    num_tasks: int
    num_answers: int
    """Number of scored answers, for all tasks."""
    paid: list[PaidAnswer]
    """The best paid answer of each task and kind."""
    failed: dict[str, int]
    """Cause of a scorer that failed -> number of answers. Their rewards are unknown."""
    key_unpaid: list[str]
    """Tasks that do not pay the first answer of their key in any of the usual forms."""


def probe(
    config: TrainConfig, base_dir: Path, *, num_tasks: int, on_task: Callable[[int, int], None] = lambda done, of: None
) -> ProbeReport:
    """Probe tasks that are spread evenly over the training split. Raise MeshError for tasks or scorers that cannot be
    used."""
    pool = build_pools(config.data, base_dir, blocking_endpoints(config, base_dir))[Split.TRAIN]
    size = min(num_tasks, len(pool))
    tasks = [pool.task(number * len(pool) // size) for number in range(size)]
    endpoints = Endpoints(config.endpoints, base_dir=base_dir)
    engine = build_engine(reward_config(config), base_dir, endpoints=endpoints)
    check_scorers(engine)
    return asyncio.run(_probe(tasks, engine, endpoints, config, on_task))


async def _probe(
    tasks: Sequence[PoolTask],
    engine: RewardEngine,
    endpoints: Endpoints,
    config: TrainConfig,
    on_task: Callable[[int, int], None],
) -> ProbeReport:
    probing = _Probing(engine, config)
    try:
        for number, task in enumerate(tasks):
            on_task(number, len(tasks))
            await probing.try_on(task)
    finally:
        await engine.close()
        await endpoints.close()
    return probing.report()


class _Probing:
    """A probe in progress."""

    def __init__(self, engine: RewardEngine, config: TrainConfig) -> None:
        self._engine = engine
        self._weights = config.reward.weights
        self._batch = config.reward.queue_samples_max
        self._num_tasks = self._num_answers = 0
        self._paid: list[PaidAnswer] = []
        self._constants: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._key_unpaid: list[str] = []

    async def try_on(self, task: PoolTask) -> None:
        """Score all answers to one task."""
        key = self._engine.oracles.resolve(task.oracle_ref)
        has_answer = key is not None and key.answers and not key.tests
        right = [frame.format(key.answers[0]) for frame in FRAMES] if key and has_answer else []
        tried = [(kind, text) for kind, text in answers_of(task) if kind == CONSTANT or text not in right]
        items = [_item(task, key, text, place) for place, text in enumerate([*right, *(text for _, text in tried)])]
        sums: list[float | None] = []
        for start in range(0, len(items), self._batch):
            sums += map(self._sum, await self._engine.score(items[start : start + self._batch]))
        best_right = max((value for value in sums[: len(right)] if value is not None), default=0.0)
        if best_right <= 0:
            if any(value is not None for value in sums[: len(right)]):
                self._key_unpaid.append(task.task_id)
            chosen = self._engine.graph.chosen(task.scorers, task.scorers)
            scorers = [self._engine.scorers[number] for number in chosen]
            names = [name for scorer in scorers for name in scorer.reward_names]
            best_right = sum(max(0.0, weight_of(name, self._weights)) for name in names)
        best: dict[str, PaidAnswer] = {}
        for (kind, text), value in zip(tried, sums[len(right) :], strict=True):
            if value is None or value <= 0 or value < PAID_SHARE * best_right:
                continue
            if kind == CONSTANT:
                self._constants[text] += 1
            elif kind not in best or value > best[kind].reward:
                best[kind] = PaidAnswer(task=task.task_id, kind=kind, answer=_shown(text), reward=value)
        self._paid += best.values()
        self._num_tasks += 1
        self._num_answers += len(tried)

    def report(self) -> ProbeReport:
        least = CONSTANT_SHARE_MIN * max(self._num_tasks, TASKS_MIN_CONSTANT)
        constants = [
            PaidAnswer(task=ALL_TASKS, kind=CONSTANT, answer=text, reward=num / self._num_tasks)
            for text, num in self._constants.items()
            if num >= least
        ]
        return ProbeReport(
            num_tasks=self._num_tasks,
            num_answers=self._num_answers,
            paid=[*constants, *self._paid],
            failed=dict(self._failed),
            key_unpaid=self._key_unpaid,
        )

    def _sum(self, rewards: Sequence[Reward]) -> float | None:
        """Return the weighted sum of the rewards of the whole sample; None if a scorer failed, which is counted."""
        for reward in rewards:
            if reward.outcome is Outcome.INFRA_FAILURE:
                self._failed[f"{reward.name}: {(reward.evidence or 'failed').splitlines()[0]}"] += 1
                return None
        whole = [one for one in rewards if one.segment == WHOLE_SAMPLE and one.outcome is Outcome.OK]
        return sum(weight_of(one.name, self._weights) * one.value for one in whole)


def report_lines(report: ProbeReport) -> list[str]:
    """Return the result as text, one line per finding."""
    constants = [one for one in report.paid if one.task == ALL_TASKS]
    of_tasks = [one for one in report.paid if one.task != ALL_TASKS]
    nothing = {one.task for one in of_tasks if one.kind == NOTHING}
    tricked = {one.task for one in of_tasks} - nothing
    summary = (
        f"{report.num_answers} answers that solve nothing, to {report.num_tasks} tasks: {len(nothing)} tasks pay for "
        f"no answer, and {len(tricked)} others for a trick"
    )
    found = [summary]
    if constants:
        best = max(constants, key=lambda one: one.reward)
        found.append(
            f"{len(constants)} answers that are the same for every task are paid by {CONSTANT_SHARE_MIN:.0%} of the "
            f"tasks or more; {best.reward:.0%} of the tasks pay for the answer {best.answer!r}"
        )
    found += [f"task {one.task} pays {one.reward:g} for the answer {one.answer!r} ({one.kind})" for one in of_tasks]
    for task in report.key_unpaid:
        found.append(
            f"task {task} does not pay the first answer of its key; compare its form with what the scorer looks for"
        )
    found += [f"{num} answers have no reward: {cause}" for cause, num in report.failed.items()]
    return [f"probe: {line}" for line in found]


def _item(task: PoolTask, key: AnswerKey | None, text: str, place: int) -> ScoreItem:
    name = f"{task.task_id}.{place}"
    return ScoreItem(
        key=EpisodeKey(run="probe", task=task.task_id, group=task.task_id, episode=name),
        task=TaskView(
            task_id=task.task_id,
            messages=task.messages,
            tools=task.tools,
            split=task.split,
            labels=task.labels,
            scorers=task.scorers,
            extras=task.extras,
        ),
        answer_key=key,
        messages=(*task.messages, Message(role="assistant", content=text)),
        sample_id=name,
    )


def _shown(text: str) -> str:
    return text if len(text) <= ANSWER_CHARS else f"{text[:ANSWER_CHARS]}... ({len(text)} characters)"
