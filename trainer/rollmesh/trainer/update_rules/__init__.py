"""Update rules: how a batch is cut into optimizer steps, in which order, and with which factor of the learning rate."""

from rollmesh.trainer.update_rules.base import UPDATE_RULES, OptimizerStep, UpdateRule, checked_step

__all__ = ["UPDATE_RULES", "OptimizerStep", "UpdateRule", "checked_step"]
