"""The effective configuration: every setting with its value, and the most important ones in a line.

Options of engines, recipes, agents, scorers, finalizers and selectors include their defaults. The conversation format
is that of the model's chat template.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from rollmesh.app.checks.config_checks import engine_options
from rollmesh.app.checks.disk_need import weights_of
from rollmesh.app.checks.model_checks import model_folder
from rollmesh.app.config import TrainConfig
from rollmesh.mesh.config import MeshConfig
from rollmesh.mesh.tool_descriptions import rollout_config
from rollmesh.services.data.selector import SELECTORS
from rollmesh.services.data.source import SOURCES
from rollmesh.services.learner.config import LearnerConfig
from rollmesh.services.learner.engine import TRAINERS
from rollmesh.services.reward.finalizer import FINALIZERS
from rollmesh.services.reward.oracles import ORACLES
from rollmesh.services.reward.scorer import SCORERS
from rollmesh.services.rollout.agent import AGENTS
from rollmesh.services.rollout.chat_format import ChatFormat
from rollmesh.services.rollout.config import FormatConfig
from rollmesh.services.rollout.tokenizer import load_tokenizer
from rollmesh.trainer.estimators import ESTIMATORS

_MADE_TURN_END = "<|end|>"
"""Stop token of the model that `made_model` creates."""


def effective_config(config: TrainConfig, base_dir: Path) -> TrainConfig:
    """Return the configuration with every default written out. `config` must have passed `check`."""
    replace = msgspec.structs.replace
    reward, data, rollout = config.reward, config.data, rollout_config(config)

    oracles = {scheme: ORACLES.with_defaults(oracle, base_dir) for scheme, oracle in reward.oracles.items()}
    scorers = tuple(SCORERS.with_defaults(scorer, base_dir) for scorer in reward.scorers)
    finalizers = tuple(FINALIZERS.with_defaults(finalizer, base_dir) for finalizer in reward.finalizers)
    words = chat_format(config, base_dir)
    return replace(
        config,
        reward=replace(reward, scorers=scorers, oracles=oracles, finalizers=finalizers),
        data=replace(
            data,
            source=SOURCES.with_defaults(data.source, base_dir),
            selector=SELECTORS.with_defaults(data.selector, base_dir),
        ),
        rollout=replace(
            rollout,
            agent=(
                rollout.agent if rollout.agent.name in rollout.agents else AGENTS.with_defaults(rollout.agent, base_dir)
            ),
            agents={name: AGENTS.with_defaults(agent, base_dir) for name, agent in rollout.agents.items()},
            format=_as_config(words) if words is not None else rollout.format,
        ),
        inference=replace(config.inference, engine=replace(config.inference.engine, options=_engine(config, base_dir))),
        learner=effective_learner(config, base_dir),
    )


def headline(config: TrainConfig, base_dir: Path) -> str:
    """Return model, recipe, learning rate, stop token, context and bound in a line."""
    engine = _engine(config, base_dir)
    context = engine.get("context_max") or config.rollout.limits.context_tokens_max
    words = chat_format(config, base_dir)
    ends = " ".join(words.turn_ends) if words is not None else _MADE_TURN_END if config.made_model is not None else "?"
    parts = [
        _model(config, base_dir),
        *_recipe_lines(config, base_dir),
        f"stop token {ends}",
        f"context {context}",
        f"bound {config.run.max_staleness}",
        f"payloads in {'files' if config.payloads_in_files else 'the stream'}",
    ]
    return ", ".join(part for part in parts if part)


def chat_format(config: TrainConfig, base_dir: Path) -> ChatFormat | None:
    """Return the conversation format of the model; None for a model of `made_model` and without a model."""
    if config.made_model is not None or not (config.model or config.rollout.model_dir):
        return None
    folder = base_dir / config.rollout.model_dir if config.rollout.model_dir else model_folder(config, base_dir)
    return load_tokenizer(folder.resolve(), config.rollout.format).format


def _as_config(words: ChatFormat) -> FormatConfig:
    return FormatConfig(
        turn_end=words.turn_end,
        tool_call_start=words.tool_call_start,
        tool_call_end=words.tool_call_end,
        tool_call_body=words.tool_call_body,
        tool_call_separator=words.tool_call_separator,
        observation=words.observation,
        tool_role=words.tool_role,
        assistant_role=words.assistant_role,
    )


def _engine(config: TrainConfig, base_dir: Path) -> dict[str, Any]:
    """Return the engine's options with their defaults, without the model's folder, which the run sets.

    A host that starts no engine need not have its libraries; the options are then those of the configuration.
    """
    if not config.counts.inference:
        return config.inference.engine.options
    options = _builtins(engine_options(config.inference, base_dir))
    if "model" not in config.inference.engine.options:
        options.pop("model", None)
    return options


def effective_learner(config: MeshConfig, base_dir: Path) -> LearnerConfig:
    """Return the learner's settings with the options of its trainer, of its estimator and, if they are used, of the
    other parts."""
    learner = config.learner
    estimator, engine = (
        ESTIMATORS.with_defaults(learner.estimator, base_dir),
        TRAINERS.with_defaults(learner.engine, base_dir),
    )
    learner = msgspec.structs.replace(learner, engine=engine, estimator=estimator)
    if not TRAINERS.find(learner.engine.name, base_dir).trains_model:
        return learner
    from rollmesh.trainer.features import FEATURES
    from rollmesh.trainer.losses import LOSSES
    from rollmesh.trainer.update_rules import UPDATE_RULES

    return msgspec.structs.replace(
        learner,
        loss=tuple(LOSSES.with_defaults(term, base_dir) for term in learner.loss),
        update_rule=UPDATE_RULES.with_defaults(learner.update_rule, base_dir),
        features={name: FEATURES.with_defaults(choice, base_dir) for name, choice in learner.features.items()},
    )


def _recipe_lines(config: TrainConfig, base_dir: Path) -> list[str]:
    if not TRAINERS.find(config.learner.engine.name, base_dir).trains_model:
        return []
    terms = " + ".join(term.short_name for term in config.learner.loss)
    return [f"{config.recipe} with loss {terms}", f"lr {config.learner.optimizer.lr:g}"]


def _model(config: TrainConfig, base_dir: Path) -> str:
    if config.made_model is not None:
        return "a model created for the run"
    if not config.model:
        return "no model"
    folder = model_folder(config, base_dir)
    _, number = weights_of(folder)
    # A run and a fine-tuning write their results into `model`, which does not say whose model it is.
    name = f"{folder.parent.name}/model" if folder.name == "model" else folder.name
    return f"model {name} with {_short(number)} parameters" if number else f"model {name}"


def _short(number: int) -> str:
    for factor, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= factor:
            return f"{number / factor:.3g}{letter}"
    return str(number)


def _builtins(value: object) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(value) if value is not None else {}
    return found
