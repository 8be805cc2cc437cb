"""What is done to whom and when in a round: drawn from its seed alone, so that a round can be repeated."""

from __future__ import annotations

import random
from typing import Literal

import msgspec

Kind = Literal["kill", "pause"]
SUPERVISOR, SERVER = "supervisor", "nats-server"
SERVICES = (
    "nats", "coordinator", "depot", "reward", "data", "sandbox-0", "inference-0", "inference-1", "gateway", "rollout-0",
    "learner",
)  # fmt: skip
"""Processes that a supervisor starts; all of these, and those that it does not start itself, are victims."""
MOMENTS = (
    "rollout-leased", "rollout-generating", "rollout-stored", "inference-generating", "learner-leased", "learner-mid_fetch",
    "learner-stepped", "learner-committed", "learner-saving", "learner-mid_checkpoint", "learner-checkpointed", "learner-published",
)  # fmt: skip
"""Passed by whoever is there first (`traps`)."""
_TURN = (SUPERVISOR, *SERVICES, SERVER, SUPERVISOR, *MOMENTS)
"""The first blow of consecutive seeds goes round here, so that no victim is left to chance."""
_PAUSE_SHARE = 0.3
_PAUSE_S = (0.5, 9.0)
"""From hardly noticed to beyond every lease of the round."""
_DELAY_S_MAX = 2.0
_AFTER_MAX = 20
"""Passes of an episode's moment; the learner passes its own once per update."""


class Blow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """SIGKILL, or SIGSTOP and later SIGCONT, to one process."""

    victim: str
    """A service, `supervisor`, `nats-server`, or a moment: whoever passes that."""
    kind: Kind
    update: int
    """Not before this update is committed."""
    delay_s: float = 0.0
    """After that."""
    after: int = 0
    """Times that the moment is passed before."""
    pause_s: float = 0.0
    """From SIGSTOP to SIGCONT."""

    @property
    def at_moment(self) -> bool:
        return self.victim in MOMENTS

    @property
    def service(self) -> str:
        """Kind of process, without its number."""
        return self.victim if self.victim in (SUPERVISOR, SERVER) else self.victim.partition("-")[0]

    def __str__(self) -> str:
        when = f"pass {self.after + 1} from" if self.at_moment else f"{self.delay_s:.2f} s after"
        what = f"pause {self.pause_s:.1f} s" if self.kind == "pause" else "kill"
        return f"{what} {self.victim}, {when} update {self.update}"


def draw(seed: int, *, num: int, updates_max: int) -> list[Blow]:
    """The blows of a round in their order, before its last update."""
    draws = random.Random(seed)
    victims = [_TURN[seed % len(_TURN)], *(draws.choice(_TURN) for _ in range(num - 1))]
    draws.shuffle(victims)
    updates = sorted(draws.randrange(updates_max - 1) for _ in victims)
    return [_blow(draws, victim, update) for victim, update in zip(victims, updates, strict=True)]


def _blow(draws: random.Random, victim: str, update: int) -> Blow:
    pause = draws.random() < _PAUSE_SHARE
    pause_s, delay_s = draws.uniform(*_PAUSE_S), draws.uniform(0.0, _DELAY_S_MAX)
    after = 0 if victim.startswith("learner-") else draws.randrange(_AFTER_MAX)
    at_moment = victim in MOMENTS
    return Blow(
        victim=victim,
        kind="pause" if pause else "kill",
        update=update,
        delay_s=0.0 if at_moment else round(delay_s, 2),
        after=after if at_moment else 0,
        pause_s=round(pause_s, 1) if pause else 0.0,
    )
