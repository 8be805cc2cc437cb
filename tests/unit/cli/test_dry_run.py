"""The checks of the dry run on its episode."""

from __future__ import annotations

import pytest

from rollmesh.cli.dry_run import MEMBERS, call_estimator
from rollmesh.cli.samples import RewardLine, SampleLine
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.trajectory import GroupContext
from rollmesh.trainer.estimators import make_estimator
from rollmesh.trainer.estimators.base import GroupEstimator

LINE = SampleLine(
    sample_id="s", run="r", task="t", group="g", episode="e", rewards=[RewardLine(name="correct", value=1.0)]
)


class Raises(GroupEstimator):
    def of_group(self, group: GroupContext) -> dict[str, float]:
        raise KeyError(len(group.members))


def test_the_estimator_gets_a_group_of_copies_and_its_error_fails_the_dry_run() -> None:
    call_estimator("grpo", make_estimator("grpo"), [LINE])
    with pytest.raises(
        ConfigError, match=rf"group failed: estimator e.py:Raises: KeyError: {MEMBERS}\n.*\n.*raise KeyError"
    ):
        call_estimator("/tmp/e.py:Raises", Raises(weights={}), [LINE])
