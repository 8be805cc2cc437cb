"""Read the current values of the metrics of an inference node from its state."""

from __future__ import annotations

from rollmesh.services.inference.metrics import (
    HELD_SECONDS,
    INCARNATION,
    KV_TOKENS,
    REQUESTS,
    SLOTS,
    STEP_SECONDS,
    STEPS,
    TOKENS,
    VERSION,
)
from rollmesh.services.inference.node import InferenceNode
from rollmesh.shared.telemetry.metrics import Reading


async def read(node: InferenceNode) -> list[Reading]:
    """Return the engine's load and counters, and the active version of the run's policy."""
    load, active = node.engine.load(), node.state.active
    # The weights of an endpoint are not a step of a run.
    version = (
        []
        if node.state.endpoint
        else [
            Reading(VERSION, -1 if active is None else active.step),
            Reading(INCARNATION, 0 if active is None else active.incarnation),
        ]
    )
    return [
        Reading(TOKENS, load.tokens_generated, ("generated",)),
        Reading(TOKENS, load.tokens_prefilled, ("prefilled",)),
        Reading(TOKENS, load.tokens_prefix_hit, ("prefix_hit",)),
        Reading(REQUESTS, load.num_running, ("running",)),
        Reading(REQUESTS, load.num_waiting, ("waiting",)),
        Reading(SLOTS, load.slots_max),
        Reading(KV_TOKENS, load.kv_tokens_used, ("used",)),
        Reading(KV_TOKENS, load.kv_tokens_max, ("max",)),
        Reading(STEPS, load.steps),
        Reading(STEP_SECONDS, load.step_s),
        Reading(HELD_SECONDS, load.held_s),
        *version,
    ]
