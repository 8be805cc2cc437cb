"""The learner's small parts: configuration, retries, metrics, the compute thread, light imports."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rollmesh.services.learner.compute import ComputeThread
from rollmesh.services.learner.config import LearnerConfig, LearnerRetryConfig, PublishConfig
from rollmesh.services.learner.engine import find_engine
from rollmesh.services.learner.metrics_log import MetricsLog, read_metrics
from rollmesh.services.learner.progress import LearnerProgress
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.sources import EXTERNAL_SOURCES
from rollmesh.shared.domain.trajectory import Source
from rollmesh.shared.errors import Cancelled, ConfigError, DeadlineExceeded, Fenced, MeshError, Overloaded, Unavailable
from rollmesh.shared.net.retry import retry

CONFIG = LearnerRetryConfig(retry_s=10.0, backoff_s=1.0, backoff_s_max=4.0)


# Configuration --------------------------------------------------------------------------------------------------------


def test_the_defaults_are_a_configuration() -> None:
    assert LearnerConfig().checkpoints == Path("learner/checkpoints")


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (LearnerConfig, "threads", 0),
        (LearnerConfig, "checkpoint_every", 0),
        (LearnerConfig, "keep_last", 0),
        (LearnerConfig, "wait_s", 61.0),
        (LearnerConfig, "stop_s", 0.0),
        (LearnerConfig, "seed", -1),
        (LearnerConfig, "directory", ""),
        (PublishConfig, "publish_every", -1),
        (PublishConfig, "probe_tokens", 1),
        (PublishConfig, "attempts_max", 0),
        (LearnerRetryConfig, "retry_s", 0.0),
        (LearnerRetryConfig, "restarts_max", -1),
    ],
)
def test_a_value_out_of_range_is_an_error_that_names_the_field(kind: type, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"`{field}`"):
        config_from_dict(kind, {field: value})


def test_an_unknown_external_source_is_an_error_with_the_accepted_ones() -> None:
    assert LearnerConfig(external_sources=EXTERNAL_SOURCES).sources == set(Source) - {Source.POLICY}
    accepted = "dataset, hint, human, peer, prompt, replay, rewritten, summary, tool, got"
    with pytest.raises(ConfigError, match=rf"`external_sources\[1\]` must be one of {accepted} 'policy'"):
        config_from_dict(LearnerConfig, {"external_sources": ["dataset", "policy"]})
    unknown: Any = ("dataset", "unknown")
    with pytest.raises(ValueError, match=f"`external_sources` must be some of {accepted} unknown"):
        LearnerConfig(external_sources=unknown)


def test_no_module_of_the_learner_but_the_torch_trainer_loads_torch() -> None:
    code = (
        "import sys; from rollmesh.shared.config.registry import Extension; from rollmesh.services.learner import node; from rollmesh.services.learner.engine import find_engine; "
        "find_engine(Extension('fake')); "
        "print([m for m in ('torch', 'transformers', 'tensorboard') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_an_engine_that_does_not_exist_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no_such"):
        find_engine(Extension("rollmesh.services.learner.engines.no_such:Trainer"))
    with pytest.raises(ConfigError, match=r"there is no trainer `tork`; known: torch, fake.*did you mean `torch`"):
        find_engine(Extension("tork"))
    with pytest.raises(
        ConfigError, match="options of trainer `fake`: .*`vocab`: unknown key; did you mean `vocab_size`"
    ):
        find_engine(Extension("fake", {"vocab": 3}))


def test_a_users_trainer_is_looked_up_beside_the_config(tmp_path: Path) -> None:
    text = "class Mine:\n    @classmethod\n    def open(cls, config, options): return config.seed\nclass Closed: ..."
    (tmp_path / "mine.py").write_text(text)
    assert find_engine(Extension("mine.py:Mine"), tmp_path)(LearnerConfig(seed=7)) == 7  # type: ignore[comparison-overlap]
    with pytest.raises(ConfigError, match=r"`mine.py:Closed` must have a class method `open\(config, options\)`"):
        find_engine(Extension("mine.py:Closed"), tmp_path)


# Retries --------------------------------------------------------------------------------------------------------------


class Answers:
    """Fails with each error in turn, then answers; notes when it was asked."""

    def __init__(self, clock: ManualClock, *errors: MeshError) -> None:
        self.times_s: list[float] = []
        self._clock = clock
        self._errors = list(errors)

    async def __call__(self) -> str:
        self.times_s.append(self._clock.monotonic_s())
        if self._errors:
            raise self._errors.pop(0)
        return "yes"


async def test_a_request_is_repeated_with_growing_pauses_while_no_process_answers() -> None:
    clock = ManualClock()
    ask = Answers(clock, Unavailable("a"), DeadlineExceeded("b"), Cancelled("c"), Overloaded("d"))
    asking = asyncio.create_task(retry(ask, limit_s=60.0, config=CONFIG, clock=clock))
    await clock.run_for(30.0)
    assert await asking == "yes"
    assert ask.times_s == [0.0, 1.0, 3.0, 7.0, 11.0]


async def test_repeating_ends_with_the_limit() -> None:
    clock = ManualClock()
    ask = Answers(clock, *[Unavailable("away") for _ in range(99)])
    asking = asyncio.create_task(retry(ask, limit_s=10.0, config=CONFIG, clock=clock))
    await clock.run_for(60.0)
    with pytest.raises(Unavailable):
        await asking
    assert ask.times_s == [0.0, 1.0, 3.0, 7.0, 11.0]


async def test_a_refusal_is_not_repeated() -> None:
    ask = Answers(ManualClock(), Fenced("another"))
    with pytest.raises(Fenced):
        await retry(ask, limit_s=10.0, config=CONFIG, clock=ManualClock())
    assert len(ask.times_s) == 1


# Metrics --------------------------------------------------------------------------------------------------------------


def append(log: MetricsLog, update: int, *, incarnation: int = 0, train_s: float = 0.0, **metrics: float) -> None:
    log.append(
        update=update,
        incarnation=incarnation,
        outcome="APPLIED",
        time_unix_s=1_700_000_000.0 + update,
        metrics=metrics,
        seconds={"train": train_s},
    )


def test_metrics_go_on_in_one_file_and_the_newest_line_of_an_update_counts(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=False)
    append(log, 1, train_s=2.0, loss=0.5)
    append(log, 2, train_s=2.5, loss=float("nan"))
    log.close()
    log = MetricsLog(tmp_path, tensorboard=False)
    append(log, 2, incarnation=1, train_s=1.0, loss=0.25)
    log.close()
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [(line.update, line.incarnation) for line in lines.values()] == [(1, 0), (2, 1)]
    assert lines[2].metrics == {"loss": 0.25}
    raw = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert '"loss":null' in raw[1]
    assert '"train":0.5' in raw[1]


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = MetricsLog(tmp_path, tensorboard=True)
    append(log, 1, train_s=2.0, loss=0.5)
    append(log, 2, train_s=5.0, loss=float("inf"))
    log.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value, e.wall_time) for e in events.Scalars("loss")] == [(1, 0.5, 1_700_000_001.0)]
    assert [(e.step, e.value) for e in events.Scalars("seconds/train")] == [(1, 2.0), (2, 3.0)]


def test_progress_counts_seconds_per_phase_also_when_it_fails() -> None:
    clock = ManualClock()
    progress = LearnerProgress(clock)
    with progress.during("train"):
        assert progress.phase == "train"
        clock.advance(2.0)

    def commit() -> None:
        with progress.during("commit"):
            clock.advance(3.0)
            raise Fenced("another")

    with pytest.raises(Fenced):
        commit()
    assert (progress.seconds["train"], progress.seconds["commit"], progress.phase) == (2.0, 3.0, "")


# The compute thread ---------------------------------------------------------------------------------------------------


async def test_computations_run_one_after_another_in_one_thread_while_the_loop_goes_on() -> None:
    compute, go = ComputeThread(), threading.Event()
    first = asyncio.create_task(compute.run(lambda: (go.wait(10), threading.get_ident())))
    second = asyncio.create_task(compute.run(threading.get_ident))
    await asyncio.sleep(0)
    go.set()
    assert (await first)[1] == await second != threading.get_ident()
    await compute.close(10.0)


async def test_what_a_cancelled_caller_left_running_ends_before_the_next_begins() -> None:
    compute, go, order = ComputeThread(), threading.Event(), list[str]()
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow() -> None:
        loop.call_soon_threadsafe(started.set)
        go.wait(10)
        order.append("slow")

    left = asyncio.create_task(compute.run(slow))
    await started.wait()
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    following = asyncio.create_task(compute.run(lambda: order.append("next")))
    await asyncio.sleep(0)
    assert order == []
    go.set()
    await following
    assert order == ["slow", "next"]
    await compute.close(10.0)


async def test_closing_waits_no_longer_than_it_may() -> None:
    compute, go = ComputeThread(), threading.Event()
    running = asyncio.create_task(compute.run(lambda: go.wait(10)))
    await asyncio.sleep(0)
    await compute.close(0.01)
    assert not running.done()
    go.set()
    await running
