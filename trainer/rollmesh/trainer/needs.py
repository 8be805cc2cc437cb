"""What a method needs of a run, derived from its parts: engine outputs, features, gradients, a reference, modules,
rewards, groups."""

from __future__ import annotations

from collections.abc import Collection

from rollmesh.shared.config.plugin import overrides
from rollmesh.shared.config.settings import Settings
from rollmesh.shared.domain.outputs import output_of
from rollmesh.trainer.config import UpdateConfig
from rollmesh.trainer.estimators.base import GroupSize
from rollmesh.trainer.losses import LossTerm
from rollmesh.trainer.part import UpdatePart
from rollmesh.trainer.plugins import Plugins

_PASSES = {
    "start": "one more forward pass per update, at its start, for {}",
    "reference": "one forward pass per update of a reference model ({reference}) for {}",
    "step": "one more forward pass per optimizer step for {}",
    "current": "{} in the forward pass of the loss",
}
"""The cost of features under some weights."""
_REFERENCES = {
    "initial": "the initial weights",
    "path": "the folder `learner.reference.path`",
    "average": "a moving average of the policy",
}


class MethodNeeds(Settings):
    """What a method needs. Every method also needs the tokens, their log-probs under the sampling policy, and
    rewards."""

    outputs: tuple[str, ...] = ()
    """Outputs of the engine, which `rollout.outputs` must list."""
    features: dict[str, str] = {}
    """Column -> weights under which the trainer computes it: start, reference, step or current."""
    gradient_squares: bool = False
    """Whether it needs the squared norm of the gradient of each sample."""
    reference: str = ""
    """Kind of the reference model. Empty: none."""
    modules: tuple[str, ...] = ()
    """Loss terms with modules that are trained, kept in checkpoints and not published."""
    memory: tuple[str, ...] = ()
    """Parts with a state in the checkpoint."""
    rewards: tuple[str, ...] = ()
    """Names of the rewards that it reads. Empty: any."""
    group_size_min: int = 1
    """The smallest `run.group_size`, in episodes."""
    group_size_odd: bool = False
    """Whether `run.group_size` must be odd."""
    whole_groups: bool = False
    """Whether each optimizer step must have whole groups."""

    given_solutions: bool = False
    """Whether it learns from given solutions."""

    def phrases(self) -> list[str]:
        """Return the needs in words, in Markdown."""
        found = ["log-probs"]
        if self.outputs:
            found.append(f"{_names(self.outputs)} of the engine in `rollout.outputs`")
        for under, text in _PASSES.items():
            if columns := [name for name, weights in self.features.items() if weights == under]:
                found.append(text.format(_names(columns), reference=_REFERENCES.get(self.reference, "")))
        if self.gradient_squares:
            found.append("one more backward pass per sample for `gradient_square`")
        if self.modules:
            found.append(f"a module of {_names(self.modules)}, which is trained and not published")
        if self.memory:
            found.append(f"memory in the checkpoint: {', '.join(self.memory)}")
        if self.rewards:
            found.append(f"the rewards {_names(self.rewards)}")
        if size := str(GroupSize(least=self.group_size_min, odd=self.group_size_odd)):
            found.append(f"`run.group_size` {size}")
        if self.whole_groups:
            found.append("an update rule that keeps groups whole")
        if self.given_solutions:
            found.append("given solutions, which the agent records")
        return found if len(found) > 1 else ["log-probs only"]


def needs_of(plugins: Plugins, config: UpdateConfig, reward_weights: Collection[str] = ()) -> MethodNeeds:
    """Return the needs of the parts. `reward_weights` are the names that the method gives a weight."""
    size = plugins.estimator.group_size
    return MethodNeeds(
        outputs=tuple(dict.fromkeys(map(output_of, plugins.recorded))),
        features={name: request.under for name, request in sorted(plugins.requests.items())},
        gradient_squares=plugins.needs_gradients,
        reference=config.reference.kind if plugins.under("reference") else "",
        modules=tuple(name for name, term in plugins.loss.terms.items() if overrides(term, LossTerm.make_module)),
        memory=tuple(part for part, made in plugins.parts.items() if overrides(made, UpdatePart.state)),
        rewards=tuple(dict.fromkeys([*reward_weights, *plugins.rewards])),
        group_size_min=size.least,
        group_size_odd=size.odd,
        whole_groups=any(term.whole_groups for term in plugins.loss.terms.values()),
    )


def _names(names: Collection[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
