"""Requests that must be rejected, with code and reason by the contract."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rollmesh.v1 import events_pb2, types_pb2
from rollmesh.v1 import run_pb2 as pb

from .model import Commit
from .trainer import APPLIED, DROPPED, Trainer

INVALID = "INVALID_ARGUMENT"
STRANGE_DIGEST = "ab" * 32


class Invalid(NamedTuple):
    """A request and its rejection: by code, or by reason."""

    name: str
    method: Callable[..., Any]
    request: Any
    expected: frozenset[str]


def draw(trainer: Trainer, rng: random.Random) -> Invalid:
    """Return one of all invalid requests that fit the current state."""
    return rng.choice(list(_all(trainer)))


def _all(trainer: Trainer) -> Iterator[Invalid]:
    run = trainer.ends.run
    for name, method, request, *expected in _requests(trainer, run):
        yield Invalid(name, method, request, frozenset(expected))


def _requests(trainer: Trainer, run: Any) -> Iterator[tuple[Any, ...]]:
    yield from _names_and_epochs(trainer, run)
    yield from _leases(trainer, run)
    yield from _commits(trainer, run)
    yield from _rest(trainer, run)


def _names_and_epochs(trainer: Trainer, run: Any) -> Iterator[tuple[Any, ...]]:
    epoch = trainer.model.epoch
    for name, changes, expected in (
        ("unknown run", {"run": "never-created"}, "UNKNOWN_RUN"),
        ("no run", {"run": ""}, INVALID),
        ("long run", {"run": "x" * 100_000}, INVALID),
        ("unknown policy", {"policy": "other"}, "UNKNOWN_LEARNER"),
        ("unknown learner", {"learner": "other"}, "UNKNOWN_LEARNER"),
        ("no epoch", {"trainer_epoch": 0}, INVALID),
        ("negative epoch", {"trainer_epoch": -1}, INVALID),
        ("older epoch", {"trainer_epoch": epoch - 1}, "FENCED" if epoch > 1 else INVALID),
        ("epoch that never was", {"trainer_epoch": epoch + 7}, "FENCED"),
    ):
        yield f"lease: {name}", run.LeaseBatch, trainer.lease_request(**changes), expected, *_either(name)
        values: dict[str, Any] = {**trainer.common(), "update": trainer.model.applied + 1, "outcome": APPLIED} | changes
        yield f"commit: {name}", run.CommitUpdate, pb.CommitUpdateRequest(**values), expected, *_either(name)


def _either(name: str) -> tuple[str, ...]:
    """A name that is not valid for a run is either malformed or unknown."""
    return ("UNKNOWN_RUN",) if name in ("no run", "long run") else ()


def _leases(trainer: Trainer, run: Any) -> Iterator[tuple[Any, ...]]:
    next_update = trainer.model.applied + 1
    if not trainer.model.stopped:
        yield "later update", run.LeaseBatch, trainer.lease_request(update=next_update + 1), "WRONG_UPDATE"
        yield "update again", run.LeaseBatch, trainer.lease_request(update=next_update - 1), "WRONG_UPDATE", INVALID
    yield "negative update", run.LeaseBatch, trainer.lease_request(update=-5), INVALID, "WRONG_UPDATE", "RUN_ENDED"
    for wait_s in (math.nan, -1.0, math.inf, 1e9):
        yield f"wait {wait_s}", run.LeaseBatch, trainer.lease_request(wait_s=wait_s), INVALID
    for unit, amount in ((1, -1), (1, 2**62), (2, 2**62), (3, 2**62), (77, 1)):
        odd = pb.BatchGeometry(unit=pb.BatchGeometry.Unit.ValueType(unit), amount=amount)
        # The first call fixed the geometry of a held batch. A geometry that is never valid is rejected all the same.
        decided = ("OK", "LEASE_EXPIRED") if trainer.model.batch is not None and amount > 1 else ()
        yield f"geometry {unit} {amount}", run.LeaseBatch, trainer.lease_request(geometry=odd), INVALID, *decided
    common = trainer.common()
    for lease_id in ("", "b9.9.9.9", "x" * 10_000):
        expected = (INVALID, "UNKNOWN_LEASE")
        yield "renew unknown", run.RenewBatch, pb.RenewBatchRequest(**common, lease_id=lease_id), *expected
        yield "release unknown", run.ReleaseBatch, pb.ReleaseBatchRequest(**common, lease_id=lease_id), *expected
        yield "fetch unknown", run.FetchSamples, pb.FetchSamplesRequest(**common, lease_id=lease_id), *expected
    batch = trainer.model.batch
    if batch is not None and not batch.in_doubt:
        for index, num in ((1, 1), (-1, 2), (5, 3), (0, -1)):
            shard = pb.FetchSamplesRequest(**common, lease_id=batch.lease_id, shard_index=index, num_shards=num)
            yield f"shard {index} of {num}", run.FetchSamples, shard, INVALID, *_lost(trainer)


def _lost(trainer: Trainer) -> tuple[str, ...]:
    return ("LEASE_EXPIRED",) if trainer.short_leases else ()


def _commits(trainer: Trainer, run: Any) -> Iterator[tuple[Any, ...]]:
    model = trainer.model
    batch = model.batch
    if batch is None or batch.in_doubt:
        commit = Commit(model.applied + 1, ("b9.9.9.9",), True, (), frozenset(), "", model.eta)
        yield (
            "unknown lease",
            run.CommitUpdate,
            trainer.commit_request(commit),
            "UNKNOWN_LEASE",
            INVALID,
            *_doubt(trainer),
        )
        return
    lost = _lost(trainer)
    commit = model.commit_of(batch.update, batch, applied=True, dropped={})
    lease = batch.lease_id

    def request(**changes: Any) -> pb.CommitUpdateRequest:
        return trainer.commit_request(commit, **changes)

    unknown = pb.DisposedSample(sample_id="g999.0-0", disposition=DROPPED, reason="X")
    first = batch.samples[0]
    twice = [pb.DisposedSample(sample_id=first, disposition=DROPPED, reason="X")] * 2
    odd = pb.DisposedSample(sample_id=first, disposition=77)  # type: ignore[arg-type]
    yield "lease named twice", run.CommitUpdate, request(lease_ids=[lease, lease]), INVALID, *lost
    yield (
        "strange lease beside it",
        run.CommitUpdate,
        request(lease_ids=[lease, "b9.9.9.9"]),
        "UNKNOWN_LEASE",
        INVALID,
        *lost,
    )
    yield "lease not named", run.CommitUpdate, request(lease_ids=[]), INVALID, "FAILED_PRECONDITION", *lost
    yield "sample named twice", run.CommitUpdate, request(samples=twice), INVALID, *lost
    yield "unknown sample", run.CommitUpdate, request(samples=[unknown]), INVALID, "UNKNOWN_SAMPLE", *lost
    strange = events_pb2.TrainedGroup(group="g999", num_tokens=1)
    infinite = events_pb2.TrainedGroup(group="g999", mean_abs_advantage=math.inf, num_tokens=1)
    regret = events_pb2.TrainedGroup(group="g999", measures={"regret": math.nan})
    many = events_pb2.TrainedGroup(group="g999", measures={f"m{n}": 1.0 for n in range(17)})
    unnamed = events_pb2.TrainedGroup(group="g999", measures={"": 1.0})
    both = events_pb2.TrainedGroup(group="g999", policy_loss=1.0, measures={"policy_loss": 2.0})
    yield "unknown group", run.CommitUpdate, request(groups=[strange]), INVALID, "UNKNOWN_GROUP", *lost
    yield "group named twice", run.CommitUpdate, request(groups=[strange, strange]), INVALID
    yield "infinite advantage", run.CommitUpdate, request(groups=[infinite]), INVALID
    for what, group in (("nan", regret), ("too many", many), ("unnamed", unnamed), ("contradicted", both)):
        yield f"{what} measures", run.CommitUpdate, request(groups=[group]), INVALID
    yield "strange disposition", run.CommitUpdate, request(samples=[odd]), INVALID, *lost
    yield "no outcome", run.CommitUpdate, request(outcome=0), INVALID
    yield "strange outcome", run.CommitUpdate, request(outcome=77), INVALID
    yield "later update", run.CommitUpdate, request(update=batch.update + 1), "WRONG_UPDATE", *lost
    yield "negative update", run.CommitUpdate, request(update=-3), INVALID, "COMMIT_CONFLICT", *lost


def _closed(trainer: Trainer) -> tuple[str, ...]:
    """A run may accept no samples of peers."""
    return () if trainer.model.share else ("SAMPLES_NOT_ACCEPTED",)


def _doubt(trainer: Trainer) -> tuple[str, ...]:
    """With a batch in doubt, that may be the first cause for the rejection of an update."""
    return ("LEASE_EXPIRED", "FAILED_PRECONDITION") if trainer.model.batch is not None else ()


def _rest(trainer: Trainer, run: Any) -> Iterator[tuple[Any, ...]]:
    model, name, common = trainer.model, trainer.run, trainer.common()

    def checkpoint(update: int, digest: str) -> pb.ReportCheckpointRequest:
        return pb.ReportCheckpointRequest(**common, update=update, digest=digest)

    yield "checkpoint ahead", run.ReportCheckpoint, checkpoint(model.applied + 3, STRANGE_DIGEST), "UNKNOWN_UPDATE"
    yield "negative checkpoint", run.ReportCheckpoint, checkpoint(-1, ""), INVALID
    yield "strange digest", run.ReportCheckpoint, checkpoint(model.applied, STRANGE_DIGEST), "DIGEST_MISMATCH", INVALID

    def attach(update: int, digest: str) -> pb.AttachTrainerRequest:
        return pb.AttachTrainerRequest(run=name, last_update=update, digest=digest)

    yield "attach negative", run.AttachTrainer, attach(-1, ""), INVALID
    yield "attach ahead", run.AttachTrainer, attach(model.applied + 5, STRANGE_DIGEST), "UNKNOWN_UPDATE"
    yield (
        "attach of another history",
        run.AttachTrainer,
        attach(model.applied, STRANGE_DIGEST),
        "DIGEST_MISMATCH",
        INVALID,
    )
    yield "huge holder", run.AttachTrainer, pb.AttachTrainerRequest(run=name, holder="x" * 2_000_000), INVALID

    def publish(**changes: Any) -> pb.PublishVersionRequest:
        return trainer.publish_request(**({"weights_digest": STRANGE_DIGEST} | changes))

    ahead = publish(step=model.applied + 1)
    yield "publish ahead", run.PublishVersion, ahead, "WRONG_VERSION", "NOT_UPLOADED"
    yield (
        "publish for another incarnation",
        run.PublishVersion,
        publish(incarnation=99),
        "WRONG_VERSION",
        "NOT_UPLOADED",
    )
    yield "publish negative", run.PublishVersion, publish(step=-1), INVALID, "WRONG_VERSION", "NOT_UPLOADED"
    yield "publish without digest", run.PublishVersion, publish(weights_digest=""), INVALID
    yield "publish other weights", run.PublishVersion, publish(), "NOT_UPLOADED", "VERSION_CONFLICT"
    change = pb.ChangeRunRequest(change_id="c")
    change.spec.run = name
    yield "change to nothing", run.ChangeRun, change, INVALID, "CHANGE_REFUSED"
    yield "cursor", run.StreamSamples, pb.StreamSamplesRequest(run=name, cursor="x"), "HAS_LEARNER", INVALID

    def submission(*tasks: types_pb2.Task) -> pb.SubmitTasksRequest:
        return pb.SubmitTasksRequest(run=name, tasks=tasks)

    yield "dead letters", run.ListDead, pb.ListDeadRequest(run=name, num_max=-1), INVALID
    task = types_pb2.Task(task_id="t", messages=[types_pb2.Message(role="user")])
    yield "submit a task without a prompt", run.SubmitTasks, submission(types_pb2.Task(task_id="t")), INVALID
    yield "submit nothing", run.SubmitTasks, submission(), INVALID
    yield "submit to the data service", run.SubmitTasks, submission(task), "TASKS_NOT_ACCEPTED"

    def samples(source: types_pb2.SegmentSource.ValueType, **fields: Any) -> pb.SubmitSamplesRequest:
        said = types_pb2.Segment(
            parent=-1, role=types_pb2.SEGMENT_ROLE_ACTION, source=source, messages=[types_pb2.Message(content="2")]
        )
        key = types_pb2.EpisodeKey(task="t", group="k", episode="e")
        episode = types_pb2.Episode(key=key, segments=[said])
        return pb.SubmitSamplesRequest(run=name, episodes=[episode], tasks=[task], source=source, **fields)

    yield "submit no samples", run.SubmitSamples, pb.SubmitSamplesRequest(run=name), INVALID
    yield "submit samples of the policy", run.SubmitSamples, samples(types_pb2.SEGMENT_SOURCE_POLICY), INVALID
    human = types_pb2.SEGMENT_SOURCE_HUMAN
    large = samples(types_pb2.SEGMENT_SOURCE_PEER)
    for number in range(trainer.model.group_size * 4):
        large.episodes.add(segments=large.episodes[0].segments).key.CopyFrom(large.episodes[0].key)
        large.episodes[-1].key.episode = str(number)
    yield "submit a group that is too large", run.SubmitSamples, large, INVALID, *_closed(trainer)
    yield "submit samples without a bound", run.SubmitSamples, samples(human), "SAMPLES_NOT_ACCEPTED"

    yield "open an episode without a key", run.OpenEpisode, pb.OpenEpisodeRequest(run=name), INVALID
    opening = pb.OpenEpisodeRequest(run=name, key="k")
    yield "open an episode of the data service", run.OpenEpisode, opening, "TASKS_NOT_ACCEPTED", "EPISODES_NOT_SERVED"
    ending = pb.FinishEpisodeRequest(run=name, lease_id="g0.0#1")
    yield "end an episode of an agent", run.FinishEpisode, ending, "UNKNOWN_EPISODE"
