"""One arm of `python -m benchmarks methods`, and the process that runs arms.

The process reads one JSON `ArmWork` per line from standard input and writes one JSON `Made` per line to standard
output:

    python -m benchmarks.methods.arm

An arm trains in the bare loop. Its initial model is made first, once for all arms with the same settings of the model.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
from transformers import PreTrainedModel

from benchmarks.methods.expectations import expected_of
from benchmarks.methods.records import EVAL_SAMPLES, ArmRecord, EvalPoint, MethodArm, UpdatePoint
from benchmarks.methods.tasks import AGENTS, SETTINGS, SUPPLIED, TASKS, TaskOfMethods
from benchmarks.race.bare_loop import BareLoop, training_sample
from rollmesh.demo.config import MadeModelConfig
from rollmesh.demo.make_model import make_model
from rollmesh.mesh.config import MeshConfig
from rollmesh.services.learner.engine import StepResult
from rollmesh.shared.config.loader import config_from_dict, merged
from rollmesh.shared.config.user_code import explain, user_traceback
from rollmesh.shared.domain.trajectory import WHOLE_SAMPLE, Episode, Role, Segment
from rollmesh.trainer.config import PackingConfig
from rollmesh.trainer.feature_pass import computed_features
from rollmesh.trainer.features import FeatureRequest, TokenLogprob
from rollmesh.trainer.forward import ForwardMode, ForwardPlan
from rollmesh.trainer.metrics import kl_k3
from rollmesh.trainer.model_files import load_model
from rollmesh.trainer.recipe import find_recipe, read_recipe
from rollmesh.trainer.samples import build_table
from rollmesh.trainer.self_test import choose_forward

GROUP_SIZE = 8
SAMPLES = 64
"""Samples per update, unless the recipe sets the groups of a batch."""
UPDATES = 64
EVALS = 8
"""Number of evaluations after the one before the first update."""
EVAL_TASKS = 32
KEPT = ("entropy", "ess", "kl", "length/used_mean", "grad_norm", "lr_factor", "loss", "samples/used")
"""Metrics of the trainer that a record keeps, besides the rewards and those of the estimator."""
MODEL_SEED = 0


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """The size of an arm. Recipes with other batches have another number of updates and as many samples in all."""

    updates: int = UPDATES
    evals: int = EVALS
    eval_tasks: int = EVAL_TASKS


class ArmWork(msgspec.Struct, frozen=True, kw_only=True):
    """An arm to run."""

    arm: MethodArm
    commit: str
    settings: str
    size: Size
    models: str
    """Folder of the initial models."""


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a piece of work: the record, and the CPU seconds that it took, with those of making the model."""

    record: ArmRecord
    cpu_s: float


