"""Loss terms, and the loss of an update as their weighted sum."""

from rollmesh.trainer.losses.base import (
    LOSSES,
    CoupledLoss,
    LossInputs,
    LossTerm,
    TokenStats,
    equal_groups,
    token_weights,
)
from rollmesh.trainer.losses.terms import LossSum

__all__ = [
    "LOSSES",
    "CoupledLoss",
    "LossInputs",
    "LossSum",
    "LossTerm",
    "TokenStats",
    "equal_groups",
    "token_weights",
]
