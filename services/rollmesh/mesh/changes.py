"""Which settings may differ when a run goes on, and what did: by dotted key.

What the history of a run rests on is fixed: its tasks and their order, what the model is asked and allowed, what a reward means, batches,
seeds, the model and the recipe. Limits, terms, capacities, addresses, counts of nodes and the optimiser's numbers may change.
`recorded.json` in the run folder holds the settings as the ledger knows them. It is written after the ledger: a crash in between tells a
change again, which the ledger knows by its id, and never loses one.

The table is the first match of FIXED, then FREE. Sections that decide what is learnt (`SECTIONS_JUDGED`) must be in it in full: an unknown
key of theirs is fixed. All other sections are free.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.mesh.config import MeshConfig
from rollmesh.services.coordinator.core.changes import MAY_CHANGE
from rollmesh.services.coordinator.core.facts import ConfigChange
from rollmesh.shared.errors import ChangeRefused

RECORDED = "recorded.json"

FIXED = (
    "run.name",
    "run.seed",
    "run.policy",
    "run.learner",
    "run.beyond",
    "run.batch_groups",
    "run.group_size",
    "run.eval_tasks",
    "run.eval_split",
    "run.success_reward",
    "run.export_*",
    "model",
    "made_model*",
    "data.source.*",
    "data.selector.*",
    "data.seed",
    "data.success_reward",
    "reward.scorers",
    "reward.weights.*",
    "reward.finalizer.*",
    "reward.answer_files.*",
    "reward.oracles.*",
    "rollout.agent.*",
    "rollout.model_dir",
    "rollout.tools.*",
    "rollout.format.*",
    "rollout.sampling.*",
    "rollout.eval_sampling*",
    "rollout.limits.*",
    "sandbox.profiles.*",
    "sandbox.oracles",
    "sandbox.egress.*.rules*",
    "sandbox.egress.*.retrieval*",
    "learner.engine",
    "learner.engine_options.*",
    "learner.model",
    "learner.recipe",
    "learner.recipe_options.optimizer.name",
    "learner.seed",
)
FREE = (
    *(f"run.{name}" for name in sorted(MAY_CHANGE)),
    "run.on_stall",
    "run.first_failures_max",
    "data.epochs_max",
    "data.catch_up_s_max",
    "data.runs_max",
    "data.snapshot*",
    "reward.concurrency_max",
    "reward.queue_samples_max",
    "reward.sandboxes",
    "reward.sandbox.*",
    "rollout.session_ttl_s",
    "rollout.stages.*",
    "rollout.worker.*",
    "rollout.router.*",
    "rollout.sandbox.*",
    "rollout.reward.*",
    "rollout.tool_latency.*",
    "learner.directory",
    "learner.device",
    "learner.threads",
    "learner.checkpoint_every",
    "learner.keep_last",
    "learner.quarantined_max",
    "learner.wait_s",
    "learner.stop_s",
    "learner.tensorboard",
    "learner.publish.*",
    "learner.retry.*",
    "learner.recipe_options.optimizer.*",
    "learner.recipe_options.packing.*",
    "learner.recipe_options.report_entropy",
)
SECTIONS_JUDGED = frozenset({"model", "made_model", "run", "data", "reward", "rollout", "learner"})


SECRETS = frozenset({"token", "password", "secret"})


def may_change(key: str) -> bool:
    """Whether a run may go on with another value of `key`."""
    if any(fnmatchcase(key, pattern) for pattern in FIXED):
        return False
    return key.partition(".")[0] not in SECTIONS_JUDGED or any(fnmatchcase(key, pattern) for pattern in FREE)


def settings_of(config: MeshConfig, run_dir: Path) -> dict[str, str]:
    """Every setting by dotted key, as JSON; one that is not set is left out, a secret is a hash. A model inside the run folder is named relative to it: the folder may be moved."""
    tree = msgspec.to_builtins(config)
    model = Path(tree["model"])
    if model.is_absolute() and model.is_relative_to(run_dir):
        tree["model"] = str(model.relative_to(run_dir))
    found: dict[str, str] = {}
    _flatten("", tree, found)
    return found


def _flatten(prefix: str, value: Any, found: dict[str, str]) -> None:
    if isinstance(value, dict):
        for key, below in value.items():
            _flatten(f"{prefix}.{key}" if prefix else str(key), below, found)
    elif value is not None:
        secret = value and prefix.rpartition(".")[2] in SECRETS
        found[prefix] = json.dumps(f"secret {hashlib.sha256(str(value).encode()).hexdigest()[:8]}" if secret else value)


def diff(old: dict[str, str], new: dict[str, str]) -> tuple[ConfigChange, ...]:
    """What differs, in the order of keys."""
    keys = sorted(old.keys() | new.keys())
    return tuple(
        ConfigChange(key=key, old=old.get(key, ""), new=new.get(key, ""))
        for key in keys
        if old.get(key) != new.get(key)
    )


def check_changes(changes: tuple[ConfigChange, ...]) -> None:
    """Raises ChangeRefused naming every setting that is fixed, with the remedy."""
    fixed = [change for change in changes if not may_change(change.key)]
    if fixed:
        told = "; ".join(f"`{change.key}` {describe(change)}" for change in fixed)
        raise ChangeRefused(
            f"{told}: fixed for the life of a run, since its history rests on it (docs/operations.md lists what may change); "
            "set it back, or train a new run with it",
            keys=",".join(change.key for change in fixed),
        )


def describe(change: ConfigChange) -> str:
    return f"{change.old or '(none)'} -> {change.new or '(none)'}"


def change_id(changes: tuple[ConfigChange, ...]) -> str:
    """The same for the same changes."""
    return hashlib.sha256(msgspec.json.encode(changes)).hexdigest()[:32]


def recorded(run_dir: Path) -> dict[str, str] | None:
    """The settings that the ledger knows; None before the run was made."""
    try:
        return msgspec.json.decode((run_dir / RECORDED).read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return None


def note_recorded(run_dir: Path, settings: dict[str, str]) -> None:
    """The ledger knows `settings` now."""
    descriptor, partial = tempfile.mkstemp(
        dir=run_dir, prefix=f".{RECORDED}-"
    )  # processes of one run may start together
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(settings), indent=1) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, run_dir / RECORDED)