def resolved(arm: MethodArm) -> tuple[MeshConfig, Path, dict[str, Any]]:
    """Return the configuration of an arm, the folder of a user's files, and what `settings_digest` covers. Raises
    ConfigError."""
    file = find_recipe(arm.method)
    about, recipe = read_recipe(file)
    like = expected_of(arm.like).baseline_settings if arm.like else {}
    recipe = merged(recipe, like)
    task = TASKS[arm.task]
    size = recipe.get("run", {}).get("group_size", GROUP_SIZE)
    groups = recipe.get("run", {}).get("batch_groups", max(1, SAMPLES // size))
    run = {"seed": arm.seed, "group_size": size, "batch_groups": groups}
    named = recipe.get("reward", {}).get("weights", {})
    supplied = [dict(scorer) for reward, scorer in SUPPLIED.items() if reward in named]
    reward = {**task.reward, "scorers": [*task.reward["scorers"], *supplied]}
    common = merged(SETTINGS, dict(task.settings))
    recipe_limits = recipe.get("rollout", {}).get("limits", {})
    rollout = {
        "agent": task.agent if about.given_solutions else _agent(recipe),
        **({"limits": recipe_limits} if recipe_limits else {}),
    }
    own = merged(
        common,
        {
            "learner": {"optimizer": {"lr": arm.lr}},
            "rollout": rollout,
            "run": run,
            "data": {**_selector(recipe), **task.data},
            "reward": reward,
        },
    )
    name = str(file) if arm.method.endswith((".yaml", ".yml")) else arm.method
    config = config_from_dict(MeshConfig, {"recipe": name, **merged(like, own)})
    own["run"] = {**own["run"], "seed": 0}
    code = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in _own_files(recipe, file.parent)}
    covered = {"recipe": recipe, "task": own, "model": task.model, "success": task.success, "updates": task.updates}
    return config, file.parent, {**covered, **({"code": code} if code else {})}


def _agent(recipe: Mapping[str, Any]) -> str | dict[str, Any]:
    """Return the agent of a recipe, or the one of the bench in its place."""
    chosen = recipe.get("rollout", {}).get("agent", "tool_calling")
    if isinstance(chosen, str):
        return AGENTS.get(chosen, chosen)
    return {**chosen, "name": AGENTS.get(chosen["name"], chosen["name"])}


def _selector(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Return the setting that replaces a selector of the sources of a mixture, because the tasks here have one."""
    chosen = recipe.get("data", {}).get("selector", "")
    name = chosen if isinstance(chosen, str) else chosen["name"]
    return {"selector": "uniform"} if name == "mixture" else {}


def _own_files(tree: object, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of a user that settings name, such as `mine.py:Mine`."""
    if isinstance(tree, str):
        source, colon, _ = tree.rpartition(":")
        path = folder / Path(source).expanduser()
        if colon and source.endswith(".py") and path.is_file():
            yield source, path
    elif isinstance(tree, Mapping | list):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _own_files(part, folder)


def settings_digest(arm: MethodArm, size: Size) -> str:
    """Return the digest of the settings of the recipe and of the task as they are written, of the files of a user that
    the recipe names, and of the size. It does not cover other code, such as what these files import."""
    _, _, covered = resolved(arm)
    text = msgspec.json.encode({**covered, "size": msgspec.to_builtins(size)}, order="sorted")
    return hashlib.sha256(text).hexdigest()[:16]


def initial_model(task: TaskOfMethods, models: Path) -> Path:
    """Return the folder of the initial model of a task. It is made if it does not exist."""
    plan = config_from_dict(MadeModelConfig, dict(task.model))
    digest = hashlib.sha256(msgspec.json.encode([msgspec.to_builtins(plan), MODEL_SEED])).hexdigest()[:16]
    folder = models / digest
    with (models / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may need the same model
        if not folder.exists():
            make_model(plan, folder, seed=MODEL_SEED, on_step=lambda _: None)
    return folder


async def run_arm(work: ArmWork, model: Path) -> ArmRecord:
    """Train and evaluate. Raises what the method raises."""
    arm, size = work.arm, work.size
    config, base_dir, _ = resolved(arm)
    batch = config.run.batch_groups * config.run.group_size
    num_updates = max(1, round(size.updates * TASKS[arm.task].updates * SAMPLES / batch))
    due = {round(number * num_updates / size.evals) for number in range(size.evals + 1)}
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    task, initial = TASKS[arm.task], load_model(model)
    mode = choose_forward(initial).mode
    evals: list[EvalPoint] = []
    updates: list[UpdatePoint] = []
    tokens = 0.0
    with TemporaryDirectory(prefix="rollmesh-bench-") as folder:
        async with BareLoop(config, model, Path(folder), lag=arm.lag, base_dir=base_dir) as loop:
            for update in range(num_updates + 1):
                if update:
                    result = await loop.update()
                    tokens += result.metrics.get("tokens/trained", 0.0)
                    updates.append(_update_point(result))
                if update in due:
                    episodes = await loop.evaluate(size.eval_tasks, EVAL_SAMPLES)
                    evals.append(eval_point(update, episodes, initial, mode, task.success))
    return ArmRecord(
        commit=work.commit,
        settings=work.settings,
        arm=arm,
        updates_max=num_updates,
        samples=num_updates * batch,
        tokens=int(tokens),
        cpu_s=round(time.process_time() - cpu_s, 2),
        wall_s=round(time.perf_counter() - wall_s, 2),
        evals=tuple(evals),
        updates=tuple(updates),
    )


def eval_point(
    update: int, episodes: Sequence[Episode], initial: PreTrainedModel, mode: ForwardMode, reward: str
) -> EvalPoint:
    """Return the measures of an evaluation."""
    samples = [training_sample(episode, sample, update + 1) for episode in episodes for sample in episode.samples]
    table = build_table(samples, update=update + 1)
    behavior = table.columns["behavior"]
    request = {"initial": FeatureRequest(TokenLogprob())}
    under_initial = computed_features(initial, table, request, ForwardPlan(mode, PackingConfig()))["initial"]
    right = [_value(episode, reward) for episode in episodes]
    by_task: dict[str, list[float]] = {}
    for episode, value in zip(episodes, right, strict=True):
        by_task.setdefault(episode.key.task, []).append(value)
    turns = [turns_of(episode.path_segments(sample)) for episode in episodes for sample in episode.samples]
    num_turns = sum(map(len, turns))
    return EvalPoint(
        update=update,
        success=float(np.mean(right)),
        pass_at_k=float(np.mean([max(values) for values in by_task.values()])),
        length=float(table.lengths.mean()),
        entropy=float(-behavior.mean()),
        kl=kl_k3(under_initial, behavior),
        turns=num_turns / max(1, len(turns)),
        repeated=sum(len(of_sample) - len(set(of_sample)) for of_sample in turns) / max(1, num_turns),
    )


def turns_of(segments: Sequence[Segment]) -> list[tuple[int, ...]]:
    """Return the tokens of each turn of the model. Observations separate turns."""
    found = [(acts, list(turn)) for acts, turn in groupby(segments, lambda segment: segment.role is Role.ACTION)]
    return [tuple(np.concatenate([one.token_ids for one in turn]).tolist()) for acts, turn in found if acts]


def _value(episode: Episode, reward: str) -> float:
    """Return the mean of a reward over the samples of an episode."""
    rewards = [r for sample in episode.samples for r in sample.rewards]
    return float(np.mean([r.value for r in rewards if r.name == reward and r.segment == WHOLE_SAMPLE]))


def _update_point(result: StepResult) -> UpdatePoint:
    kept = {
        name: round(float(value), 6)
        for name, value in result.metrics.items()
        if name in KEPT or name.startswith(("reward/", "estimator/"))
    }
    return UpdatePoint(update=result.update, metrics=kept)


def run_work(work: ArmWork) -> Made:
    """Make the model if needed and run the arm. An exception of the arm is recorded here, and only here."""
    begin_s = time.process_time()
    model = initial_model(TASKS[work.arm.task], Path(work.models))
    arm_begin_s = time.process_time()
    try:
        record = asyncio.run(run_arm(work, model))
    except Exception as error:  # noqa: BLE001 - the recording point: a method that fails must not end the other arms
        record = ArmRecord(
            commit=work.commit,
            settings=work.settings,
            arm=work.arm,
            updates_max=work.size.updates,
            cpu_s=round(time.process_time() - arm_begin_s, 2),
            wall_s=0.0,
            error=f"{explain(error)}\n{user_traceback(error)}",
        )
    return Made(record=record, cpu_s=time.process_time() - begin_s)


def main() -> None:
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin.buffer:
        made = run_work(msgspec.json.decode(line, type=ArmWork))
        sys.stdout.buffer.write(msgspec.json.encode(made) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
