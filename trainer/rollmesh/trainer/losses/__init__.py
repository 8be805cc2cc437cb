"""Loss terms, and the loss of an update as their weighted sum."""

from rollmesh.trainer.losses.base import (
    LOSSES,
    LossInputs,
    PolicyLoss,
    TokenStats,
    check_outputs,
    engine_outputs,
    token_weights,
)
from rollmesh.trainer.losses.terms import LossSum

__all__ = [
    "LOSSES",
    "LossInputs",
    "LossSum",
    "PolicyLoss",
    "TokenStats",
    "check_outputs",
    "engine_outputs",
    "token_weights",
]
