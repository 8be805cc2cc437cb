"""Kinds of changes to a copy of a ledger, or of a checkpoint. Each kind of the ledger chooses its record before the
newest stored head.

Some kinds leave the chain unchanged. Others act as a forger: they change facts and recompute every hash, so that only
the facts, the payloads, or a stored head can show the change.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import msgspec

from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core.facts import DroppedSample, SampleEnd, StepSpan
from rollmesh.services.coordinator.fact_codec import decode_record, encode_record
from rollmesh.shared.domain.digest import next_digest
from rollmesh.shared.domain.ledger_head import CHECKSUM
from rollmesh.trainer.checkpoint_files import META_NAME, TRAINED_NAME, CheckpointMeta
from rollmesh.trainer.trained_log import TrainedUpdate
from tests.tamper import archives
from tests.tamper.ledger_copy import RawRecord, rechained, sealed, with_facts
from tests.tamper.real_run import RealRun

change = msgspec.structs.replace


@dataclass(frozen=True, slots=True)
class Copy:
    """A changed copy."""

    records: list[RawRecord]
    removed: frozenset[int] = field(default_factory=frozenset)
    """Sequences deleted from the stream."""
    checkpoint: dict[str, bytes] = field(default_factory=dict)
    """Files of the newest checkpoint; empty if it is not compared."""
    checkpoint_name: str = ""
    archive: archives.Damage | None = None
    """Change of the archive segments; None if all records are in the stream."""


Kind = Callable[[random.Random, RealRun], Copy | None]
"""None if the run has no record of this kind."""

# The chain stays as it was --------------------------------------------------------------------------------------------


def _at(rng: random.Random, run: RealRun, *, margin: int = 0) -> int:
    """Return an index before the newest head."""
    return rng.randrange(run.newest - margin)


def _with(run: RealRun, at: int, *records: RawRecord) -> Copy:
    return Copy([*run.records[:at], *records, *run.records[at + 1 :]])


def dropped(rng: random.Random, run: RealRun) -> Copy:
    return _with(run, _at(rng, run))


def swapped(rng: random.Random, run: RealRun) -> Copy:
    at = _at(rng, run, margin=1)
    records = list(run.records)
    records[at], records[at + 1] = records[at + 1], records[at]
    return Copy(records)


def duplicated(rng: random.Random, run: RealRun) -> Copy:
    at = _at(rng, run)
    return _with(run, at, run.records[at], replace(run.records[at], msg_id=f"d-{rng.random()}"))


def inserted(rng: random.Random, run: RealRun) -> Copy:
    at = _at(rng, run)
    before = decode_record(run.records[at].payload).previous
    forged = encode_record("d-forged", 0.0, [f.TimeCounted(seconds=1.0)], before)
    return _with(run, at, sealed(RawRecord(payload=forged, msg_id="d-forged")), run.records[at])


def _flipped(rng: random.Random, raw: RawRecord) -> RawRecord:
    payload = bytearray(raw.payload)
    payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
    return replace(raw, payload=bytes(payload))


def byte_altered(rng: random.Random, run: RealRun) -> Copy:
    at = rng.randrange(len(run.records))
    return _with(run, at, _flipped(rng, run.records[at]))


def byte_altered_and_sealed(rng: random.Random, run: RealRun) -> Copy:
    at = _at(rng, run)
    return _with(run, at, sealed(_flipped(rng, run.records[at])))


def truncated(rng: random.Random, run: RealRun) -> Copy:
    at = _at(rng, run)
    raw = run.records[at]
    return _with(run, at, sealed(replace(raw, payload=raw.payload[: rng.randrange(len(raw.payload))])))


def garbage(rng: random.Random, run: RealRun) -> Copy:
    at = _at(rng, run)
    return _with(run, at, sealed(replace(run.records[at], payload=rng.randbytes(rng.randrange(200)))))


def checksum_removed(rng: random.Random, run: RealRun) -> Copy:
    at = rng.randrange(len(run.records))
    return _with(run, at, replace(run.records[at], headers={}))


def checksum_altered(rng: random.Random, run: RealRun) -> Copy:
    at = rng.randrange(len(run.records))
    return _with(run, at, replace(run.records[at], headers={CHECKSUM: rng.randbytes(32).hex()}))


def message_id_altered(rng: random.Random, run: RealRun) -> Copy:
    at = rng.randrange(len(run.records))
    return _with(run, at, replace(run.records[at], msg_id="x"))


def tail_cut(rng: random.Random, run: RealRun) -> Copy:
    return Copy(run.records[: _at(rng, run)])


def deleted(rng: random.Random, run: RealRun) -> Copy:
    first = rng.randrange(len(run.records))
    num = rng.randint(1, 5)
    return Copy(run.records, frozenset(range(first + 1, min(first + num, len(run.records)) + 1)))


def newest_deleted(rng: random.Random, run: RealRun) -> Copy:
    num = rng.randint(1, min(20, len(run.records) - 1))
    return Copy(run.records, frozenset(range(len(run.records) - num + 1, len(run.records) + 1)))


def oldest_deleted(rng: random.Random, run: RealRun) -> Copy:
    return Copy(run.records, frozenset(range(1, rng.randint(2, len(run.records)))))


DAMAGES: dict[str, Kind] = {
    "record dropped": dropped,
    "neighbors swapped": swapped,
    "record duplicated": duplicated,
    "record inserted": inserted,
    "byte altered": byte_altered,
    "byte altered, checksum recomputed": byte_altered_and_sealed,
    "record truncated, checksum recomputed": truncated,
    "garbage for a record": garbage,
    "checksum removed": checksum_removed,
    "checksum altered": checksum_altered,
    "message id altered": message_id_altered,
    "tail cut before the newest stored head": tail_cut,
    "records deleted from the stream": deleted,
    "newest records deleted from the stream": newest_deleted,
    "oldest records deleted from the stream": oldest_deleted,
}

# A forger recomputes the chain ----------------------------------------------------------------------------------------


def forged(damage: Kind) -> Kind:
    """Return the same kind with every hash recomputed."""

    def strike(rng: random.Random, run: RealRun) -> Copy | None:
        made = damage(rng, run)
        return Copy(rechained(made.records)) if made is not None else None

    return strike


def times_altered(rng: random.Random, run: RealRun) -> Copy:
    at = _at(rng, run)
    records = list(run.records)
    for number in range(at, len(records)):
        old = decode_record(records[number].payload)
        payload = encode_record(old.record_id, old.time_unix_s + 1000.0, old.facts, old.previous)
        records[number] = replace(records[number], payload=payload)
    return Copy(records)


def id_repeated(rng: random.Random, run: RealRun) -> Copy:
    first, second = sorted(rng.sample(range(run.newest), 2))
    old = decode_record(run.records[second].payload)
    name = decode_record(run.records[first].payload).record_id
    return _with(
        run, second, replace(run.records[second], payload=encode_record(name, old.time_unix_s, old.facts, old.previous))
    )


def facts_changed(kind: type | tuple[type, ...], edit: Callable[[random.Random, Any, RealRun], Any]) -> Kind:
    """Return a kind that replaces one fact before the newest head by the result of `edit`; None removes it."""

    def strike(rng: random.Random, run: RealRun) -> Copy | None:
        places = [
            (at, index)
            for at, raw in enumerate(run.records[: run.newest])
            for index, fact in enumerate(decode_record(raw.payload).facts)
            if isinstance(fact, kind)
        ]
        rng.shuffle(places)
        for at, index in places:
            old = decode_record(run.records[at].payload)
            facts = list(old.facts)
            made = edit(rng, facts[index], run)
            if made == facts[index]:
                continue
            facts[index : index + 1] = [] if made is None else [made]
            payload = encode_record(old.record_id, old.time_unix_s, facts, old.previous)
            return _with(run, at, replace(run.records[at], payload=payload))
        return None

    return forged(strike)


def any_fact(rng: random.Random, fact: Any, run: RealRun) -> Any:
    """Return the fact with another value in one field."""
    for name in rng.sample(fact.__struct_fields__, len(fact.__struct_fields__)):
        value = getattr(fact, name)
        if isinstance(value, bool):
            return change(fact, **{name: not value})
        if isinstance(value, int) and type(value) is int:
            # A ledger cannot store a negative number in an unsigned field, so 0 only grows.
            return change(fact, **{name: value + rng.choice([-1, 1, 1000] if value else [1, 1000])})
        if isinstance(value, str):
            return change(fact, **{name: value + "x"})
        if isinstance(value, tuple) and value:
            return change(fact, **{name: value[1:]})
    return fact


def _recommitted(fact: f.UpdateCommitted, run: RealRun, **values: Any) -> f.UpdateCommitted:
    """Return the commit with the digest that follows from the earlier facts."""
    made = change(fact, **values)
    digests = {
        each.update: each.digest
        for raw in run.records
        for each in decode_record(raw.payload).facts
        if isinstance(each, f.UpdateCommitted) and each.incarnation <= fact.incarnation
    }
    return change(
        made, digest=next_digest(digests.get(made.update - 1, ""), max(1, made.update), sorted(set(made.used)))
    )


def _ended_before(fact: f.UpdateCommitted, run: RealRun) -> str:
    """Return a sample that this update must not use. A sample of the same lease comes last."""
    for raw in run.records:
        for each in decode_record(raw.payload).facts:
            if isinstance(each, f.EpisodeScored) and each.samples[0].sample_id not in fact.used:
                return each.samples[0].sample_id
    return "none"


def use_another(rng: random.Random, fact: f.UpdateCommitted, run: RealRun) -> f.UpdateCommitted:
    return _recommitted(fact, run, used=(*fact.used, _ended_before(fact, run)))


def leave_one_out(rng: random.Random, fact: f.UpdateCommitted, run: RealRun) -> f.UpdateCommitted:
    return _recommitted(fact, run, used=fact.used[1:]) if fact.used else fact


def drop_another(rng: random.Random, fact: f.UpdateCommitted, run: RealRun) -> f.UpdateCommitted:
    return change(fact, dropped=(*fact.dropped, DroppedSample(sample_id=_ended_before(fact, run), reason="X")))


def _drops(run: RealRun) -> dict[str, list[str]]:
    """Return the members that finalizers dropped, by group."""
    found: dict[str, list[str]] = {}
    for raw in run.records:
        for each in decode_record(raw.payload).facts:
            if isinstance(each, f.SamplesEnded) and each.end is SampleEnd.FILTERED:
                found.setdefault(each.group, []).extend(each.sample_ids)
    return found


def lease_dropped(rng: random.Random, fact: f.BatchLeased, run: RealRun) -> f.BatchLeased:
    drops = _drops(run)
    return change(
        fact, sample_ids=(*fact.sample_ids, *(name for group in fact.groups for name in drops.get(group, ())))
    )


def keep_dropped(rng: random.Random, fact: f.SamplesEnded, run: RealRun) -> f.SamplesEnded | None:
    """Remove the drop of members."""
    return None if fact.end is SampleEnd.FILTERED else fact


def drop_another_member(rng: random.Random, fact: f.SamplesEnded, run: RealRun) -> f.SamplesEnded:
    """Drop another member of the same group."""
    members = [
        sample.sample_id
        for raw in run.records
        for each in decode_record(raw.payload).facts
        if isinstance(each, f.EpisodeScored) and each.group == fact.group
        for sample in each.samples
    ]
    others = [name for name in members if name not in fact.sample_ids]
    return change(fact, sample_ids=tuple(others[:1])) if fact.end is SampleEnd.FILTERED and others else fact


def publication_used(rng: random.Random, fact: f.VersionPublished, run: RealRun) -> f.VersionPublished | None:
    """Remove the version if a sample names it. Only a stored head shows that an unused one is missing."""
    weights = (fact.version.step, fact.version.incarnation)
    named = {
        (span.step, span.incarnation)
        for raw in run.records
        for each in decode_record(raw.payload).facts
        if isinstance(each, f.EpisodeScored)
        for sample in each.samples
        for span in sample.steps
    }
    return None if weights in named else fact


def unlisted(rng: random.Random, fact: f.RunChanged, run: RealRun) -> f.RunChanged:
    return change(fact, changes=(), spec=change(fact.spec, max_staleness=50))


def _meta(fact: f.EpisodeScored, **values: Any) -> f.EpisodeScored:
    return change(fact, samples=(change(fact.samples[0], **values), *fact.samples[1:]))


def steps_of(step: int, incarnation: int) -> Callable[[random.Random, Any, RealRun], f.EpisodeScored]:
    return lambda rng, fact, run: _meta(fact, steps=(StepSpan(step=step, incarnation=incarnation, num_tokens=1),))


def replay_another(rng: random.Random, fact: f.SamplesReplayed, run: RealRun) -> f.SamplesReplayed:
    """Name a sample of another group as the original."""
    others = [
        each.samples[0].sample_id
        for raw in run.records
        for each in decode_record(raw.payload).facts
        if isinstance(each, f.EpisodeScored) and each.group != fact.original_group
    ]
    return change(fact, samples=(change(fact.samples[0], original_id=rng.choice(others)), *fact.samples[1:]))


def replay_stamped(rng: random.Random, fact: f.SamplesReplayed, run: RealRun) -> f.SamplesReplayed:
    """Give a replayed sample newer versions than its original has."""
    steps = tuple(change(span, step=span.step + 1) for span in fact.samples[0].steps)
    return change(fact, samples=(change(fact.samples[0], steps=steps), *fact.samples[1:]))


def foreign(_: random.Random, run: RealRun) -> Copy:
    """Return the ledger with another name of the run, which is what the ledger of another run is for an audit."""
    first = decode_record(run.records[0].payload)
    (created,) = first.facts
    assert isinstance(created, f.RunCreated)
    spec = change(created.spec, run="another")
    return _with(run, 0, with_facts(run.records[0], [change(created, spec=spec)]))


FORGERIES: dict[str, Kind] = {
    "the ledger of another run, with the heads of this one": forged(foreign),
    **{f"{name}, chain recomputed": forged(DAMAGES[name]) for name in ("record dropped", "neighbors swapped")},
    "tail cut, chain recomputed": forged(tail_cut),
    "any publication removed, chain recomputed": facts_changed(f.VersionPublished, lambda *_: None),
    "times altered, chain recomputed": forged(times_altered),
    "a field altered, chain recomputed": facts_changed(get_args(f.Fact), any_fact),
    "a drop removed, chain recomputed": facts_changed(f.SamplesEnded, keep_dropped),
    "a fact removed, chain recomputed": facts_changed(get_args(f.Fact), lambda *_: None),
}
"""Kinds that a stored head finds, and often a contradiction before it."""

CONTRADICTIONS: dict[str, Kind] = {
    "record id repeated": forged(id_repeated),
    "a sample used that is not leased": facts_changed(f.UpdateCommitted, use_another),
    "a leased sample left out": facts_changed(f.UpdateCommitted, leave_one_out),
    "a sample dropped that is not leased": facts_changed(f.UpdateCommitted, drop_another),
    "a lease without samples": facts_changed(f.BatchLeased, lambda _, x, __: change(x, sample_ids=())),
    "a dropped member leased": facts_changed(f.BatchLeased, lease_dropped),
    "another member dropped": facts_changed(f.SamplesEnded, drop_another_member),
    "a lease of another update": facts_changed(f.BatchLeased, lambda _, x, __: change(x, update=x.update + 1)),
    "a lease of another epoch": facts_changed(
        f.BatchLeased, lambda _, x, __: change(x, trainer_epoch=x.trainer_epoch + 1)
    ),
    "a commit of an epoch that never attached": facts_changed(
        f.UpdateCommitted, lambda _, x, __: change(x, trainer_epoch=9)
    ),
    "a commit of another incarnation": facts_changed(f.UpdateCommitted, lambda _, x, __: change(x, incarnation=42)),
    "an epoch skipped": facts_changed(f.TrainerAttached, lambda _, x, __: change(x, trainer_epoch=x.trainer_epoch + 1)),
    "an attach removed": facts_changed(f.TrainerAttached, lambda *_: None),
    "a version never published": facts_changed(f.EpisodeScored, steps_of(0, 99)),
    "a publication removed whose weights sampled": facts_changed(f.VersionPublished, publication_used),
    "a checkpoint of an update never committed": facts_changed(
        f.CheckpointReported, lambda _, x, __: change(x, update=10**6)
    ),
    "a replayed sample of another original": facts_changed(f.SamplesReplayed, replay_another),
    "a replayed sample with other versions": facts_changed(f.SamplesReplayed, replay_stamped),
    "a replay removed": facts_changed(f.SamplesReplayed, lambda *_: None),
    "a change that is not listed": facts_changed(f.RunChanged, unlisted),
    "a payload reference of nothing": facts_changed(
        f.EpisodeScored, lambda _, x, __: change(x, payload=change(x.payload, sequence=0))
    ),
    "the ledger of another run": forged(foreign),
    "an impossible spec": facts_changed(
        f.RunCreated, lambda _, x, __: f.RunCreated(spec=_unchecked(x.spec, max_staleness=0, publish_every=2))
    ),
}
"""Kinds that are found without any stored head."""


# The checkpoint is changed --------------------------------------------------------------------------------------------


def meta_changed(edit: Callable[[random.Random, CheckpointMeta], dict[str, Any]]) -> Kind:
    """Return a kind that changes fields of `rollmesh.json`."""

    def strike(rng: random.Random, run: RealRun) -> Copy | None:
        if not run.checkpoint:
            return None
        meta = msgspec.json.decode(run.checkpoint[META_NAME], type=CheckpointMeta)
        made = msgspec.json.encode(change(meta, **edit(rng, meta)))
        return _checkpoint(run, {META_NAME: made}, run.checkpoint_name)

    return strike


def _checkpoint(run: RealRun, files: dict[str, bytes], name: str) -> Copy:
    return Copy(run.records, checkpoint=run.checkpoint | files, checkpoint_name=name)


def _other_digit(rng: random.Random, text: str) -> str:
    """Return the text with another hex digit at one place."""
    at = rng.randrange(len(text))
    return text[:at] + rng.choice([digit for digit in "0123456789abcdef" if digit != text[at]]) + text[at + 1 :]


def renamed(rng: random.Random, run: RealRun) -> Copy | None:
    """Give the folder the name of another update."""
    if not run.checkpoint:
        return None
    update, _, incarnation = run.checkpoint_name.removeprefix("update-").partition(".")
    return _checkpoint(run, {}, f"update-{int(update) + rng.randint(1, 9):08d}.{incarnation}")


def list_changed(edit: Callable[[random.Random, list[TrainedUpdate]], list[TrainedUpdate]]) -> Kind:
    """Return a kind that changes the list of trained samples. The forger recomputes its digests, and its hash in
    `rollmesh.json`."""

    def strike(rng: random.Random, run: RealRun) -> Copy | None:
        if not run.checkpoint:
            return None
        lines = [msgspec.json.decode(raw, type=TrainedUpdate) for raw in run.checkpoint[TRAINED_NAME].splitlines()]
        digest, made = "", b""
        for line in edit(rng, lines):
            digest = next_digest(digest, line.update, line.sample_ids)
            made += msgspec.json.encode(change(line, digest=digest)) + b"\n"
        meta = msgspec.json.decode(run.checkpoint[META_NAME], type=CheckpointMeta)
        files = meta.files | {TRAINED_NAME: hashlib.sha256(made).hexdigest()}
        meta = change(meta, update=len(made.splitlines()), digest=digest, files=files)
        name = f"update-{meta.update:08d}.{meta.incarnation}"
        return _checkpoint(run, {TRAINED_NAME: made, META_NAME: msgspec.json.encode(meta)}, name)

    return strike


def _one(
    rng: random.Random, lines: list[TrainedUpdate], edit: Callable[[TrainedUpdate], TrainedUpdate]
) -> list[TrainedUpdate]:
    """Return the lines with one of those that have samples edited."""
    at = rng.choice([number for number, line in enumerate(lines) if line.sample_ids])
    return [*lines[:at], edit(lines[at]), *lines[at + 1 :]]


def list_garbled(rng: random.Random, run: RealRun) -> Copy | None:
    if not run.checkpoint:
        return None
    content = bytearray(run.checkpoint[TRAINED_NAME])
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return _checkpoint(run, {TRAINED_NAME: bytes(content)}, run.checkpoint_name)


CHECKPOINTS: dict[str, Kind] = {
    "checkpoint: digest altered": meta_changed(lambda rng, meta: {"digest": _other_digit(rng, meta.digest)}),
    "checkpoint: digest removed": meta_changed(lambda *_: {"digest": ""}),
    "checkpoint: update altered": meta_changed(
        lambda rng, meta: {"update": rng.choice([meta.update - 1, meta.update + 1, 0, 10**6])}
    ),
    "checkpoint: incarnation altered": meta_changed(lambda _, meta: {"incarnation": meta.incarnation + 1}),
    "checkpoint: policy altered": meta_changed(lambda *_: {"policy": "other"}),
    "checkpoint: hash of the head altered": meta_changed(
        lambda rng, meta: {"head": change(meta.head, hash=_other_digit(rng, meta.head.hash))}
    ),
    "checkpoint: position of the head altered": meta_changed(
        lambda rng, meta: {"head": change(meta.head, position=meta.head.position + rng.choice([-1, 1, 1000]))}
    ),
    "checkpoint: folder renamed": renamed,
    "trained.jsonl: byte altered": list_garbled,
    "trained.jsonl: sample removed, digests recomputed": list_changed(
        lambda rng, lines: _one(rng, lines, lambda x: change(x, sample_ids=x.sample_ids[1:]))
    ),
    "trained.jsonl: sample added, digests recomputed": list_changed(
        lambda rng, lines: _one(rng, lines, lambda x: change(x, sample_ids=sorted([*x.sample_ids, "g0.0.x"])))
    ),
    "trained.jsonl: outcome altered, digests recomputed": list_changed(
        lambda rng, lines: _one(rng, lines, lambda x: change(x, outcome="SKIPPED"))
    ),
    "trained.jsonl: incarnation altered, digests recomputed": list_changed(
        lambda rng, lines: _one(rng, lines, lambda x: change(x, incarnation=x.incarnation + 1))
    ),
    "trained.jsonl: update added, digests recomputed": list_changed(
        lambda _, lines: [*lines, change(lines[-1], update=len(lines) + 1, sample_ids=["g0.0.x"])]
    ),
}
"""Kinds that are found by comparing the checkpoint, with no stored head but its own."""


def _unchecked(spec: Any, **values: Any) -> Any:
    made = change(spec)
    for name, value in values.items():
        msgspec.structs.force_setattr(made, name, value)
    return made


def held(edit: Callable[[f.EpisodeScored], f.EpisodeScored]) -> Kind:
    """Return a kind that changes an episode whose payload is still in the sample stream."""
    return facts_changed(
        f.EpisodeScored, lambda _, fact, run: edit(fact) if fact.payload.sequence in run.payloads else fact
    )


def younger(fact: f.EpisodeScored) -> f.EpisodeScored:
    """Report one sampled token less. No fact in the ledger contradicts it."""
    span = fact.samples[0].steps[0]
    return _meta(fact, steps=(change(span, num_tokens=span.num_tokens - 1), *fact.samples[0].steps[1:]))


PAYLOADS: dict[str, Kind] = {
    "steps rewritten": held(younger),
    "steps removed": held(lambda fact: _meta(fact, steps=())),
    "number of tokens altered": held(lambda fact: _meta(fact, num_tokens=fact.samples[0].num_tokens + 1)),
    "leaf altered": held(lambda fact: _meta(fact, leaf=0)),
    "payload of another episode": held(
        lambda fact: change(fact, payload=change(fact.payload, sequence=fact.payload.sequence + 1))
    ),
    "payload that is not there": held(lambda fact: change(fact, payload=change(fact.payload, sequence=10**9))),
}
"""Kinds that are found by comparing payloads, without any stored head."""


def _of_archive(damage: Callable[[random.Random], archives.Damage]) -> Kind:
    return lambda rng, run: Copy(run.records, archive=damage(rng))


ARCHIVES: dict[str, Kind] = {name: _of_archive(damage) for name, damage in archives.DAMAGES.items()}
"""Kinds that change archive segments, which are found without any stored head."""
