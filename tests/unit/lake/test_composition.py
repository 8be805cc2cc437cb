"""Quality, diversity and complexity of data sets, against values by hand."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rollmesh.app.lake.composition import DATA_SETS_MAX, compositions, hashed_pairs
from rollmesh.app.lake.rows import SCHEMA
from rollmesh.cli.__main__ import app
from rollmesh.shared.errors import ConfigError, InvalidInput


def sample(number: int, text: str, correct: float | None, source: str = "a", purpose: str = "train") -> dict[str, Any]:
    rewards = [] if correct is None else [("correct", correct)]
    return {
        "sample_id": str(number),
        "purpose": purpose,
        "labels": {"source": source},
        "rewards": [{"name": name, "value": value, "outcome": "ok", "segment": -1} for name, value in rewards],
        "stored": True,
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}],
    }


def lake(folder: Path, samples: Sequence[dict[str, Any]], update: int = 1) -> Path:
    """Write exported samples of the run `r`, and return the folder."""
    path = folder / f"run=r/update={update}"
    path.mkdir(parents=True)
    rows = [{name: one.get(name) for name in SCHEMA.names} for one in samples]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path / "part-0.parquet")
    return folder


TEXTS = ("one two three", "one two four", "five six seven")


@pytest.mark.row("S177")
def test_the_three_columns_of_each_data_set_by_hand(tmp_path: Path) -> None:
    """Pairs of words of the texts of a: {one two, two three}, {one two, two four}, {five six, six seven}. The first two
    have the cosine 1/2 and the others 0, so the mean over three pairs is 1/6."""
    samples = [sample(n, text, float(n == 0)) for n, text in enumerate(TEXTS)]
    samples += [sample(n, "same words here", 1.0, source="b") for n in range(3, 6)]
    a, b = compositions(lake(tmp_path, samples), by="labels['source']")
    assert (a.data_set, a.num_samples) == ("a", 3)
    assert a.quality == pytest.approx(1 / 3)
    assert a.diversity == pytest.approx(1 - 1 / 6)
    assert a.complexity == pytest.approx(sum(len(zlib.compress(text.encode())) for text in TEXTS) / 3)
    assert (b.data_set, b.quality) == ("b", 1.0)
    assert b.diversity == pytest.approx(0.0, abs=1e-9)


def test_the_diversity_is_the_mean_over_all_pairs_and_does_not_fall_with_their_number(tmp_path: Path) -> None:
    texts = [f"the word {n % 7} and the word {n * n % 11}, then" for n in range(20)]
    vectors = [hashed_pairs(text) for text in texts]

    def cosine(i: int, j: int) -> float:
        dot = sum(vectors[i][key] * vectors[j][key] for key in vectors[i])
        norms = [sum(value**2 for value in vectors[n].values()) ** 0.5 for n in (i, j)]
        return float(dot / norms[0] / norms[1])

    pairs = list(combinations(range(20), 2))
    expected = 1 - sum(cosine(i, j) for i, j in pairs) / len(pairs)
    (found,) = compositions(lake(tmp_path / "x", [sample(n, text, None) for n, text in enumerate(texts)]))
    assert found.diversity == pytest.approx(expected)
    assert (found.data_set, found.quality) == ("r", None)
    short = [sample(n, text * 1, None) for n, text in enumerate(texts[:10])]
    (half,) = compositions(lake(tmp_path / "y", short))
    assert half.diversity is not None
    assert abs(half.diversity - expected) < 0.15


def test_repetitive_text_is_less_complex_than_text_of_the_same_length(tmp_path: Path) -> None:
    varied = " ".join(f"{n * 7919 % 9973}" for n in range(60))
    samples = [sample(0, varied, None, "varied"), sample(1, ("12 " * 200)[: len(varied)], None, "repeated")]
    repeated, other = compositions(lake(tmp_path, samples), by="labels['source']")
    assert repeated.complexity < 0.5 * other.complexity
    assert repeated.diversity is None, "one sample has no pair"


def test_evaluations_and_empty_texts_are_omitted_and_conditions_choose(tmp_path: Path) -> None:
    samples = [
        sample(0, "a b", 1.0),
        sample(1, " \n", 1.0),
        sample(2, "c d", 0.0, purpose="eval"),
        sample(3, "e f", 0.0),
        {**sample(4, "g h", 0.0), "stored": False},
    ]
    folder = lake(tmp_path, samples)
    assert [one.num_samples for one in compositions(folder)] == [2]
    assert [one.num_samples for one in compositions(folder, where="reward.correct >= 1 -- right ones")] == [1]
    assert [one.num_samples for one in compositions(folder, where="purpose = 'eval'")] == [1]
    assert [one.quality for one in compositions(folder, quality="2 * reward.correct")] == [1.0]
    assert hashed_pairs("?!") == hashed_pairs("?!"), "a text without a word"


def test_wrong_expressions_and_too_many_data_sets_are_named(tmp_path: Path) -> None:
    folder = lake(tmp_path, [sample(n, f"text {n}", 1.0) for n in range(DATA_SETS_MAX + 1)])
    with pytest.raises(InvalidInput, match=f"--by sample_id: must have at most {DATA_SETS_MAX} values"):
        compositions(folder, by="sample_id")
    with pytest.raises(InvalidInput, match="SQL: .*nothing"):
        compositions(folder, quality="reward.nothing")
    with pytest.raises(ConfigError, match="has no exported samples"):
        compositions(tmp_path / "none")


@pytest.mark.row("S177")
def test_the_command_prints_the_three_columns_together(tmp_path: Path) -> None:
    folder = lake(tmp_path, [sample(n, text, 1.0) for n, text in enumerate(TEXTS)])
    lake(folder, [sample(9, "one two", 0.0)], update=2)
    shown = CliRunner().invoke(app, ["composition", str(folder), "--by", "update"])
    assert shown.exit_code == 0, shown.output
    header, first, second = shown.stdout.splitlines()
    assert header.split() == ["data", "set", "samples", "quality", "diversity", "complexity"]
    assert first.split()[:4] == ["1", "3", "1.000", "0.833"]
    assert second.split()[:3] == ["2", "1", "0.000"]
    found = json.loads(CliRunner().invoke(app, ["composition", str(folder), "--json"]).stdout)
    assert [sorted(one) for one in found] == [["complexity", "data_set", "diversity", "num_samples", "quality"]]
