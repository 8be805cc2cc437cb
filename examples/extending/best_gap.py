"""An estimator: the reward minus the mean of the group, which also measures the largest advantage of each group for a
selector."""

from dataclasses import replace

from rollmesh.trainer.estimators.base import GroupEstimator


class BestGap(GroupEstimator):
    def of_group(self, group):
        members, sums = self.reward_sums(group)
        mean = sum(sums) / max(1, len(sums))
        return {member.sample_id: float(value - mean) for member, value in zip(members, sums, strict=True)}

    def __call__(self, batch):
        measures = {g.group: {"best_gap": max(self.of_group(g).values(), default=0.0)} for g in batch.groups}
        return replace(super().__call__(batch), measures=measures)
