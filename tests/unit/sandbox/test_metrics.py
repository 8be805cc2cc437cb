"""Metrics of commands: outcome, time in the jail, and sessions ended for a limit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollmesh.services.sandbox.engine import RunOutcome, RunResult
from rollmesh.services.sandbox.metrics import COMMAND_SECONDS, COMMANDS, KILLS, note_result
from rollmesh.shared.telemetry import metrics
from rollmesh.shared.telemetry.metrics import Metric


class Noted:
    """A meter that records its input."""

    def __init__(self) -> None:
        self.events: list[tuple[Metric, tuple[str, ...], float]] = []

    def count(self, metric: Metric, node: str, labels: tuple[str, ...], amount: float) -> None:
        self.events.append((metric, labels, amount))

    def observe(self, metric: Metric, node: str, labels: tuple[str, ...], value: float) -> None:
        self.events.append((metric, labels, value))


@pytest.fixture
def noted() -> Iterator[Noted]:
    meter = Noted()
    metrics.use(meter)
    yield meter
    metrics.use(None)


@pytest.mark.parametrize(
    ("outcome", "alive", "killed"),
    [
        (RunOutcome.OK, True, False),
        (RunOutcome.TIME, True, False),
        (RunOutcome.TIME, False, True),
        (RunOutcome.MEMORY, False, True),
        (RunOutcome.EXITED, False, False),
    ],
)
def test_a_command_is_counted_and_a_kill_by_the_limit_that_was_met(
    noted: Noted, outcome: RunOutcome, alive: bool, killed: bool
) -> None:
    note_result(RunResult(outcome=outcome, wall_s=0.25, session_alive=alive))
    label = (outcome.name.lower(),)
    expected = [(COMMANDS, label, 1.0), (COMMAND_SECONDS, label, 0.25)]
    assert noted.events == expected + ([(KILLS, label, 1.0)] if killed else [])
