"""`rollmesh check --dry-run`: run one episode of a configuration, from the tokenizer to the rewards, before any
training.

It is `rollmesh rollout -n 1` in a temporary folder: every service in this process, with the real model, agent, tools
and scorers. A model of `made_model` is replaced by one with random weights: its output is noise, but all other parts
run. Then the estimator gets a group of copies of the episode. Collaborators: `export_run` (runs the episode), `causes`
(describes a failure).
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from rollmesh.app.config import TrainConfig
from rollmesh.app.samples.export_run import RolloutOptions, RolloutSummary, prepare, run_rollout
from rollmesh.app.samples.samples import ACTION, SampleLine, rewards_of, summary_of_line
from rollmesh.demo.config import MadeModelConfig
from rollmesh.services.reward.config import shown_name
from rollmesh.services.reward.finalizer_list import call_group_code
from rollmesh.shared.domain.text import short_labels
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome
from rollmesh.shared.errors import ConfigError, GroupCodeFailed
from rollmesh.trainer.estimators import Estimator, make_estimator

EPISODE_S_MARGIN = 60.0
"""Added to the time limit of the episode, for the start of the services and for scoring."""

MEMBERS = 2
"""Number of copies of the episode in the group that the estimator gets, because a baseline needs more than one."""

_NOT_AWAITED = re.compile(r"coroutine '(?:.*\.)?Environment\.(\w+)' was never awaited")


def run_dry(
    path: Path,
    overrides: Sequence[str],
    *,
    on_sample: Callable[[SampleLine], None],
    on_phase: Callable[[str], None],
) -> None:
    """Roll out the first training task once, and call the estimator. Raises ConfigError with the cause and the user's
    traceback if that fails."""
    with tempfile.TemporaryDirectory(prefix="rollmesh-dry-run-") as folder:
        options = RolloutOptions(num=1, split="train", folder=Path(folder) / "run")
        run_folder, config, base_dir = prepare(path, overrides, options, ["check", "--dry-run"])
        config = _once(config, Path(folder) / "model")
        lines: list[SampleLine] = []

        def take(line: SampleLine) -> None:
            lines.append(line)
            on_sample(line)

        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", RuntimeWarning)
            summary = run_rollout(run_folder, config, base_dir, None, on_sample=take, on_phase=on_phase)
    if summary.interrupted:
        return
    refuse_not_awaited([str(one.message) for one in found])
    _refuse_failure(summary)
    refuse_no_action(lines)
    if lines:
        estimator = make_estimator(config.learner.estimator, config.reward.weights, base_dir)
        call_estimator(config.learner.estimator.name, estimator, lines, text_chars=config.rollout.summary_text_chars)


def call_estimator(name: str, estimator: Estimator, lines: Sequence[SampleLine], *, text_chars: int = 0) -> None:
    """Call the estimator on a group of `MEMBERS` copies of the samples. Raises ConfigError with its error and the
    user's lines."""
    members = tuple(
        MemberOutcome(
            sample_id=f"{line.sample_id}.{copy}",
            rewards=rewards_of(line),
            end="ready",
            episode=str(copy),
            summary=summary_of_line(line, text_chars=text_chars),
        )
        for copy in range(MEMBERS)
        for line in lines
    )
    labels = short_labels(lines[0].labels)
    group = GroupContext(group=lines[0].group, task=lines[0].task, members=members, labels=labels)
    try:
        call_group_code(f"estimator {shown_name(name)}", estimator.of_group, group)
    except GroupCodeFailed as err:
        raise ConfigError(f"the dry run's group failed: {err}") from err


def refuse_not_awaited(messages: Sequence[str]) -> None:
    """Raise ConfigError if a warning of Python is about a call of the environment without `await`, which does
    nothing."""
    for message in messages:
        if match := _NOT_AWAITED.search(message):
            name = match[1]
            raise ConfigError(
                f"the dry run's episode failed: {name} was not awaited; write `await env.{name}(...)` in the agent"
            )


def refuse_no_action(lines: Sequence[SampleLine]) -> None:
    """Raise ConfigError if the model generated nothing."""
    if not any(segment.role == ACTION for line in lines for segment in line.segments):
        raise ConfigError(
            "the dry run's episode failed: the agent returned without a turn; it must call `await env.generate()`"
        )


def _once(config: TrainConfig, model: Path) -> TrainConfig:
    """Limit the run to one attempt and a bounded time, and replace a model of `made_model` by random weights."""
    run = msgspec.structs.replace(
        config.run, tries_max=1, seconds_max=config.rollout.limits.run_s_max + EPISODE_S_MARGIN
    )
    config = msgspec.structs.replace(config, run=run)
    if config.made_model is None:
        return config
    _draw_model(config.made_model, model, seed=run.seed)
    return msgspec.structs.replace(config, made_model=None, model=str(model))


def _draw_model(plan: MadeModelConfig, folder: Path, *, seed: int) -> None:
    from rollmesh.demo.make_model import resolve
    from rollmesh.demo.tiny_model import build_tiny_model
    from rollmesh.demo.tokenizer import build_tokenizer
    from rollmesh.trainer.model_files import write_model_folder

    shape, _ = resolve(plan)
    folder.mkdir()
    tokenizer = build_tokenizer(model_max_length=shape.context_max)
    write_model_folder(build_tiny_model(shape, seed=seed), tokenizer, folder)


def _refuse_failure(summary: RolloutSummary) -> None:
    if summary.samples.get("exported") or summary.samples.get("filtered"):  # filtered: without a turn
        return
    cause = summary.failure or f"it produced no sample: {summary.ended or 'the run did not end'}"
    raise ConfigError(f"the dry run's episode failed: {cause}")
