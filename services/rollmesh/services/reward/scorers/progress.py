"""Reward each turn of a search by the evidence that it adds: a progress tracker.

    r_t = |documents of turn t that the task needs and no turn before t had| / |documents that the task needs|

So the rewards of the turns sum to the coverage of the evidence, in [0, 1], and a document that is retrieved again earns
nothing. The ids of the needed documents are a field of the line of the task. Those of a turn are the matches of
`id_pattern` in the results of its tools, as the built-in tool `search` writes them.

Source: IM-RAG (2024-05, arXiv:2405.13021). Its tracker scores the similarity of the retrieved and the needed passages;
the formula could not be established, so this one counts documents by id, as the catalog's check does. The reward is not
one of the whole sample, so a run needs another scorer for that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import Scorer, not_applicable
from rollmesh.services.reward.scorers.extract import compile_pattern
from rollmesh.shared.config.settings import NonEmptyStr, Settings
from rollmesh.shared.domain.trajectory import Reward, Source


class ProgressTrackerOptions(Settings):
    """Settings of the progress tracker."""

    field: NonEmptyStr = "evidence"
    """Field of the line of the task file with the ids of the documents that the answer needs, a list of texts."""
    id_pattern: NonEmptyStr = r"(?m)^id: ([^\n]+)$"
    """Regular expression of an id in the result of a tool; its group 1 is the id if it has one."""

    def check_fields(self) -> None:
        compile_pattern("id_pattern", self.id_pattern)


class ProgressScorer(Scorer):
    """See the module. It does not apply to a task without evidence, and to a sample without a turn."""

    Options: ClassVar[type[msgspec.Struct]] = ProgressTrackerOptions
    version = "1"

    def __init__(self, *, options: ProgressTrackerOptions) -> None:
        self._options = options
        self._ids: re.Pattern[str] = compile_pattern("id_pattern", options.id_pattern)

    async def score(self, item: ScoreItem) -> Reward | Sequence[Reward]:
        needed = self._needed(item)
        if not needed or not item.turns:
            return not_applicable("the task has no evidence" if not needed else "the sample has no turn")
        rewards, seen = [], set[str]()
        for turn in item.turns:
            results = [segment.text for segment in turn.observations if segment.source is Source.TOOL]
            found = {document.strip() for result in results for document in self._documents(result)} & needed - seen
            seen |= found
            evidence = f"{len(found)} new of {len(needed)} documents"
            rewards.append(Reward(name="", value=len(found) / len(needed), segment=turn.segment, evidence=evidence))
        return rewards

    def _documents(self, result: str) -> list[str]:
        group = 1 if self._ids.groups else 0
        return [match[group] or "" for match in self._ids.finditer(result)]

    def _needed(self, item: ScoreItem) -> set[str]:
        """Return the ids that the task needs. Raise TypeError if its field is not a list of texts."""
        given = None if item.answer_key is None else item.answer_key.record.get(self._options.field)
        if given is None:
            return set()
        if not isinstance(given, list | tuple) or not all(isinstance(document, str) for document in given):
            raise TypeError(
                f"the field `{self._options.field}` of the task must be a list of ids of documents, got a "
                f"{type(given).__name__}; correct the task or `field`"
            )
        return {document.strip() for document in given}
