"""What a source of tasks drops: records of a file that do not become tasks, by reason."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rollmesh.services.data.metrics import DROPPED
from rollmesh.shared.telemetry.metrics import count

_log = logging.getLogger(__name__)


class Dropped(Exception):
    """A record does not become a task. The message is the reason, a word that logs and metrics contain."""


def report_drops(source: str, dropped: Mapping[str, int]) -> None:
    """Log the number of dropped records by reason, and count them. `source` is the name of the tasks."""
    for reason, num in dropped.items():
        count(DROPPED, reason, amount=num)
    if dropped:
        reasons = " ".join(f"{reason}={num}" for reason, num in sorted(dropped.items()))
        _log.info("records dropped: source=%s %s", source, reasons)
