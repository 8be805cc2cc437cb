"""Settings: ranges hold however a struct is made, every range error has one form, and fields say whether they may
change."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta

from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.settings import (
    FIXED,
    LIVE,
    NonEmptyStr,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Settings,
    Share,
    may_change,
)
from rollmesh.shared.errors import ConfigError


class Inner(Settings):
    share: Share = 0.5
    frozen: Annotated[int, FIXED] = 0


class Outer(Settings):
    count: Annotated[PositiveInt, LIVE] = 1
    wait_s: Annotated[float, Meta(gt=0, le=60)] = 1.0
    name: Annotated[str, Meta(pattern="^[a-z]{1,3}$")] = "a"
    paths: tuple[NonEmptyStr, ...] = ()
    rates: dict[str, PositiveFloat] = {}
    pair: tuple[NonNegativeFloat, NonNegativeFloat] = (0.0, 0.0)
    maybe: PositiveInt | None = None
    inner: Inner = Inner()
    live: Annotated[Inner, LIVE] = Inner()
    low: float = 0.0
    high: float = 1.0

    def check_fields(self) -> None:
        if self.low > self.high:
            raise ValueError(f"`low` must be <= high = {self.high}, got {self.low}")


WRONG = [
    ({"count": 0}, "`count` must be >= 1, got 0"),
    ({"wait_s": 90}, "`wait_s` must be in (0, 60], got 90"),
    ({"wait_s": float("nan")}, "`wait_s` must be in (0, 60], got nan"),
    ({"name": "ABC"}, "`name` must match ^[a-z]{1,3}$, got 'ABC'"),
    ({"rates": {"x": -1.0}}, "`rates.x` must be > 0, got -1.0"),
    ({"rates": {"x": float("inf")}}, "`rates.x` must be finite, got inf"),
    ({"pair": (0.0, -2.0)}, "`pair[1]` must be >= 0, got -2.0"),
    ({"maybe": 0}, "`maybe` must be >= 1, got 0"),
    ({"low": 2.0}, "`low` must be <= high = 1.0, got 2.0"),
    ({"low": float("nan")}, "`low` must be finite, got nan"),
    ({"paths": ("",)}, "`paths[0]` must not be empty, got ''"),
]


@pytest.mark.parametrize(("values", "message"), WRONG, ids=str)
def test_a_value_out_of_range_is_rejected_with_one_form(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=".") as made:
        Outer(**values)
    assert str(made.value) == message
    with pytest.raises(ConfigError) as read:
        config_from_dict(Outer, values)
    assert str(read.value) == f"configuration: {message}"
    with pytest.raises(ValueError, match=".") as replaced:
        msgspec.structs.replace(Outer(), **values)
    assert str(replaced.value) == message


def test_values_on_the_bounds_and_absent_ones_are_accepted() -> None:
    outer = Outer(count=1, wait_s=60.0, maybe=None, low=1.0, high=1.0, inner=Inner(share=1.0))
    assert (outer.wait_s, outer.maybe, outer.inner.share) == (60.0, None, 1.0)


def test_subclasses_are_frozen_keyword_only_and_strict() -> None:
    outer: Any = Outer()
    with pytest.raises(AttributeError, match="immutable"):
        outer.count = 2
    with pytest.raises(TypeError):
        outer.__class__(1)
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"other": 1}, Outer)


@pytest.mark.parametrize(
    ("key", "may"),
    [
        ("count", True),
        ("wait_s", False),
        ("inner.share", False),
        ("live.share", True),
        ("live.frozen", False),
        ("live.unknown", True),
        ("unknown", False),
    ],
)
def test_the_innermost_mark_decides_whether_a_key_may_change(key: str, may: bool) -> None:
    assert may_change(Outer, key) is may
