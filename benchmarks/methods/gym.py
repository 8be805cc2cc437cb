"""The task `gym` of `python -m benchmarks methods`: `chain_sum` of reasoning-gym, with its own verifier.

reasoning-gym is not a dependency of rollmesh. Install it to run this task: `pip install reasoning-gym==0.1.25`.
"""

from __future__ import annotations

import random
from functools import cache
from importlib import metadata
from typing import Any, ClassVar

import msgspec

from rollmesh.demo.families.calc import CalcOptions, demonstrate
from rollmesh.services.data.generated import Demonstration, GeneratedOptions, GeneratedSource
from rollmesh.services.data.task import Split, split_of
from rollmesh.services.reward.item import AnswerKey, ScoreItem
from rollmesh.services.reward.oracles import Oracle
from rollmesh.services.reward.scorer import Scorer
from rollmesh.services.reward.scorers.extract import AnswerOptions, Extractor
from rollmesh.shared.errors import ConfigError, UnknownOracle

PINNED = "0.1.25"
"""Version of reasoning-gym of the published figures. Tasks of another version may differ."""
HARDEST = 5
NUM_ENTRIES = 1_000_000
"""Entries of a level, from which keys are drawn."""


@cache
def chain_sum(level: int) -> Any:
    """Return the data set of reasoning-gym whose entries have `level` + 1 numbers of at most two digits. Raise
    ConfigError."""
    try:
        found = metadata.version("reasoning-gym")
    except metadata.PackageNotFoundError:
        found = "none"
    if found != PINNED:
        raise ConfigError(
            f"the task `gym` needs reasoning-gym {PINNED}, found {found}; run `pip install reasoning-gym=={PINNED}`"
        )
    from reasoning_gym import create_dataset

    return create_dataset("chain_sum", min_terms=level + 1, max_terms=level + 1, max_digits=2, seed=0, size=NUM_ENTRIES)


def entry_of(key: str) -> Any:
    """Return the entry of a key `level/index`."""
    level, _, index = key.partition("/")
    return chain_sum(int(level))[int(index)]


class ChainSumSource(GeneratedSource):
    """Key is `level/index` of an entry, and prompt its question. A level is a number of operators."""

    name = "chain_sum"
    hardest_level = HARDEST
    Options: ClassVar[type[GeneratedOptions]] = CalcOptions

    def make(self, rng: random.Random, level: int) -> str:
        return f"{level}/{rng.randrange(NUM_ENTRIES)}"

    def prompt(self, key: str) -> str:
        question: str = entry_of(key)["question"]
        return question

    def demonstration(self, key: str) -> Demonstration:
        return demonstrate(entry_of(key)["metadata"]["expression"].replace(" ", ""))

    def split(self, key: str) -> Split:
        """Return the split of the question, because several entries may have the same one."""
        options = self.options
        return split_of(self.prompt(key), validation_share=options.validation_share, test_share=options.test_share)


class ChainSumOracle(Oracle):
    """The answer key is the whole entry, as the verifier reads it."""

    def resolve(self, rest: str) -> AnswerKey:
        level, _, index = rest.partition("/")
        if not (level.isdecimal() and index.isdecimal() and 1 <= int(level) <= HARDEST and int(index) < NUM_ENTRIES):
            raise UnknownOracle(f"oracle `chain_sum` must get level/index, got {rest!r}", oracle_ref=rest)
        entry = entry_of(rest)
        return AnswerKey(answers=(entry["answer"],), record=entry)


class ChainSumScorer(Scorer):
    """The verifier of reasoning-gym on the extracted answer."""

    Options: ClassVar[type[msgspec.Struct]] = AnswerOptions

    def __init__(self, *, options: AnswerOptions) -> None:
        self._extractor = Extractor(options)

    async def score(self, item: ScoreItem) -> float:
        assert item.answer_key is not None
        entry = item.answer_key.record
        return float(chain_sum(1).score_answer(self._extractor.find(item), entry))
