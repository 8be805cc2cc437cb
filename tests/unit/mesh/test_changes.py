"""Which settings may differ when a run goes on: the table is whole, and what is recorded holds no secret and no
place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.app.config import TrainConfig
from rollmesh.demo.config import MadeModelConfig
from rollmesh.mesh.changes import _flatten, check_changes, diff, note_recorded, recorded, settings_of
from rollmesh.mesh.config import MeshConfig, RunConfig
from rollmesh.services.coordinator.core.facts import ConfigChange
from rollmesh.services.coordinator.core.records import RunSpec
from rollmesh.services.learner.config import LearnerConfig
from rollmesh.services.reward.config import RewardConfig
from rollmesh.services.rollout.config import RolloutConfig, SamplingConfig
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.config.settings import may_change
from rollmesh.shared.errors import ChangeRefused

WHOLE = TrainConfig(
    made_model=MadeModelConfig(shape={"hidden_size": 8}),
    rollout=RolloutConfig(agent=Extension("single_turn", {"a": 1}), eval_sampling=SamplingConfig()),
    learner=LearnerConfig(estimator=Extension("grpo", {"epsilon": 1e-3})),
)


JUDGED = {"model", "made_model", "run", "data", "reward", "rollout", "learner"}


def test_settings_that_decide_what_is_learned_are_fixed_unless_marked() -> None:
    keys = [key for key in settings_of(WHOLE, Path("/")) if key.partition(".")[0] in JUDGED]
    live = {key for key in keys if may_change(MeshConfig, key)}
    assert len(keys) > 80
    sections = (
        *("rollout.stages", "rollout.worker", "rollout.router", "rollout.sandbox", "rollout.reward"),
        *("rollout.tool_latency", "learner.publish", "learner.retry", "reward.sandbox", "reward.router"),
        *("learner.optimizer", "learner.packing", "learner.compute"),
    )
    recipe = {"learner.optimizer.lr", "learner.packing.row_tokens", "learner.report_entropy"}
    single = {key for key in live - recipe if not key.startswith(sections) and not key.startswith("run.")}
    assert recipe <= live
    assert single == {
        *("data.epochs_max", "data.catch_up_s_max", "data.runs_max", "data.snapshot_records"),
        *("reward.concurrency_max", "reward.queue_samples_max", "rollout.session_ttl_s"),
        *("learner.directory", "learner.device", "learner.threads", "learner.checkpoint_every", "learner.keep_last"),
        *("learner.checkpoint_async", "learner.external_sources"),
        *(
            "learner.quarantined_max",
            "learner.wait_s",
            "learner.stop_s",
            "learner.tensorboard",
            "learner.prefetch_bytes_max",
        ),
    }


def test_a_setting_that_the_recording_release_did_not_have_is_a_change_only_if_it_was_set() -> None:
    now = settings_of(MeshConfig(), Path("/"))
    before = {key: value for key, value in now.items() if key != "run.batch_groups"}
    assert diff(before, now) == ()
    assert [change.key for change in diff(before, now | {"run.batch_groups": "9"})] == ["run.batch_groups"]
    assert not list(_set_optionals(msgspec.inspect.type_info(MeshConfig), set())), (
        "a recorded None is left out, so a return to the default would be missed"
    )


def test_a_setting_that_only_the_recording_release_had_may_go_away() -> None:
    new = settings_of(MeshConfig(), Path("/"))
    changes = diff({**new, "gateway.server.direct": "false", "network.direct": "true"}, new)
    check_changes(changes)
    assert [change.key for change in changes] == ["gateway.server.direct", "network.direct"]


@pytest.mark.parametrize("options", [{}, {"low": 0.3, "nested": {"a": 1, "b": 2}}])
def test_an_extension_that_is_now_a_list_is_not_a_change(tmp_path: Path, options: dict[str, Any]) -> None:
    """The release before recorded `reward.finalizer` key by key."""
    new = settings_of(TrainConfig(reward=RewardConfig(finalizers=(Extension("band", options),))), tmp_path)
    old = {key: value for key, value in new.items() if key != "reward.finalizers"} | {"reward.finalizer.name": '"band"'}
    _flatten("reward.finalizer.options", options, old)
    note_recorded(tmp_path, old)
    read = recorded(tmp_path)
    assert read is not None
    assert diff(read, new) == ()
    other = settings_of(TrainConfig(), tmp_path)
    assert [change.key for change in diff(read, other)] == ["reward.finalizers"]


def _set_optionals(node: Any, seen: set[type]) -> Iterator[str]:
    """Yield the optional fields whose default is a value."""
    if isinstance(node, msgspec.inspect.StructType) and node.cls not in seen:
        seen.add(node.cls)
        for field in node.fields:
            kinds = getattr(field.type, "types", ())
            if any(isinstance(kind, msgspec.inspect.NoneType) for kind in kinds) and field.default not in (
                None,
                msgspec.NODEFAULT,
            ):
                yield f"{node.cls.__name__}.{field.name}"
            yield from _set_optionals(field.type, seen)
    for below in (*getattr(node, "types", ()), getattr(node, "type", None), getattr(node, "value_type", None)):
        if below is not None:
            yield from _set_optionals(below, seen)


def test_the_file_and_the_recorded_spec_agree_on_what_may_change() -> None:
    fields = {field.name for field in msgspec.structs.fields(RunSpec)} - {"run"}
    live = {name for name in fields if may_change(RunSpec, name)}
    assert live == {name for name in fields if may_change(MeshConfig, f"run.{name}")}
    assert live == {
        *(
            "max_staleness",
            "admit_early",
            "publish_every",
            "tries_max",
            "episode_lease_s",
            "batch_lease_s",
            "group_s_max",
            "eval_s_max",
        ),
        *("eval_every", "updates_max", "seconds_max", "success_target", "tokens_max", "stall_s", "external_sources"),
        "foreign",
    }


@pytest.mark.parametrize(
    ("key", "may"),
    [
        ("run.updates_max", True),
        ("run.max_staleness", True),
        ("run.on_stall", True),
        ("run.seed", False),
        ("run.batch_groups", False),
        ("run.beyond", False),
        ("model", False),
        ("data.source.path", False),
        ("data.epochs_max", True),
        ("reward.scorers", False),
        ("rollout.sampling.temperature", False),
        ("rollout.worker.episodes_max", True),
        ("learner.recipe", False),
        ("learner.optimizer.lr", True),
        ("learner.update_rule", False),
        ("learner.loss", False),
        ("learner.an_unknown_setting", False),
        ("counts.inference", True),
        ("bus.url", True),
        ("telemetry.anything", True),
        ("sandbox.profiles.python.tools", False),
        ("sandbox.egress.web.rules.0.host", False),
        ("sandbox.egress.web.retrieval.corpus", False),
        ("sandbox.egress.web.rate_per_s", True),
        ("sandbox.sessions_max", True),
    ],
)
def test_what_may_change(key: str, may: bool) -> None:
    assert may_change(MeshConfig, key) is may


def test_refusal_names_every_fixed_setting_and_the_remedy() -> None:
    old = settings_of(TrainConfig(run=RunConfig(seed=1)), Path("/"))
    new = settings_of(TrainConfig(run=RunConfig(seed=2, group_size=8, updates_max=9)), Path("/"))
    changes = diff(old, new)
    assert ConfigChange(key="run.updates_max", old="100", new="9") in changes
    with pytest.raises(
        ChangeRefused, match=r"`run.group_size` 16 -> 8; `run.seed` 1 -> 2: fixed after .*train a new run"
    ) as caught:
        check_changes(changes)
    assert caught.value.metadata["keys"] == "run.group_size,run.seed"


def test_model_in_the_run_folder_has_no_place_and_a_secret_no_value(tmp_path: Path) -> None:
    here, there = (TrainConfig(model=str(tmp_path / name / "model")) for name in ("a", "b"))
    assert diff(settings_of(here, tmp_path / "a"), settings_of(there, tmp_path / "b")) == ()
    options = {"password": "hunter2"}
    settings = settings_of(TrainConfig(rollout=RolloutConfig(agent=Extension("single_turn", options))), tmp_path)
    assert "hunter2" not in json.dumps(settings)
    other = settings_of(
        TrainConfig(rollout=RolloutConfig(agent=Extension("single_turn", {"password": "hunter3"}))), tmp_path
    )
    assert [change.key for change in diff(settings, other)] == ["rollout.agent.options.password"]


def test_recorded_settings_are_read_back(tmp_path: Path) -> None:
    assert recorded(tmp_path) is None
    settings = settings_of(TrainConfig(), tmp_path)
    note_recorded(tmp_path, settings)
    assert recorded(tmp_path) == settings
    assert [path.name for path in tmp_path.iterdir()] == ["recorded.json"]
