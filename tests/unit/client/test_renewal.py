"""Renewing one lease: when, and what is noticed."""

from __future__ import annotations

import pytest

from rollmesh.client.renewal import Renewal
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.errors import LeaseExpired


class Coordinator:
    """The one verb a renewal uses: grants `terms_s` in turn, then says that the lease has expired."""

    def __init__(self, clock: ManualClock, *terms_s: float) -> None:
        self.times_s: list[float] = []
        self._clock = clock
        self._terms_s = list(terms_s)

    async def renew(self, lease_id: str) -> float:
        assert lease_id == "b1"
        self.times_s.append(self._clock.monotonic_s())
        if not self._terms_s:
            raise LeaseExpired("too late")
        return self._terms_s.pop(0)


def renewal(clock: ManualClock, *terms_s: float) -> tuple[Renewal, Coordinator]:
    coordinator = Coordinator(clock, *terms_s)
    return Renewal(coordinator.renew, "b1", lease_s=30.0, clock=clock), coordinator


async def test_a_lease_is_renewed_every_third_of_the_term_last_granted() -> None:
    clock = ManualClock()
    keeping, coordinator = renewal(clock, 30.0, 60.0, 60.0)
    async with keeping:
        await clock.run_for(45.0)
        keeping.check()
    assert coordinator.times_s == [10.0, 20.0, 40.0]
    await clock.run_for(100.0)
    assert len(coordinator.times_s) == 3, "nothing is renewed after leaving"


async def test_a_lost_lease_is_an_error_for_the_caller_that_checks_and_is_not_renewed_again() -> None:
    clock = ManualClock()
    keeping, coordinator = renewal(clock, 30.0)
    async with keeping:
        await clock.run_for(15.0)
        keeping.check()
        await clock.run_for(60.0)
        with pytest.raises(LeaseExpired):
            keeping.check()
    assert coordinator.times_s == [10.0, 20.0]
