"""Run one scorer on samples, and check what it returns.

A failure of a scorer is recorded only here. An exception, a timeout, or a return value that is not a reward becomes an
INFRA_FAILURE with the cause as evidence. It is never a reward of 0, because the model did not cause it.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import structs

from rollmesh.services.reward.item import AnswerKey, ScoreItem
from rollmesh.services.reward.metrics import SCORES
from rollmesh.services.reward.scorer import BatchScorer, Scorer, ScorerResult, Sees
from rollmesh.shared.codec.checks import check_reward_names
from rollmesh.shared.config.plugin import overrides
from rollmesh.shared.config.user_code import explain, user_traceback
from rollmesh.shared.domain.reward_range import REWARD_RANGE, in_reward_range
from rollmesh.shared.domain.trajectory import EndpointUse, Outcome, Reward
from rollmesh.shared.endpoints.metering import EndpointMeter, metered
from rollmesh.shared.telemetry.metrics import count

CAUSE_CHARS_MAX = 500
"""Maximum length of the cause of an error of user code."""
ANSWER_CHARS_MIN = 3
ANSWER_CHARS_MAX = 256
"""Maximum length of `Reward.answer`."""
LABEL_CHARS_MAX = 200
"""Maximum length of `Reward.scorer`."""
EVIDENCE_CHARS_MAX = 16_384
"""Maximum length of `Reward.evidence`."""

Uses = dict[str, list[EndpointUse]]
"""What scorers asked of endpoints, by the id of the sample."""


class Scored(NamedTuple):
    """The result for one sample."""

    rewards: tuple[Reward, ...] = ()
    uses: tuple[EndpointUse, ...] = ()
    """What the scorers asked of endpoints."""


def joined(results: Iterable[Scored]) -> Scored:
    """Return the results of several scorers for one sample as one."""
    parts = list(results)
    return Scored(
        tuple(reward for part in parts for reward in part.rewards), tuple(use for part in parts for use in part.uses)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredScorer:
    """A scorer with the name of its reward."""

    name: str
    """Name of its first reward within the run."""
    label: str
    """Scorer and version, as in `Reward.scorer`."""
    scorer: Scorer
    timeout_s: float | None
    """Timeout of a call, in seconds; None for a scorer that limits itself."""
    batch_max: int = 1
    """Maximum number of samples in a call of `score_batch`."""
    batch_wait_s: float = 0.0
    """Maximum wait of a sample for others, in seconds."""

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Return the names of its rewards."""
        return (self.name, *(name for name in self.scorer.rewards if name != self.name))

    @property
    def label_chars_max(self) -> int:
        """Return the maximum length of `Reward.scorer`, which also names the models of endpoints that it asks."""
        return LABEL_CHARS_MAX if overrides(self.scorer, Scorer.use_endpoints) else len(self.label)

    @property
    def sees(self) -> Sees:
        """Return what a call reads: the paths of samples, or all samples of an episode."""
        return self.scorer.sees if isinstance(self.scorer, BatchScorer) else "path"

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the names of the rewards that it reads."""
        return tuple(self.scorer.reads)

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of the per-token arrays that it reads."""
        return tuple(self.scorer.columns)

    @property
    def description(self) -> str:
        """Return the first paragraph of the docstring of the class, or of its module if the class refers to it."""
        cls = type(self.scorer)
        text = (cls.__doc__ or "").strip()
        if not text or text.startswith("See the module."):
            text = (inspect.getdoc(inspect.getmodule(cls)) or "").strip()
        return " ".join(text.split("\n\n")[0].split())


async def run_scorer(configured: ConfiguredScorer, items: Sequence[ScoreItem]) -> list[Scored]:
    """Return the results of one call for its samples, in order. A sample that fails has one INFRA_FAILURE with the
    cause.

    A call that fails as a whole fails all its samples. What it asked of endpoints is counted with its first sample.
    """
    meter = EndpointMeter(f"{items[0].sample_id}/{configured.name}", caller=configured.label)
    limit = asyncio.timeout(configured.timeout_s)
    found = {number: failure for number, item in enumerate(items) if (failure := _without_columns(configured, item))}
    sound = [number for number in range(len(items)) if number not in found]
    try:
        with metered(meter):
            async with limit:
                results = await _results(configured.scorer, [items[number] for number in sound])
        label = _label(configured, meter.uses)
        found |= {n: _rewards(configured, label, result, items[n]) for n, result in zip(sound, results, strict=True)}
    except (Exception, asyncio.CancelledError) as error:  # a user's scorer may raise anything; it is recorded here
        if isinstance(error, asyncio.CancelledError) and _is_cancelled():
            raise
        late = isinstance(error, TimeoutError) and limit.expired()
        waited = f"; it awaited endpoint `{meter.cut}`" if meter.cut else ""
        cause = f"no result within {configured.timeout_s} s{waited}" if late else explain(error)
        traceback = user_traceback(error)
        found |= {n: (_failure(configured, cause, traceback, items[n].answer_key),) for n in sound}
    for rewards in found.values():
        failed = any(reward.outcome is Outcome.INFRA_FAILURE for reward in rewards)
        count(SCORES, configured.label, "failed" if failed else "ok")
    return [Scored(found[n], meter.uses if n == 0 else ()) for n in range(len(items))]


