"""An estimator: the advantage is the rank of the weighted reward within the group, scaled to [-1, 1]."""

from rollmesh.trainer.estimators import GroupEstimator
from rollmesh.trainer.estimators.base import usable_rewards


class Ranks(GroupEstimator):
    def of_group(self, group):
        usable = [(m.sample_id, r) for m in group.members if (r := usable_rewards(m)) is not None]
        totals = {name: sum(self.weight_of(n) * value for n, value in r.items()) for name, r in usable}
        values = list(totals.values())
        return {
            name: sum((total > other) - (total < other) for other in values) / max(1, len(values) - 1)
            for name, total in totals.items()
        }
