"""The table of extensions in docs/extending.md: each kind once, with the built-in names of its registry."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollmesh.app.loggers.run_loggers import LOGGERS
from rollmesh.services.data.selector import SELECTORS
from rollmesh.services.data.source import SOURCES
from rollmesh.services.inference.engine import INFERENCE_ENGINES
from rollmesh.services.learner.engine import TRAINERS
from rollmesh.services.reward.finalizer import FINALIZERS
from rollmesh.services.reward.oracles import ORACLES
from rollmesh.services.reward.scorer import SCORERS
from rollmesh.services.rollout.agent import AGENTS
from rollmesh.services.rollout.tool_calls.choice import TOOL_CALL_PARSERS
from rollmesh.services.sandbox.egress.retrieval.backend import BACKENDS
from rollmesh.services.sandbox.engine import ENGINES
from rollmesh.shared.config.registry import Registry
from rollmesh.trainer.estimators.base import ESTIMATORS
from rollmesh.trainer.features import FEATURES
from rollmesh.trainer.losses.base import LOSSES
from rollmesh.trainer.update_rules.base import UPDATE_RULES

PAGE = Path(__file__).parents[3] / "docs" / "extending.md"
KINDS: dict[str, Registry] = {
    "task source": SOURCES,
    "selector": SELECTORS,
    "oracle": ORACLES,
    "scorer": SCORERS,
    "finalizer": FINALIZERS,
    "agent": AGENTS,
    "tool call parser": TOOL_CALL_PARSERS,
    "sandbox engine": ENGINES,
    "inference engine": INFERENCE_ENGINES,
    "estimator": ESTIMATORS,
    "loss term": LOSSES,
    "feature": FEATURES,
    "update rule": UPDATE_RULES,
    "trainer": TRAINERS,
    "run logger": LOGGERS,
    "retrieval backend": BACKENDS,
}


def rows() -> list[list[str]]:
    """Return the cells of the rows of the table."""
    table = (
        PAGE.read_text(encoding="utf-8").partition("| kind | key | built in | base class |\n")[2].partition("\n\n")[0]
    )
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_one_row_with_all_its_names(kind: str) -> None:
    found = [re.split(r",\s*", cells[2]) for cells in rows() if cells[0] == kind]
    assert len(found) == 1, "a kind has one row"
    assert sorted(found[0]) == sorted(KINDS[kind].names)
