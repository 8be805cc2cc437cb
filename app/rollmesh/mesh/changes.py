"""Settings that differ from those of the recorded run, by dotted key.

The fields of the configuration say which settings may change (`LIVE` in shared/config/settings.py). Settings on which
the history of a run rests are fixed: tasks and their order, what the model is asked and allowed, rewards, batches,
seeds, the model and the recipe. `recorded.json` in the run folder holds the settings that the ledger has recorded. It
is written after the ledger, so after a crash a change may be sent twice. The ledger deduplicates it by its id.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.mesh.config import MeshConfig
from rollmesh.services.coordinator.core.facts import ConfigChange
from rollmesh.shared.config.settings import may_change
from rollmesh.shared.errors import ChangeRefused

RECORDED = "recorded.json"

LISTED = {"reward.finalizer": "reward.finalizers"}
"""Extensions of the release before that are now lists."""
SECRETS = frozenset({"token", "password", "secret"})


def settings_of(config: MeshConfig, run_dir: Path) -> dict[str, str]:
    """Return every setting by dotted key, as JSON. Settings without a value are omitted, and a secret is replaced by a
    hash.

    A model inside the run folder is given relative to it, because the folder may be moved.
    """
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
    """Return the differences, ordered by key.

    A setting that is not in `old` and has its default in `new` is not a change: the release that recorded `old` did not
    have it.
    """
    keys, added = sorted(old.keys() | new.keys()), _defaults()
    return tuple(
        ConfigChange(key=key, old=old.get(key, ""), new=new.get(key, ""))
        for key in keys
        if old.get(key) != new.get(key) and (key in old or new[key] != added.get(key))
    )


@functools.cache
def _defaults() -> dict[str, str]:
    return settings_of(MeshConfig(), Path("/"))


def check_changes(changes: tuple[ConfigChange, ...]) -> None:
    """Raise ChangeRefused that names every changed setting that is fixed, with the remedy."""
    fixed = [change for change in changes if not may_change(MeshConfig, change.key)]
    if fixed:
        listed = "; ".join(f"`{change.key}` {describe(change)}" for change in fixed)
        raise ChangeRefused(
            f"{listed}: fixed after the run began, because its history depends on it "
            "(docs/reference/configuration.md lists what may change); set it back, or train a new run with it",
            keys=",".join(change.key for change in fixed),
        )


def describe(change: ConfigChange) -> str:
    return f"{change.old or '(none)'} -> {change.new or '(none)'}"


def change_id(changes: tuple[ConfigChange, ...]) -> str:
    """Return an id that depends only on the changes."""
    return hashlib.sha256(msgspec.json.encode(changes)).hexdigest()[:32]


def recorded(run_dir: Path) -> dict[str, str] | None:
    """Return the settings that the ledger has recorded; None before the run was created."""
    try:
        return _with_lists(msgspec.json.decode((run_dir / RECORDED).read_bytes(), type=dict[str, str]))
    except FileNotFoundError:
        return None


def _with_lists(settings: dict[str, str]) -> dict[str, str]:
    """Return the settings with each extension of `LISTED` as the list that replaced it."""
    for old, new in LISTED.items():
        options: dict[str, Any] = {}
        for key in [key for key in settings if key.startswith(f"{old}.options.")]:
            *outer, last = key.removeprefix(f"{old}.options.").split(".")
            holder = options
            for name in outer:
                holder = holder.setdefault(name, {})
            holder[last] = json.loads(settings[key])
        if f"{old}.name" in settings:
            choice = {"name": json.loads(settings[f"{old}.name"]), "options": options}
            settings = {key: value for key, value in settings.items() if not key.startswith(f"{old}.")}
            settings[new] = json.dumps([choice])
    return settings


def note_recorded(run_dir: Path, settings: dict[str, str]) -> None:
    """Store the settings that the ledger has recorded."""
    # Processes of one run may start together.
    descriptor, partial = tempfile.mkstemp(dir=run_dir, prefix=f".{RECORDED}-")
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(settings), indent=1) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, run_dir / RECORDED)
