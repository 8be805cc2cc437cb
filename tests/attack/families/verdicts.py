"""Candidates that try to be accepted without solving their task, judged by hidden tests; the list is `forgeries`."""

from __future__ import annotations

from ..arena import Scene
from ..attack import Attack, Family, Verdict
from ..forgeries import FUNCTIONS, PROGRAMS, Forgery


def _attack(kind: str, forgery: Forgery) -> Attack:
    async def drive(scene: Scene) -> None:
        scene.say(await scene.judged(kind, forgery.source))

    held = "|".join(forgery.verdicts.split())
    name = f"{kind}: {forgery.name}".replace("|", "/")
    return Attack(name=name, verdict=Verdict.REJECTED, source=forgery.source, drive=drive, held=[f"({held})"])


ATTACKS = (
    *(_attack("function", forgery) for forgery in FUNCTIONS),
    *(_attack("program", forgery) for forgery in PROGRAMS),
)

FAMILY = Family(name="verdict forging", attacks=ATTACKS)
