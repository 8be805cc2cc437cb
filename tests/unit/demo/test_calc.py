"""The calc family: determinism, levels, disjoint splits, demonstrations."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.demo.families.calc import CalcOptions, CalcSource, demonstrate, make_expression
from rollmesh.services.data.pool import MemoryPool
from rollmesh.services.data.task import Split, split_of
from rollmesh.shared.errors import ConfigError

from .pools import pool_of

SMALL = CalcOptions(num_train=300, num_validation=60, num_test=60)


def prompts(pool: MemoryPool) -> list[str]:
    return [pool.task(i).messages[0].content for i in range(len(pool))]


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 8))
def test_demonstration_reaches_the_answer_python_gives(seed: int, level: int) -> None:
    expression = make_expression(random.Random(seed), level)
    shown = demonstrate(expression)
    assert shown.answer == str(eval(expression))
    assert len(shown.calls) == level
    assert all(result == str(eval(call)) for call, result in shown.calls)
    assert shown.calls[-1][1] == shown.answer


def test_demonstration_of_a_known_expression_is_the_hand_made_one() -> None:
    shown = demonstrate("12*7-90+5")
    assert shown.calls == (("12*7", "84"), ("84-90", "-6"), ("-6+5", "-1"))
    assert shown.answer == "-1"


@pytest.mark.parametrize("text", ["", "1+", "+1", "1+2*3", "1//2", "1 + 2", "1**2", "__import__('os')", "(1+2)"])
def test_demonstration_refuses_what_is_not_an_expression_of_this_task(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        demonstrate(text)


def test_pool_is_the_same_in_every_process_and_longer_pools_extend_it() -> None:
    pool = pool_of(CalcSource, SMALL, Split.TRAIN)
    assert pool.digest == pool_of(CalcSource, SMALL, Split.TRAIN).digest
    longer = CalcOptions(num_train=400, num_validation=60, num_test=60)
    assert prompts(pool_of(CalcSource, longer, Split.TRAIN))[:300] == prompts(pool)
    assert prompts(pool)[:3] == ["39-33", "54-62-60", "76*32-71-53"]


def test_another_seed_gives_other_tasks() -> None:
    other = CalcOptions(seed=1, num_train=300, num_validation=60, num_test=60)
    assert pool_of(CalcSource, SMALL, Split.TRAIN).digest != pool_of(CalcSource, other, Split.TRAIN).digest


def test_splits_are_disjoint_whatever_the_seeds() -> None:
    found: dict[Split, set[str]] = {split: set() for split in Split}
    for seed in range(3):
        for split in Split:
            found[split] |= set(prompts(pool_of(CalcSource, CalcOptions(seed=seed, num_train=400), split)))
    assert not found[Split.TRAIN] & found[Split.TEST]
    assert not found[Split.TRAIN] & found[Split.VALIDATION]
    assert not found[Split.VALIDATION] & found[Split.TEST]
    assert min(len(texts) for texts in found.values()) > 500


def test_split_ranges_have_the_configured_shares() -> None:
    counts = Counter(split_of(str(i), validation_share=0.1, test_share=0.2) for i in range(5000))
    assert counts[Split.TEST] / 5000 == pytest.approx(0.2, abs=0.03)
    assert counts[Split.VALIDATION] / 5000 == pytest.approx(0.1, abs=0.02)


def test_tasks_of_a_split_are_distinct_and_have_their_level() -> None:
    pool = pool_of(CalcSource, SMALL, Split.TRAIN)
    texts = prompts(pool)
    assert len(set(texts)) == len(texts) == 300
    for position, text in enumerate(texts):
        operators = re.findall(r"[-+*]", text)
        assert pool.label(position, "level") == str(len(operators))
        assert "*" not in operators[1:]
        assert all(1 <= int(n) <= 99 for n in re.findall(r"\d+", text))


def test_levels_come_in_the_configured_shares() -> None:
    config = CalcOptions(level_max=3, level_weights=(0.5, 0.25, 0.25), num_train=100, num_validation=0, num_test=0)
    pool = pool_of(CalcSource, config, Split.TRAIN)
    assert Counter(pool.label(i, "level") for i in range(100)) == {"1": 50, "2": 25, "3": 25}


def test_a_level_with_too_few_expressions_is_refused_with_the_remedy() -> None:
    config = CalcOptions(level_max=1, num_train=100_000)
    with pytest.raises(ConfigError, match="level 1 has no further task.*lower num_train"):
        pool_of(CalcSource, config, Split.TRAIN)


def test_a_level_that_the_family_does_not_have_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"`level_max` must be in \[`level_min` = 2, 32\], got 33"):
        CalcSource(options=CalcOptions(level_min=2, level_max=33))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"level_min": 0}, "level_min"),
        ({"level_min": 6}, r"`level_min` must be <= level_max = 5, got 6"),
        ({"level_weights": (1.0,)}, "`level_weights` must have 5 entries"),
        ({"num_train": -1}, "num_train.*-1"),
        ({"validation_share": 0.6, "test_share": 0.5}, "`validation_share` must be < 1 - test_share = 0.5, got 0.6"),
        ({"test_share": 1.0}, "test_share.*1.0"),
    ],
)
def test_settings_out_of_range_name_field_and_value(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CalcOptions(**settings)  # type: ignore[arg-type]
