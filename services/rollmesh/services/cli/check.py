"""Finding a run's mistakes before it begins: each is one error that names the key and the remedy.

Sections are checked by their own types when they are read; here is what takes more: files, users' objects, the model,
and what two sections must agree on. Nothing is started or written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollmesh.services.cli.config import TrainConfig
from rollmesh.services.data.config import build_pools, build_selector
from rollmesh.services.data.task import Split, TaskPool
from rollmesh.services.inference.config import InferenceConfig
from rollmesh.services.learner.config import TORCH_TRAINER
from rollmesh.services.learner.engine import find_engine
from rollmesh.services.mesh.parts import reward_config
from rollmesh.services.reward.config import build_engine as build_reward_engine
from rollmesh.services.reward.scorer import SCORERS
from rollmesh.services.rollout.agent import load_agent
from rollmesh.services.rollout.tokenizer import load_tokenizer
from rollmesh.shared.config import config_from_dict
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.objects import load_object


def check(config: TrainConfig, base_dir: Path) -> None:
    """Raises ConfigError, or RecordError for a malformed line of a task file. Loads the model, if one is named."""
    pools = build_pools(config.data, base_dir)
    build_selector(config.data, pools[Split.TRAIN], base_dir)
    _check_evaluation(config, pools)
    _check_tools(config, pools[Split.TRAIN])
    _check_rewards(config, base_dir)
    load_agent(config.rollout.agent, config.rollout.agent_options, base_dir)
    _check_engine(config, base_dir)
    _check_learner(config)
    _check_model(config, base_dir)


def _check_evaluation(config: TrainConfig, pools: dict[Split, TaskPool]) -> None:
    run = config.run
    if run.eval_split not in set(Split):
        raise ConfigError(
            f"`run.eval_split`: {run.eval_split!r} is no split; known: {', '.join(Split)}", key="run.eval_split"
        )
    if run.eval_every and run.eval_tasks and not len(pools[Split(run.eval_split)]):
        raise ConfigError(
            f"`run.eval_split`: the source has no task in the {run.eval_split} split; give it some, name another split, "
            "or set run.eval_every=0",
            key="run.eval_split",
        )


def _check_tools(config: TrainConfig, pool: TaskPool) -> None:
    known = config.rollout.tools
    for name in pool.task(0).tools if len(pool) else ():
        if name not in known:
            raise ConfigError(
                f"`data.source.tools`: there is no tool `{name}`; known: {', '.join(known) or 'none'}; "
                "describe it in rollout.tools",
                key="data.source.tools",
            )
        if known[name].profile not in config.sandbox.profiles:
            raise ConfigError(
                f"`rollout.tools.{name}.profile`: there is no sandbox profile `{known[name].profile}`; known: "
                f"{', '.join(config.sandbox.profiles)}",
                key=f"rollout.tools.{name}.profile",
            )
        if not config.counts.sandbox:
            raise ConfigError(
                f"`counts.sandbox`: 0, but tasks use the tool `{name}`; set it to 1", key="counts.sandbox"
            )


def _check_rewards(config: TrainConfig, base_dir: Path) -> None:
    engine = build_reward_engine(reward_config(config), base_dir)
    asyncio.run(engine.close())
    names = [
        name for scorer in config.reward.scorers for name in _reward_names(scorer.scorer, scorer.reward_name, base_dir)
    ]
    if config.run.success_reward not in names:
        raise ConfigError(
            f"`run.success_reward`: no scorer gives a reward called `{config.run.success_reward}`; "
            f"known: {', '.join(names)}",
            key="run.success_reward",
        )


def _reward_names(scorer: str, name: str, base_dir: Path) -> Sequence[str]:
    return (name, *getattr(SCORERS.find(scorer, base_dir), "rewards", ()))


def _check_engine(config: TrainConfig, base_dir: Path) -> None:
    inference = config.inference
    load_object(inference.engine, base_dir)
    if not inference.engine.endswith(":TorchEngine"):
        return
    options = _engine_options(inference, base_dir)
    longest = config.rollout.limits.context_tokens_max
    if longest > options.context_max:
        raise ConfigError(
            f"`rollout.limits.context_tokens_max`: {longest} is beyond the engine's context of {options.context_max} tokens; "
            "lower it, or raise inference.engine_options.context_max",
            key="rollout.limits.context_tokens_max",
        )


def _engine_options(inference: InferenceConfig, base_dir: Path) -> Any:
    type_ = load_object(inference.engine_config, base_dir)
    try:
        return config_from_dict(type_, {"model": "-", **inference.engine_options})
    except ConfigError as err:
        key = "inference.engine_options"
        raise ConfigError(f"`{key}`: {err.message}", violations=err.violations, key=key) from err


def _check_learner(config: TrainConfig) -> None:
    learner = config.learner
    find_engine(learner.engine)
    if learner.engine != TORCH_TRAINER:
        return
    if learner.engine_options:
        raise ConfigError(
            "`learner.engine_options`: the torch trainer has none; remove them", key="learner.engine_options"
        )
    from rollmesh.services.learner.engines.recipe import resolve_recipe

    try:
        resolve_recipe(learner.recipe, learner.recipe_options)
    except ConfigError as err:
        raise ConfigError(f"`learner`: {err.message}", violations=err.violations, key="learner") from err


def _check_model(config: TrainConfig, base_dir: Path) -> None:
    """A model that is made on the spot has its settings checked, another is loaded."""
    if config.made_model is not None:
        _check_made_model(config)
    elif config.learner.engine == TORCH_TRAINER or config.inference.engine.endswith(":TorchEngine"):
        _load(config, base_dir)


def _check_made_model(config: TrainConfig) -> None:
    from rollmesh.services.cli.make_model import resolve

    assert config.made_model is not None
    resolve(config.made_model)
    mine, theirs = config.made_model.tasks, config.data.source
    if (
        mine is not None
        and isinstance(theirs, type(mine))
        and (mine.validation_share, mine.test_share) != (theirs.validation_share, theirs.test_share)
    ):
        raise ConfigError(
            "`made_model.tasks`: validation_share and test_share must equal those of data.source, or the warm start sees "
            "test tasks",
            key="made_model.tasks",
        )


def _load(config: TrainConfig, base_dir: Path) -> None:
    if not config.model:
        raise ConfigError(
            "`model`: name a folder with a model in transformers format, or give `made_model`", key="model"
        )
    folder = (base_dir / config.model).resolve()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"`model`: {folder} holds no config.json; name a folder with a model in transformers format", key="model"
        )
    load_tokenizer(folder)
    from rollmesh.trainer.model_files import load_model

    try:
        load_model(folder)
    except ValueError as err:
        raise ConfigError(f"`model`: {err}; the folder must be one that transformers loads", key="model") from err
