"""The rewards that a program or a service of the user sends for its episode.

A reward is a JSON object, in a reply as an entry of `rewards`, and of a program as a line:

    {"name": "score", "value": 1.0, "evidence": "won in 7 moves"}

Without `reply` it belongs to all conversations of the episode. `reply` is the `id` of a reply of the model, and
addresses the conversation up to this reply; `choice` is the number of its choice. `turn` addresses one turn of the
conversation, as in `Environment.reward`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from rollmesh.services.rollout.environment import Environment, ServedEpisode

REWARD_BYTES_MAX = 1 << 20
"""Most bytes that a program or a reply may use for its rewards."""


_log = logging.getLogger(__name__)


class SentReward(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One reward."""

    name: str
    value: float
    turn: int | None = None
    reply: str = ""
    choice: int = 0
    evidence: str = ""

    def give(self, env: Environment, api: ServedEpisode) -> None:
        """Raise ValueError as `Environment.reward`, and for a reply that the model has not given."""
        whole = not self.reply and self.turn is None
        branch = env if whole else api.branch(self.reply, self.choice)
        branch.reward(self.name, self.value, turn=self.turn, evidence=self.evidence, episode=whole)


def give_lines(raw: bytes, env: Environment, api: ServedEpisode, *, complete: bool) -> None:
    """Give the rewards of a program, one JSON object per line. Without `complete` the last line may be cut, and counts
    only if it ends. Raise ValueError that names the line."""
    _check_size(raw)
    *lines, last = raw.split(b"\n")
    for number, line in enumerate([*lines, *([last] if complete else [])], start=1):
        if line.strip():
            try:
                msgspec.json.decode(line, type=SentReward).give(env, api)
            except (ValueError, UnicodeDecodeError) as err:
                raise ValueError(f"line {number} of its rewards, {_shown(line)}: {err}") from None


def give_reply(raw: bytes, env: Environment, api: ServedEpisode) -> None:
    """Give the rewards of a JSON reply: the field `rewards`, a list of objects. Any other reply has none, and a warning
    is logged if it begins as a JSON object. Raise ValueError for an object that is not a reward, and as
    `SentReward.give`."""
    if not raw.lstrip().startswith(b"{"):
        return
    try:
        _check_size(raw)
        reply = msgspec.json.decode(raw)
        found = reply.get("rewards", []) if isinstance(reply, dict) else []
        sent = msgspec.convert(found, list[dict[str, Any]])
    except (ValueError, UnicodeDecodeError) as err:
        _log.warning("a reply has no rewards: episode=%s reply=%s: %s", env.key.episode, _shown(raw), err)
        return
    try:
        rewards = msgspec.convert(sent, list[SentReward])
    except ValueError as err:
        raise ValueError(f"the rewards of its reply, {_shown(raw)}: {err}") from None
    _give_all(rewards, env, api)


def _give_all(rewards: Sequence[SentReward], env: Environment, api: ServedEpisode) -> None:
    for number, reward in enumerate(rewards):
        try:
            reward.give(env, api)
        except ValueError as err:
            raise ValueError(f"rewards[{number}] of its reply: {err}") from None


def _check_size(raw: bytes) -> None:
    if len(raw) > REWARD_BYTES_MAX:
        raise ValueError(f"its rewards must have at most {REWARD_BYTES_MAX} bytes; send fewer, or shorter evidence")


def _shown(raw: bytes) -> str:
    return repr(raw[:100].decode(errors="replace"))
