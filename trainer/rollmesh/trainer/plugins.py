"""The estimator, the loss and the update rule of a trainer: what they need together, their modules, and their memory.

Memory is what `state()` returns: nested dictionaries and lists of numbers, strings and tensors. A checkpoint holds it
by the kind and name of the part, so that a resumed run continues bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rollmesh.shared.config.plugin import overrides
from rollmesh.shared.domain.outputs import output_of
from rollmesh.shared.errors import located_at
from rollmesh.trainer.config import UpdateConfig
from rollmesh.trainer.estimators import Estimator, make_estimator
from rollmesh.trainer.features import (
    BUILT_IN,
    FEATURES,
    GRADIENT_SQUARE,
    FeatureRequest,
    merged_requests,
)
from rollmesh.trainer.losses import LossSum, LossTerm
from rollmesh.trainer.losses.terms import needs_sampled
from rollmesh.trainer.part import UpdatePart
from rollmesh.trainer.routes import ROUTED_EXPERTS
from rollmesh.trainer.samples import COLUMNS, Rewrite
from rollmesh.trainer.update_rules import UPDATE_RULES, UpdateRule


class Plugins:
    """The replaceable parts of an update."""

    def __init__(
        self,
        config: UpdateConfig,
        *,
        reward_weights: Mapping[str, float] | None = None,
        base_dir: str | Path | None = None,
    ) -> None:
        """Construct the parts. Raises ConfigError for a name or an option, and ValueError for requests that contradict
        each other."""
        with located_at("learner.estimator"):
            self.estimator: Estimator = make_estimator(config.estimator, reward_weights, base_dir)
        self.loss = LossSum(config.loss, base_dir, config.normalization)
        with located_at("learner.update_rule"):
            self.rule: UpdateRule = UPDATE_RULES.make(config.update_rule, base_dir)
        self.parts: dict[str, UpdatePart] = {
            f"estimator {config.estimator.short_name}": self.estimator,
            f"update rule {config.update_rule.short_name}": self.rule,
            **{f"loss term {name}": term for name, term in self.loss.terms.items()},
        }
        """Estimator, update rule and loss terms by kind and name."""
        chosen: dict[str, FeatureRequest] = {}
        for name, choice in config.features.items():
            with located_at(f"learner.features.{name}"):
                chosen[name] = FeatureRequest(FEATURES.make(choice, base_dir), choice.under, choice.grad)
        named = merged_requests(
            ("learner.features", chosen), *((part, made.features) for part, made in self.parts.items())
        )
        needs = [(part, name) for part, made in self.parts.items() for name in made.needs]
        wanted = {name for _, name in needs}
        self.requests = named | {name: request for name, request in BUILT_IN.items() if name in wanted}
        """Requests of features by column."""
        self.rewrites: dict[Hashable, Rewrite] = {
            request.function: request.feature.sequences_of for request in self.requests.values() if request.reads_others
        }
        """What makes the sequences of the features of other sequences, see `samples.TokenTable.others`."""
        self.needs_gradients = GRADIENT_SQUARE in wanted
        self.columns: tuple[str, ...] = tuple(self.estimator.columns)
        """Columns that the estimator returns with the advantages."""
        computed = {*self.requests, *self.columns, GRADIENT_SQUARE}
        self.outputs = tuple(dict.fromkeys(n for _, n in needs if n not in computed))
        """Outputs of the engine that some part needs."""
        self.recorded = (*self.outputs, *((ROUTED_EXPERTS,) if config.router_replay else ()))
        """Outputs of the engine that some part or `router_replay` needs."""
        self.rewards = tuple(dict.fromkeys(name for made in self.parts.values() for name in made.rewards))
        """Names of the rewards that some part reads."""
        self.loss.sampled_only(self.outputs)
        self.takes_external = self.loss.takes_external and not any(
            needs_sampled(made, self.outputs) for made in (self.estimator, self.rule)
        )
        """Whether tokens that were not sampled can be trained on."""
        self._needed_by = {name: part for part, name in reversed(needs)}
        if taken := sorted({*self.columns} & {*COLUMNS, *self.requests, "advantages", "reward"}):
            raise ValueError(
                f"the estimator {config.estimator.short_name} returns the column `{taken[0]}`, which exists; rename it"
            )
        self._check_times(needs)
        self._check_groups(config.update_rule.short_name)

    def under(self, *when: str) -> dict[str, FeatureRequest]:
        """Return the requests under these weights."""
        return {name: request for name, request in self.requests.items() if request.under in when}

    def use_tokenizer(self, encode: Callable[[str], list[int]] | None) -> None:
        """Give the features the tokenizer of the model, if it has one. Raises ConfigError for a feature that needs
        it."""
        for request in self.requests.values():
            request.feature.use_tokenizer(encode)

    def check_outputs(self, outputs: Collection[str]) -> None:
        """Raise ValueError if a part needs an engine output that is not among `outputs`, which the run records."""
        found = ", ".join(dict.fromkeys(map(output_of, outputs)))
        if missing := [name for name in self.outputs if name not in outputs]:
            part = self._needed_by[missing[0]]
            part = "the loss" if part.startswith("loss") else f"the {part}"
            wanted = ", ".join(dict.fromkeys(map(output_of, missing)))
            raise ValueError(
                f"`rollout.outputs` must contain {wanted}, which {part} needs, got [{found}]; add it, if the engine "
                "can return it, give a feature this name in `learner.features`, or choose an estimator that returns it"
            )
        if missing := [name for name in self.recorded if name not in outputs]:
            raise ValueError(
                f"`rollout.outputs` must contain {missing[0]}, which `learner.router_replay` needs, got [{found}]; add "
                "it, if the engine can return it, or set `learner.router_replay` to false"
            )

    def check_rewards(self, known: Collection[str]) -> None:
        """Raise ValueError if a part reads a reward that is not among `known`, which scorers give."""
        for part, made in self.parts.items():
            for name in made.rewards:
                if name not in known:
                    raise ValueError(
                        f"`reward.scorers`: no scorer gives a reward called `{name}`, which the {part} reads; known: "
                        f"{', '.join(known)}; add a scorer with `reward: {name}`"
                    )

    def check_group_size(self, size: int) -> None:
        """Raise ValueError if the estimator cannot work with groups of `size` episodes."""
        if not self.estimator.group_size.allows(size):
            (part,) = (part for part, made in self.parts.items() if made is self.estimator)
            raise ValueError(f"`run.group_size` must be {self.estimator.group_size} for the {part}, got {size}")

    def _check_times(self, needs: list[tuple[str, str]]) -> None:
        """Raise ValueError if the estimator or the rule needs a value that exists only later in the update."""
        late = self.under("step", "current")
        for part, name in needs:
            if name in late and not part.startswith("loss"):
                raise ValueError(
                    f"the {part} needs `{name}`, which is computed under `{late[name].under}`, after the advantages; "
                    "request it under start or reference"
                )

    def _check_groups(self, rule: str) -> None:
        """Raise ValueError if a loss term needs whole groups in each optimizer step, and the rule may cut them."""
        term = next((name for name, term in self.loss.terms.items() if term.whole_groups), None)
        if term and not self.rule.keeps_groups:
            raise ValueError(
                f"the loss term {term} compares the samples of a group, so that each optimizer step must have whole "
                "groups, but the "
                f"update rule {rule} may cut them; set `learner.update_rule` to "
                "{name: minibatches, options: {num_minibatches: 2, whole_groups: true}}, or `num_minibatches` to 1"
            )

    def make_modules(self, hidden_size: Callable[[], int], seed: int) -> nn.ModuleDict:
        """Return the modules of the loss terms by name, with initial weights that depend on the seed alone."""
        modules = nn.ModuleDict()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for name, term in self.loss.terms.items():
                if overrides(term, LossTerm.make_module):
                    modules[name] = term.make_module(hidden_size())
        return modules

    def state(self) -> dict[str, Any]:
        """Return the memory of every part that has one."""
        return {part: made.state() for part, made in self.parts.items() if overrides(made, UpdatePart.state)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the memory of `state()` of the same parts."""
        for part, memory in state.items():
            self.parts[part].load_state(memory)
