"""Quality, diversity and complexity of exported samples: three numbers per data set.

The survey of Havrilla et al. (2024-12, arXiv:2412.02980) describes generated data by these three: quality drives
generalization within the distribution, diversity outside of it, complexity both, and they trade off, so all three are
reported together. It lists measures of each and prescribes none. Here, over the n samples of a data set, with the text
of a sample that of its assistant messages:

    quality      mean of a reward, by default `reward.correct`              a measure of ground truth, if the scorer is one
    diversity    1 - mean over pairs i < j of cos(z_i, z_j)                 self-similarity; 0 if all texts are equal
    complexity   mean of the bytes of the text after compression (zlib)     long, and not repetitive

z counts the pairs of neighboring words in lower case, hashed to `BUCKETS`; a text with one word has the word. The mean
over all pairs is exact and needs one pass: with unit vectors z, it is (|sum z|^2 - n) / (n (n - 1)). Unlike a share of
distinct n-grams, it does not fall with the number of samples. A collision of hashes makes two texts more similar, at
random 1 / `BUCKETS` per pair of words. Samples without text are not counted; a data set of one sample has no diversity,
and one without the reward no quality.
"""  # noqa: E501, W505

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollmesh.app.lake.query import SampleTables, opened
from rollmesh.shared.errors import InvalidInput

BUCKETS = 1 << 16
DATA_SETS_MAX = 256
"""Most data sets of a call. Each has half a MiB."""
QUALITY = "reward.correct"
_WORD = re.compile(r"[^\W_]+")


class Composition(msgspec.Struct, frozen=True, kw_only=True):
    """One data set."""

    data_set: str
    num_samples: int
    """Samples with a text."""
    quality: float | None
    diversity: float | None
    complexity: float


@dataclass(slots=True)
class _Sums:
    num: int = 0
    qualities: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Sum and number."""
    direction: NDArray[np.float64] = field(default_factory=lambda: np.zeros(BUCKETS))
    """Sum of unit vectors."""
    num_bytes: int = 0

    def add(self, text: str, quality: float | None) -> None:
        self.num += 1
        if quality is not None:
            self.qualities[0] += quality
            self.qualities[1] += 1
        counts = hashed_pairs(text)
        numbers = np.array(list(counts.values()), dtype=np.float64)
        self.direction[list(counts)] += numbers / np.linalg.norm(numbers)
        self.num_bytes += len(zlib.compress(text.encode("utf-8", "surrogatepass")))

    def composition(self, data_set: str) -> Composition:
        total, scored = self.qualities
        pairs = self.num * (self.num - 1)
        similarity = (float(self.direction @ self.direction) - self.num) / pairs if pairs else None
        return Composition(
            data_set=data_set,
            num_samples=self.num,
            quality=total / scored if scored else None,
            diversity=None if similarity is None else min(1.0, max(0.0, 1.0 - similarity)),
            complexity=self.num_bytes / self.num,
        )


def compositions(folder: Path, *, by: str = "run", quality: str = QUALITY, where: str = "") -> list[Composition]:
    """Return the composition of each data set of a folder with exported samples, in the order of their names.

    `by`, `quality` and `where` are SQL expressions over `samples`: what distinguishes data sets, the value of a sample,
    and a condition. Samples of evaluations are omitted unless the condition names `purpose`. Raise ConfigError, and
    InvalidInput for a wrong expression and for too many data sets.
    """
    found: dict[str, _Sums] = {}
    with opened(folder) as tables:
        for data_set, value, text in _samples(tables, by, quality, where):
            if data_set not in found and len(found) == DATA_SETS_MAX:
                raise InvalidInput(f"--by {by}: must have at most {DATA_SETS_MAX} values; choose another expression")
            found.setdefault(data_set, _Sums()).add(text, value)
    return [found[name].composition(name) for name in sorted(found)]


def _samples(tables: SampleTables, by: str, quality: str, where: str) -> Iterator[tuple[str, float | None, str]]:
    conditions = ["stored", "true" if re.search(r"\bpurpose\b", where, re.IGNORECASE) else "purpose <> 'eval'"]
    conditions += [f"(\n{where}\n)"] if where else []
    columns = f"CAST((\n{by}\n) AS VARCHAR), CAST((\n{quality}\n) AS DOUBLE), messages"
    result = tables.query(f"SELECT {columns} FROM samples WHERE {' AND '.join(conditions)}")
    for data_set, value, messages in result.rows:
        if text := text_of(messages or ()):
            yield ("" if data_set is None else data_set), value, text


def text_of(messages: Sequence[dict[str, Any]]) -> str:
    """Return the text that the model wrote, one message per line; empty for white space alone."""
    return "\n".join(one["content"] for one in messages if one["role"] == "assistant").strip()


def hashed_pairs(text: str) -> Counter[int]:
    """Return bucket -> number of the pairs of neighboring words of a text that is not empty."""
    words = _WORD.findall(text.lower()) or [text]
    pairs = [" ".join(pair) for pair in pairwise(words)] or words
    return Counter(zlib.crc32(pair.encode("utf-8", "surrogatepass")) % BUCKETS for pair in pairs)
