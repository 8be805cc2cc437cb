"""An update rule: one optimizer step per turn, the last turn first, each against the policy before it."""

from rollmesh.trainer.update_rules import OptimizerStep, UpdateRule


class LastTurnFirst(UpdateRule):
    def steps(self, batch, rng):
        samples = range(len(batch.samples))
        for turn in sorted(set(batch["turn"].tolist()), reverse=True):
            yield OptimizerStep(samples=samples, tokens=batch["turn"] == turn, refresh=True)
