"""The streams of one run, and their rules (design: one set per run)."""

from __future__ import annotations

import re

import msgspec

from rollmesh.shared.bus.bus import Discard, StreamSpec
from rollmesh.shared.config.settings import PositiveInt, Settings
from rollmesh.shared.errors import field_error

MIB = 1024 * 1024


class StreamLimits(Settings):
    """Disk that each stream of a run may use. JetStream reserves it, so the sum must fit the server's store."""

    samples_bytes_max: PositiveInt = 1024 * MIB
    """Sample payloads not yet trained or purged; when full, rollout workers wait."""
    ledger_bytes_max: PositiveInt = 512 * MIB
    """Facts of the run; about 320 bytes per sample and 34 per turn, and the text of `rollout.summary_text_chars`. Old
    ones move to files (`coordinator.archive`). Without an archive the run ends as LEDGER_FULL when they reach the
    limit."""
    dead_bytes_max: PositiveInt = 64 * MIB
    """Limit of dead letters, in bytes; the oldest are dropped."""
    num_replicas: PositiveInt = 1
    """Copies of each stream: 1, 3 or 5. With 3 a cluster of NATS servers (`bus.url`) loses nothing if one of them is
    lost, with 5 if two are."""

    def check_fields(self) -> None:
        if self.num_replicas not in (1, 3, 5):
            raise ValueError(
                f"`num_replicas` must be 1, 3 or 5, got {self.num_replicas}: a majority must remain when a server is "
                "lost"
            )


class RunStreams(msgspec.Struct, frozen=True, kw_only=True):
    """Specs of a run's three streams."""

    samples: StreamSpec
    """Written by rollout workers, read by sequence; purged below the lowest live sequence."""
    ledger: StreamSpec
    """Written by the coordinator alone, each append with the expected last sequence; purged behind archive
    segments."""
    dead: StreamSpec
    """Written by the service that drops a task or payload."""


def run_of_ledger(stream: str) -> str:
    """The run whose ledger `stream` is; empty for any other stream."""
    return _run_of(stream, "LEDGER")


def run_of_samples(stream: str) -> str:
    """The run whose sample stream `stream` is; empty for any other stream."""
    return _run_of(stream, "SAMPLES")


def _run_of(stream: str, kind: str) -> str:
    found = re.fullmatch(rf"RM_([A-Za-z0-9_-]{{1,64}})_{kind}", stream)
    return found[1] if found else ""


def run_streams(run: str, limits: StreamLimits | None = None) -> RunStreams:
    """The streams of `run`. Raises `InvalidInput` if the run's name cannot be part of a stream's."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", run):
        raise field_error("run", "be 1 to 64 letters, digits, dashes or underscores", run, run=run)
    limits = limits or StreamLimits()

    def spec(kind: str, bytes_max: int, discard: Discard) -> StreamSpec:
        return StreamSpec(
            name=f"RM_{run}_{kind}",
            bytes_max=bytes_max,
            discard=discard,
            num_replicas=limits.num_replicas,
            subject=f"RM.{run}.{kind}",
        )

    return RunStreams(
        samples=spec("SAMPLES", limits.samples_bytes_max, Discard.NEW),
        ledger=spec("LEDGER", limits.ledger_bytes_max, Discard.NEW),
        dead=spec("DEAD", limits.dead_bytes_max, Discard.OLD),
    )
