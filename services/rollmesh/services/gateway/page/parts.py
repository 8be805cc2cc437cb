"""What the page needs of other services, given by the mesh. Without a part the page names what is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from rollmesh.shared.bus.bus import StreamRecord
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.shared.domain.trajectory import GroupContext, IntArray


class TokenDecoder(Protocol):
    """Converts token ids to text."""

    def decode(self, token_ids: IntArray) -> str:
        """Return the text of tokens, with tags."""
        ...


class LedgerAuditor(Protocol):
    """Audits a run outside this process."""

    async def __call__(self, run: str, heads: Sequence[tuple[str, LedgerHead]]) -> bytes:
        """Return the report as JSON, as `rollmesh audit --json` prints it. `heads`: heads of its ledger, and where they
        are stored.

        Raise MeshError.
        """
        ...


class LifeLine(msgspec.Struct, frozen=True, kw_only=True):
    """One event in the history of a sample."""

    position: int
    time_unix_s: float
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PageParts:
    """The parts. The defaults are those of a gateway without a mesh."""

    run: str = ""
    """The run of the configuration. Tokenizer, estimator and metrics are those of this run."""
    metrics: Path | None = None
    """metrics.jsonl of the learner in the run folder; None on a host without the folder."""
    decoder: Callable[[], TokenDecoder | None] = lambda: None
    """Loads the tokenizer; None if the engines need no model. Raises ConfigError. It is called in a thread."""
    estimator: str = ""
    """Name of the estimator of the run; empty if it is unknown."""
    advantages: Callable[[GroupContext], Mapping[str, float]] | None = None
    """Returns the advantage of each sample of a group, as the estimator of the run gives it. Raises MeshError. Called
    in a thread."""
    auditor: LedgerAuditor | None = None
    """None: the page has no audit."""
    history: Callable[[Sequence[StreamRecord], str], Sequence[LifeLine]] | None = None
    """Returns the history of a sample from consecutive ledger records. Raises MeshError. Called in a thread."""
