"""The faults of a round: process, signal and time. The seed determines them, so that a round can be repeated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import msgspec

Kind = Literal["kill", "pause", "cut"]
SUPERVISOR, SERVER, PROGRAM = "supervisor", "nats-server", "program"
SERVICES = (
    "nats", "coordinator", "depot", "reward", "data", "sandbox-0", "inference-0", "inference-1", "gateway", "rollout-0",
    "learner",
)  # fmt: skip
"""Processes that a supervisor starts. All of these, and those that it does not start itself, are victims."""
MOMENTS = (
    "rollout-leased", "rollout-generating", "rollout-stored", "inference-generating", "learner-leased", "learner-mid_fetch",
    "learner-stepped", "learner-committed", "learner-saving", "learner-mid_checkpoint", "learner-checkpointed", "learner-copied",
    "learner-published",
)  # fmt: skip
"""The first process that reaches the fault point is hit (`traps`)."""
_TURN = (SUPERVISOR, *SERVICES, SERVER, SUPERVISOR, *MOMENTS)
"""The first faults of consecutive seeds cycle through these, so that every victim is hit."""
PROGRAM_VICTIMS = (
    "rollout-0", "rollout-1", "inference-0", "rollout-2", "gateway", PROGRAM, "rollout-generating", "rollout-3", SUPERVISOR, "inference-1",
    "rollout-stored", "rollout-leased", PROGRAM, "inference-generating", "coordinator",
)  # fmt: skip
"""The same for rounds with programs as agents (`programs`). A fault of `program` hits a third of them."""
NATS_SERVERS = ("nats-a", "nats-b", "nats-c")
"""Servers of the NATS cluster of a round (`tests.nats_cluster`). One of them at a time is down, stopped or cut off."""
CLUSTER_VICTIMS = (
    "nats-a", "coordinator", "nats-b", "learner-committed", "nats-c", SUPERVISOR, "nats-a", "rollout-stored", "nats-b", "gateway", "nats-c",
    "data", "nats-a", "learner-mid_checkpoint", "nats-b", "rollout-0", "nats-c", "learner", "nats-a", "coordinator",
)  # fmt: skip
"""The same for rounds with a cluster."""
_OUTAGE_S = (1.0, 12.0)
"""From shorter than the election of a leader to longer than every lease of the round."""
_PAUSE_SHARE = 0.3
_PAUSE_S = (0.5, 9.0)
"""From unnoticed to longer than every lease of the round."""
_DELAY_S_MAX = 2.0
_AFTER_MAX = 20
"""Number of passes of a fault point of an episode; the learner passes its fault points once per update."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """SIGKILL, or SIGSTOP and later SIGCONT, to one process. `cut`: a server of NATS that neither clients nor servers
    reach."""

    victim: str
    """A service, `supervisor`, `nats-server`, `program`, a server of the cluster, or a fault point: the process that
    passes it."""
    kind: Kind
    update: int
    """The fault waits until this update is committed."""
    delay_s: float = 0.0
    """Seconds after that."""
    after: int = 0
    """Number of passes of the fault point before the fault."""
    pause_s: float = 0.0
    """Seconds from SIGSTOP to SIGCONT; of a server of the cluster, until it runs, continues or is joined again."""

    @property
    def at_fault_point(self) -> bool:
        return self.victim in MOMENTS

    @property
    def service(self) -> str:
        """The kind of process, without its number."""
        return self.victim if self.victim in (SUPERVISOR, SERVER, PROGRAM) else self.victim.partition("-")[0]

    def __str__(self) -> str:
        when = f"pass {self.after + 1} from" if self.at_fault_point else f"{self.delay_s:.2f} s after"
        what = f"{self.kind} {self.pause_s:.1f} s" if self.pause_s else self.kind
        return f"{what} {self.victim}, {when} update {self.update}"


def draw(seed: int, *, num: int, updates_max: int, turn: Sequence[str] = _TURN) -> list[Fault]:
    """Return the faults of a round in order, before its last update. The first victims of consecutive seeds cycle
    through `turn`."""
    draws = random.Random(seed)
    victims = [turn[seed % len(turn)], *(draws.choice(turn) for _ in range(num - 1))]
    draws.shuffle(victims)
    updates = sorted(draws.randrange(updates_max - 1) for _ in victims)
    return [_fault(draws, victim, update) for victim, update in zip(victims, updates, strict=True)]


def _fault(draws: random.Random, victim: str, update: int) -> Fault:
    if victim in NATS_SERVERS:
        return Fault(
            victim=victim,
            kind=draws.choice(("kill", "pause", "cut")),
            update=update,
            delay_s=round(draws.uniform(0.0, _DELAY_S_MAX), 2),
            pause_s=round(draws.uniform(*_OUTAGE_S), 1),
        )
    pause = draws.random() < _PAUSE_SHARE
    pause_s, delay_s = draws.uniform(*_PAUSE_S), draws.uniform(0.0, _DELAY_S_MAX)
    after = 0 if victim.startswith("learner-") else draws.randrange(_AFTER_MAX)
    at_fault_point = victim in MOMENTS
    return Fault(
        victim=victim,
        kind="pause" if pause else "kill",
        update=update,
        delay_s=0.0 if at_fault_point else round(delay_s, 2),
        after=after if at_fault_point else 0,
        pause_s=round(pause_s, 1) if pause else 0.0,
    )