def _is_cancelled() -> bool:
    """Return whether the caller has cancelled the call. A scorer may also await what others have cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _results(scorer: Scorer, items: Sequence[ScoreItem]) -> Sequence[ScorerResult]:
    """Call the scorer. Raise TypeError if it does not return one result for each sample."""
    if not items:
        return []
    if not isinstance(scorer, BatchScorer):
        return [await scorer.score(item) for item in items]
    results = await scorer.score_batch(items)
    if not isinstance(results, Sequence) or isinstance(results, str) or len(results) != len(items):
        got = len(results) if isinstance(results, Sequence) else type(results).__name__
        raise TypeError(f"`score_batch` must return a list with one result for each of {len(items)} samples, got {got}")
    return results


def _label(configured: ConfiguredScorer, uses: Sequence[EndpointUse]) -> str:
    """Return the scorer and its version, with the models of the endpoints that judged."""
    judges = [f"{use.endpoint}:{use.model}" for use in uses if use.calls]
    return "+".join([configured.label, *judges])[:LABEL_CHARS_MAX]


def _rewards(configured: ConfiguredScorer, label: str, result: ScorerResult, item: ScoreItem) -> tuple[Reward, ...]:
    try:
        return _checked(configured, label, result)
    except (TypeError, ValueError) as error:
        return (_failure(configured, explain(error), user_traceback(error), item.answer_key),)


def _without_columns(configured: ConfiguredScorer, item: ScoreItem) -> tuple[Reward, ...]:
    """Return the failure of a sample that lacks an array that the scorer reads, so that it names the key and not only
    the array; nothing if it has all."""
    sampled = [segment for segment in item.path if segment.sampled and segment.token_ids.size]
    missing = [name for name in configured.columns if not sampled or any(name not in s.arrays for s in sampled)]
    if not missing:
        return ()
    what = (
        "has no sampled tokens"
        if not sampled
        else f"has no array {', '.join(missing)}; list its output in `rollout.outputs`"
    )
    error = ValueError(f"the scorer reads the columns [{', '.join(configured.columns)}], but the sample {what}")
    return (_failure(configured, explain(error), "", item.answer_key),)


def _checked(configured: ConfiguredScorer, label: str, result: ScorerResult) -> tuple[Reward, ...]:
    if isinstance(result, (int, float)):
        result = Reward(name="", value=float(result))
    rewards = [result] if isinstance(result, Reward) else list(result)
    if not rewards:
        raise TypeError("the scorer returned no reward")
    named = tuple(_named(configured, label, reward) for reward in rewards)
    keys = [(reward.name, reward.segment) for reward in named]
    if len(set(keys)) != len(keys):
        raise ValueError(f"the scorer returned two rewards of one name for one segment: {keys}")
    check_reward_names(named)
    return named


def _named(configured: ConfiguredScorer, label: str, reward: object) -> Reward:
    if not isinstance(reward, Reward):
        raise TypeError(
            f"the scorer returned a {type(reward).__name__}, expected a number, a Reward or a list of Rewards"
        )
    if reward.outcome is Outcome.OK and not in_reward_range(reward.value):
        raise ValueError(f"the scorer returned the value {reward.value}, {REWARD_RANGE}")
    answer = reward.answer[:ANSWER_CHARS_MAX]
    return structs.replace(
        reward,
        name=reward.name or configured.name,
        scorer=label,
        answer=answer,
        evidence=reward.evidence[:EVIDENCE_CHARS_MAX],
    )


def _without(answer: str, message: str) -> str:
    """Return the message with "[answer key]" where the answer stands between word boundaries.

    An answer of less than `ANSWER_CHARS_MIN` characters is replaced only between quotes. It may also be a word of the
    message itself, whose removal would reveal it.
    """
    if len(answer) < ANSWER_CHARS_MIN:
        pattern = rf"(?<=(['\"`])){re.escape(answer)}(?=\1)"
    else:
        pattern = rf"(?<!\w){re.escape(answer)}(?!\w)"
    return re.sub(pattern, "[answer key]", message) if answer else message


def _failure(configured: ConfiguredScorer, cause: str, traceback: str, key: AnswerKey | None) -> Reward:
    """Return the failure. The evidence is a line with the cause, then the traceback, which has lines of code but no
    values."""
    # Messages of exceptions quote values, which may contain the answer. The kind of the error never does: failures are
    # counted by it.
    kind, colon, message = cause.partition(": ")
    for answer in sorted(key.answers, key=len, reverse=True) if key else ():
        message = _without(answer, message)
    cause = f"{kind}{colon}{message}"
    return Reward(
        name=configured.name,
        value=0.0,
        scorer=configured.label,
        evidence="\n".join([" ".join(cause.splitlines())[:CAUSE_CHARS_MAX], *([traceback] if traceback else [])]),
        outcome=Outcome.INFRA_FAILURE,
    )
