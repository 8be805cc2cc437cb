"""The number of ready sessions as a function of the times of opens, by a manual clock."""

from __future__ import annotations

import pytest

from rollmesh.services.sandbox.config import PoolsConfig, SandboxConfig
from rollmesh.services.sandbox.engines.demand import Demand, shares
from rollmesh.shared.clock import ManualClock

HALFLIFE_S = 60.0
MAKE_S = 0.1


class Asked:
    """A demand over a manual clock; creating a session takes MAKE_S."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.demand = Demand(HALFLIFE_S)
        for _ in range(100):
            self.demand.made(MAKE_S)

    def open(self, num: int, *, every_s: float = 0.0) -> None:
        for _ in range(num):
            self.demand.opened(self.clock.monotonic_s())
            self.clock.advance(every_s)

    @property
    def wanted(self) -> int:
        return self.demand.wanted(self.clock.monotonic_s())


def test_without_opens_no_session_is_wanted() -> None:
    assert Asked().wanted == 0


def test_opens_that_the_maker_keeps_up_with_need_one() -> None:
    asked = Asked()
    asked.open(1000, every_s=MAKE_S * 1.01)
    assert asked.wanted == 1


def test_a_burst_needs_as_many_as_came_at_once_and_half_as_many_a_half_life_later() -> None:
    asked = Asked()
    asked.open(8)
    assert asked.wanted == 8
    asked.clock.advance(HALFLIFE_S)
    assert asked.wanted == 4
    asked.clock.advance(4 * HALFLIFE_S)
    assert asked.wanted == 0


def test_bursts_do_not_add_up_when_there_was_time_to_refill_between_them() -> None:
    asked = Asked()
    for _ in range(10):
        asked.open(8)
        asked.clock.advance(8 * MAKE_S * 1.01)
    assert asked.wanted == 8


def test_opens_twice_as_fast_as_the_maker_leave_half_of_them_behind() -> None:
    asked = Asked()
    asked.open(20, every_s=MAKE_S / 2)
    assert asked.wanted == pytest.approx(10, abs=1)


def test_a_slower_maker_needs_more_ahead() -> None:
    slow, fast = Asked(), Asked()
    for _ in range(100):
        slow.demand.made(10 * MAKE_S)
    for asked in (slow, fast):
        asked.open(10, every_s=MAKE_S)
    assert (slow.wanted, fast.wanted) == (9, 1)


def test_shares_take_from_those_that_want_most() -> None:
    assert shares({"a": 9, "b": 2, "c": 0}, 8) == {"a": 6, "b": 2, "c": 0}
    assert shares({"a": 9, "b": 8}, 4) == {"a": 2, "b": 2}
    assert shares({"a": 1, "b": 2}, 8) == {"a": 1, "b": 2}
    assert shares({"a": 3, "b": 1}, 0) == {"a": 0, "b": 0}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"ready_max": -1}, "`ready_max` must be >= 0, got -1"),
        ({"by_profile": {"calc": -1}}, "`by_profile.calc` must be >= 0, got -1"),
        ({"halflife_s": 0.0}, "`halflife_s` must be > 0, got 0"),
        ({"zygote_idle_s": -1.0}, "`zygote_idle_s` must be >= 0, got -1"),
    ],
)
def test_configuration_out_of_range_is_refused(wrong: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        PoolsConfig(**wrong)  # type: ignore[arg-type]


def test_a_pool_of_a_profile_that_is_not_configured_is_refused() -> None:
    with pytest.raises(ValueError, match="`pools.by_profile` must name profiles .*, got 'cobol'"):
        SandboxConfig(pools=PoolsConfig(by_profile={"cobol": 1}))
