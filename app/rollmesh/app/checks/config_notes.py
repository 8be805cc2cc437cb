"""Remarks about a valid configuration: values that are rarely meant, limits that do not fit into each other, and names
that nothing uses. `config_checks` finds the mistakes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollmesh.app.checks.config_checks import load_scorer
from rollmesh.app.checks.task_survey import TaskSurvey
from rollmesh.app.config import TrainConfig
from rollmesh.mesh.mesh_services import reward_config
from rollmesh.services.data.selector import SELECTORS
from rollmesh.services.data.task import Split
from rollmesh.services.reward.graph import ScorerGraph
from rollmesh.services.reward.oracles import Oracles, file_oracles
from rollmesh.services.reward.scorer import SCORERS
from rollmesh.services.reward.scorers.tests import TestsOptions
from rollmesh.services.sandbox.oracle.manifest import PROFILE, TIME_LIMITS_MAX

LR_UNUSUAL = 0.1
"""Learning rate above which a note is printed."""
_TASKS_NAMED = 4


def notes(config: TrainConfig, base_dir: Path, tasks: TaskSurvey) -> list[str]:
    """Return remarks about a valid configuration, a line each."""
    run = config.run
    lines = (
        *_missing_nodes(config, tasks.first_tools),
        *_unusual_values(config, tasks.num_tasks[Split.TRAIN]),
        *_contradictions(config, base_dir, tasks),
        *_unused_names(config, tasks),
    )
    found = [f"note: {line}" for line in lines]
    size = tasks.num_tasks[Split(run.eval_split)]
    if run.eval_every and 0 < size < run.eval_tasks:
        found.append(
            f"note: run.eval_tasks is {run.eval_tasks}, but the {run.eval_split} split has {size} tasks; all {size} "
            "are used"
        )
    return found + [f"note: {line}" for line in _scoring_times(config, base_dir)]


def _scoring_times(config: TrainConfig, base_dir: Path) -> Iterator[str]:
    """Yield the time limits of scoring that cannot fit into each other."""
    graph = ScorerGraph([load_scorer(scorer, index, base_dir) for index, scorer in enumerate(config.reward.scorers)])
    longest_s = graph.longest_s([scorer.timeout_s for scorer in config.reward.scorers])
    if longest_s >= (score_s := config.rollout.stages.score_s_max):
        yield (
            f"the scorers may take {longest_s:g} s (`reward.scorers[].timeout_s` of scorers that read each other), but "
            f"rollout.stages.score_s_max is {score_s:g} s: a slow answer can end its episode as an infra failure "
            "instead of with a reward; raise score_s_max, or lower timeout_s"
        )
    for index, scorer in enumerate(config.reward.scorers):
        options = SCORERS.options(scorer, base_dir)
        if not isinstance(options, TestsOptions):
            continue
        if scorer.timeout_s >= (most := config.reward.sandbox.judgment_s_max):
            yield (
                f"reward.scorers[{index}].timeout_s is {scorer.timeout_s:g} s, but reward.sandbox.judgment_s_max ends "
                f"a judgment after {most:g} s as an infra failure; raise judgment_s_max, or lower timeout_s"
            )
        if (profile := config.sandbox.profiles.get(PROFILE)) is not None:
            call_s = min(options.wall_s or math.inf, profile.resolved_limits().call_s)
            if call_s * TIME_LIMITS_MAX > scorer.timeout_s:
                yield (
                    f"reward.scorers[{index}].timeout_s is {scorer.timeout_s:g} s, but {TIME_LIMITS_MAX} hidden tests "
                    f"(`time_limits_max`) may take {call_s:g} s each (limits.call_s of sandbox profile `{PROFILE}`): "
                    "tests after timeout_s count as TLE; raise timeout_s, or lower call_s or wall_s of the manifests"
                )


def _missing_nodes(config: TrainConfig, tools: Sequence[str]) -> Iterator[str]:
    """Yield the kinds of nodes that must join from another host."""
    needed = {
        "inference": "",
        "rollout": "",
        **({"sandbox": f", and tasks use the tool `{tools[0]}`"} if tools else {}),
    }
    for kind, why in needed.items():
        if not getattr(config.counts, kind):
            yield f"counts.{kind} is 0{why}: the run waits until one joins (rollmesh serve {kind} --join HOST:PORT)"


def _unusual_values(config: TrainConfig, num_tasks: int) -> Iterator[str]:
    """Yield the values that are legal and rarely meant."""
    run, sampling, limits = config.run, config.rollout.sampling, config.rollout.limits
    if not sampling.temperature and not run.export_groups:
        yield (
            "rollout.sampling.temperature is 0, so the answers of a group are equal and train nothing (ZERO_VARIANCE) "
            "unless the agent sets another; 1 is the default"
        )
    if sampling.max_tokens > limits.context_tokens_max:
        yield (
            f"rollout.sampling.max_tokens is {sampling.max_tokens}, but rollout.limits.context_tokens_max ends every "
            f"turn at {limits.context_tokens_max} tokens with its prompt; lower it, or raise the limit and "
            "inference.engine.options.context_max"
        )
    if not run.export_groups and config.learner.optimizer.lr > LR_UNUSUAL:
        yield (
            f"learner.optimizer.lr is {config.learner.optimizer.lr:g}, and models rarely learn above {LR_UNUSUAL:g}; "
            "1e-6 is the default"
        )
    most, every = run.replay.max_staleness if run.replay else "unlimited", config.learner.checkpoint_every
    if run.replay is not None and not run.replay.made.once and most != "unlimited" and most < every:
        yield (
            f"run.replay.max_staleness is {most}, but samples enter the replay log up to {every} updates "
            "(learner.checkpoint_every) after theirs, so most of them are too old; lower it, or raise the bound"
        )
    if not run.export_groups and not run.submitted_tasks and run.batch_groups > num_tasks:
        yield (
            f"run.batch_groups is {run.batch_groups}, but the train split has {num_tasks} tasks; a batch repeats tasks"
        )


def _contradictions(config: TrainConfig, base_dir: Path, tasks: TaskSurvey) -> Iterator[str]:
    """Yield a line about prompts that several tasks have, with different answers."""
    if not tasks.repeated:
        return
    oracles = Oracles(file_oracles(reward_config(config).answer_files, base_dir))
    keys = oracles.resolve_records([task.oracle_ref for same in tasks.repeated for task in same])
    wrong = [same for same in tasks.repeated if len({keys[task.oracle_ref].answers for task in same}) > 1]
    if wrong:
        names = ", ".join(task.task_id for task in wrong[0][:_TASKS_NAMED])
        yield (
            f"{len(wrong)} prompts have several answers in data.source, such as that of the tasks {names}; each "
            "answer fails the others"
        )


def _unused_names(config: TrainConfig, tasks: TaskSurvey) -> Iterator[str]:
    """Yield the agents that no task has, and the tasks that an evaluation counts as failures because they do not have
    the reward that it reads."""
    rollout, success = config.rollout, config.run.success_reward
    for name in () if config.run.submitted_tasks else rollout.agents:
        named = name in tasks.by_agent or any(variant.agent == name for variant in config.run.variants)
        if not named and name != rollout.agent.name and config.data.selector.name in SELECTORS.names:
            yield f"rollout.agents.{name}: no task names this agent, and rollout.agent is another"
    task = next(
        (
            task
            for (split, scorers), task in tasks.scored_by.items()
            if split == config.run.eval_split and scorers and success not in scorers
        ),
        None,
    )
    if task is not None and config.run.eval_every and success in [one.reward_name for one in config.reward.scorers]:
        yield (
            f"run.success_reward is {success}, but `scorers` of tasks such as {task.task_id} of the "
            f"{config.run.eval_split} split lack it: evaluations count them as failures; add it to `scorers`"
        )
