"""The player as a trainer: every RPC of RunService, each response compared with the model."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollmesh.v1 import run_pb2 as pb
from rollmesh.v1 import types_pb2

from .calls import LOST, Answer, Calls
from .ends import Ends
from .model import Checkpoint, Commit, HeldBatch, RunModel, Stamp, Violation, require

USED, DROPPED = pb.SAMPLE_DISPOSITION_USED, pb.SAMPLE_DISPOSITION_DROPPED
APPLIED, SKIPPED = pb.UPDATE_OUTCOME_APPLIED, pb.UPDATE_OUTCOME_SKIPPED
AHEAD_S = 0.3
"""Time for which a stream of payloads ahead of a lease is read."""
LEASE_LOST = ("LEASE_EXPIRED", "UNKNOWN_LEASE")
UNITS = {
    "groups": pb.BatchGeometry.UNIT_GROUPS,
    "samples": pb.BatchGeometry.UNIT_SAMPLES,
    "tokens": pb.BatchGeometry.UNIT_TOKENS,
}


@dataclass(slots=True)
class Trainer:
    """One trainer of one run."""

    ends: Ends
    calls: Calls
    model: RunModel
    rng: random.Random
    run: str
    batch_groups: int
    short_leases: bool
    """Whether a batch lease may expire between two calls."""
    checkpoints: list[Checkpoint] = field(default_factory=lambda: [Checkpoint(())])
    ahead: list[tuple[Checkpoint, HeldBatch]] = field(default_factory=list)
    """Checkpoints with an update that was not committed when they were written."""
    depot: str = ""
    withheld: set[str] = field(default_factory=set)
    """Samples whose report contradicts their payload, and which FetchSamples did not deliver."""
    num_given: int = 0
    """Number of submitted groups in leased batches."""
    num_short: int = 0
    """Number of batches with less than the requested amount."""

    # Requests ---------------------------------------------------------------------------------------------------------

    def common(self) -> dict[str, Any]:
        return {"run": self.run, "trainer_epoch": self.model.epoch}

    def lease_request(self, **changes: Any) -> pb.LeaseBatchRequest:
        values = {**self.common(), "update": self.model.applied + 1, "wait_s": 0.05} | changes
        return pb.LeaseBatchRequest(**values)

    def commit_request(self, commit: Commit, **changes: Any) -> pb.CommitUpdateRequest:
        dropped = dispositions(dict(commit.dropped))
        values: dict[str, Any] = {
            **self.common(),
            "update": commit.update,
            "lease_ids": commit.lease_ids,
            "samples": dropped,
            "outcome": APPLIED if commit.applied else SKIPPED,
        }
        return pb.CommitUpdateRequest(**(values | changes))

    def publish_request(self, **changes: Any) -> pb.PublishVersionRequest:
        newest: dict[str, Any] = {"policy": "main", "step": self.model.applied, "incarnation": self.model.incarnation}
        version = types_pb2.PolicyVersion(**(newest | changes))
        return pb.PublishVersionRequest(**self.common(), version=version)

    # Verbs ------------------------------------------------------------------------------------------------------------

    async def attach(self, checkpoint: Checkpoint, pending: HeldBatch | None = None) -> None:
        """Attach with a checkpoint of this run. `pending` is the batch of an update that was never committed."""
        model = self.model
        last = checkpoint.commits[-1] if checkpoint.commits else None
        request = pb.AttachTrainerRequest(
            run=self.run,
            last_update=checkpoint.update,
            digest=checkpoint.digest,
            holder="player",
            keeps_no_checkpoints=model.keeps_no_checkpoints,
        )
        if pending is not None and last is not None:
            request.samples.extend(dispositions(dict(last.dropped)))
            request.outcome = APPLIED if last.applied else SKIPPED
        answer = await self.calls.call(self.ends.run.AttachTrainer, request)
        expected = self._resolution(checkpoint, pending)
        if not isinstance(expected, int):
            require(answer.reason == expected, f"attach was answered {answer}, expected {expected}")
            return
        require(answer.ok, f"attach at update {checkpoint.update} of {model.applied} was answered {answer}")
        attached = answer.response
        repeated = answer.repeated and attached.resolution == pb.ATTACH_RESOLUTION_CONTINUED
        require(repeated or attached.resolution == expected, f"resolution {attached.resolution}, expected {expected}")
        if expected == pb.ATTACH_RESOLUTION_ROLLED_FORWARD:
            committed = self._as_committed(checkpoint)
            assert committed is not None
            model.committed(committed)
        if expected == pb.ATTACH_RESOLUTION_ROLLED_BACK:
            model.rolled_back(checkpoint.update)
            self.checkpoints = [one for one in self.checkpoints if model.holds(one)]
        model.checkpointed(checkpoint.update)
        model.batch = None
        model.returned.clear()
        self.ahead.clear()
        require(attached.trainer_epoch > model.epoch, f"epoch {attached.trainer_epoch} does not fence {model.epoch}")
        model.epoch = attached.trainer_epoch
        self.depot = attached.weights_address
        require(
            attached.next_update == model.applied + 1, f"next update {attached.next_update}, not {model.applied + 1}"
        )
        require(attached.incarnation == model.incarnation, f"incarnation {attached.incarnation}")

    def _resolution(self, checkpoint: Checkpoint, pending: HeldBatch | None) -> int | str:
        model = self.model
        if pending is not None and self._as_committed(checkpoint) is not None:
            return pb.ATTACH_RESOLUTION_ROLLED_FORWARD
        if checkpoint.update > model.applied:
            return "UNKNOWN_UPDATE"
        if not model.holds(checkpoint):
            return "DIGEST_MISMATCH"
        return (
            pb.ATTACH_RESOLUTION_CONTINUED if checkpoint.update == model.applied else pb.ATTACH_RESOLUTION_ROLLED_BACK
        )

    def _as_committed(self, checkpoint: Checkpoint) -> Commit | None:
        """Return the last update of a checkpoint as a commit of the held batch; None if it is another update.

        A batch that was released and leased again has another lease. The digest decides.
        """
        last, batch = checkpoint.commits[-1], self.model.batch
        before = Checkpoint(checkpoint.commits[:-1])
        if batch is None or batch.update != last.update or not self.model.holds(before):
            return None
        dropped = dict(last.dropped)
        if not set(dropped) <= set(batch.samples):
            return None
        commit = self.model.commit_of(last.update, batch, applied=last.applied, dropped=dropped)
        return commit if commit.digest == last.digest else None

    async def publish(self) -> None:
        """Upload and publish the newest step."""
        model = self.model
        key = (model.applied, model.incarnation)
        digest = model.published.get(key)
        if digest is None:
            content = f"{self.run} {key}".encode()
            digest = await self.calls.persist(lambda: self.ends.upload(self.depot, content, self.run))
        answer = await self.calls.call(self.ends.run.PublishVersion, self.publish_request(weights_digest=digest))
        require(answer.ok, f"publishing {key} was answered {answer}")
        model.published.pop(key, None)  # the newest is last
        model.published[key] = digest

    async def lease(self, wait_s: float = 0.05, *, geometry: bool = False) -> bool:
        """Lease the batch of the next update, or check why there is none."""
        model = self.model
        request = self.lease_request(wait_s=wait_s)
        if geometry:
            unit = self.rng.choice(list(UNITS))
            largest = self.batch_groups if unit == "groups" else 4
            request.geometry.unit, request.geometry.amount = UNITS[unit], self.rng.randint(1, largest)
        answer = await self.calls.call(self.ends.run.LeaseBatch, request)
        held = model.batch
        if held is not None and self._lost(answer):
            held.in_doubt = True
            return False
        if model.stopped and held is None:
            require(answer.reason == "RUN_ENDED", f"a lease after the end was answered {answer}")
            return False
        if not model.is_published and held is None:
            require(answer.reason == "NOT_PUBLISHED", f"a lease before the weights was answered {answer}")
            return False
        if held is not None and held.in_doubt:
            require(answer.reason == "LEASE_EXPIRED", f"a lease of an update in doubt was answered {answer}")
            return False
        require(answer.ok, f"LeaseBatch was answered {answer}")
        batch = answer.response
        if not batch.lease_id:
            require(held is None, "a batch that is leased was not given again")
            require(bool(batch.waiting_for), "neither a lease nor what it waits for")
            return False
        if held is not None:
            self._check_same(batch, held)
        else:
            self._take(batch, request, wide=answer.repeated)
        return True

    def _check_same(self, batch: pb.LeaseBatchResponse, held: HeldBatch) -> None:
        require(batch.lease_id == held.lease_id, f"lease {batch.lease_id} beside {held.lease_id}")
        names = {sample.meta.sample_id for sample in batch.samples}
        require(names == set(held.samples), f"lease {batch.lease_id} changed: {names ^ set(held.samples)}")

    def _take(self, batch: pb.LeaseBatchResponse, request: pb.LeaseBatchRequest, *, wide: bool) -> None:
        model = self.model
        require(batch.lease_id not in model.lease_ids, f"lease id {batch.lease_id} was granted before")
        model.lease_ids.add(batch.lease_id)
        rewards = [reward for sample in batch.samples for reward in sample.meta.rewards]
        rewards += [reward for group in batch.groups for member in group.members for reward in member.rewards]
        require(not any(reward.evidence for reward in rewards), f"lease {batch.lease_id} has the evidence of rewards")
        names = tuple(sample.meta.sample_id for sample in batch.samples)
        require(len(set(names)) == len(names), "a sample is leased twice in one batch")
        masks = {sample.meta.sample_id: sample.mask_below_step for sample in batch.samples}
        held = HeldBatch(batch.lease_id, request.update, model.eta, names, masks)
        model.check_fresh(names)
        for leased in batch.samples:
            sample = model.samples.get(leased.meta.sample_id)
            if sample is None:
                raise Violation(f"{leased.meta.sample_id} was never reported")
            require(leased.group == sample.group, f"{sample.sample_id} is of group {sample.group}, not {leased.group}")
            require(not model.end_of(sample), f"{sample.sample_id} is leased, not {model.end_of(sample)}")
            require(model.is_decided(sample.group), f"{sample.group} is leased though its verdict is malformed")
            model.check_trainable(sample, sample.reported, held, leased.staleness)
            model.check_age(sample.sample_id, held.update)
        self._check_groups(batch)
        self._check_amount(batch, request)
        model.batch = held

    def _check_groups(self, batch: pb.LeaseBatchResponse) -> None:
        """Check that groups are whole: every scored member is in the context, and the trainable ones are in the
        batch."""
        leased = {sample.meta.sample_id for sample in batch.samples}
        groups = {sample.group for sample in batch.samples}
        require(groups == {context.group for context in batch.groups}, "groups and samples do not belong together")
        for context in batch.groups:
            members = {member.sample_id: member for member in context.members}
            made = self.model.group_members(context.group)
            require(set(members) == set(made), f"members of {context.group}: {set(members) ^ set(made)} differ")
            for name, member in members.items():
                require(member.rewards[0].value == made[name], f"reward of {name} changed")
                ready = member.end == "ready"
                require(ready == (name in leased), f"{name} of a leased group is {member.end!r}")
                sample = self.model.samples[name]
                if end := self.model.end_of(sample):
                    require(member.end == end, f"{name} of a leased group is {member.end!r}, not {end!r}")
                if sample.drop:
                    self.model.dropped[name] = sample.drop

    def _check_amount(self, batch: pb.LeaseBatchResponse, request: pb.LeaseBatchRequest) -> None:
        unit = request.geometry.unit if request.HasField("geometry") else UNITS["groups"]
        tokens = sum(span.num_tokens for sample in batch.samples for span in sample.meta.steps)
        size = {
            UNITS["groups"]: len(batch.groups),
            UNITS["samples"]: len(batch.samples),
            UNITS["tokens"]: tokens,
        }[unit]
        wanted = request.geometry.amount if request.HasField("geometry") else 1
        self.num_short += size < wanted
        self._check_share(batch, request, wanted if request.HasField("geometry") else self.batch_groups)
        require(bool(batch.samples), f"an empty batch was leased: {batch}")

    def _check_share(self, batch: pb.LeaseBatchResponse, request: pb.LeaseBatchRequest, amount: int) -> None:
        """Check that submitted groups have at most their share of the batch, or are one group, or all that is there."""
        given = {context.group for context in batch.groups if context.group in self.model.given}
        self.num_given += len(given)
        if len(given) < 2 or len(given) == len(batch.groups):
            return
        samples = [sample for sample in batch.samples if sample.group in given]
        size = {
            UNITS["groups"]: len(given),
            UNITS["samples"]: len(samples),
            UNITS["tokens"]: sum(span.num_tokens for sample in samples for span in sample.meta.external),
        }[request.geometry.unit if request.HasField("geometry") else UNITS["groups"]]
        share = self.model.share * amount
        require(size <= share + 1e-6, f"{size} of a batch of {amount} are submitted, the share is {share}")

    async def fetch(self) -> None:
        """Fetch the batch in shards, and compare payloads with what the player wrote."""
        batch = self.model.batch
        if batch is None:
            return
        num = self.rng.randint(1, 3)
        found: dict[str, pb.FetchSamplesResponse] = {}
        for index in range(num):
            request = pb.FetchSamplesRequest(
                **self.common(), lease_id=batch.lease_id, shard_index=index, num_shards=num
            )
            answer = await self.calls.call(self.ends.run.FetchSamples, request)
            if self._lost(answer) or batch.in_doubt:
                require(answer.reason in LEASE_LOST, f"FetchSamples of a lost lease was answered {answer}")
                batch.in_doubt = True
                return
            require(answer.ok, f"FetchSamples was answered {answer}")
            for message in answer.response:
                for name in message.sample_ids:
                    require(name not in found, f"{name} is in two shards")
                    found[name] = message
        require(
            set(found) == set(batch.samples), f"the shards differ from the lease: {set(found) ^ set(batch.samples)}"
        )
        for name, message in found.items():
            self._check_payload(name, message, batch)
        batch.fetched = True

    async def fetch_some(self) -> None:
        """Fetch only some samples of the batch: their episodes come, and no others."""
        batch = self.model.batch
        if batch is None:
            return
        wanted = self.rng.sample(batch.samples, self.rng.randint(1, len(batch.samples)))
        request = pb.FetchSamplesRequest(**self.common(), lease_id=batch.lease_id, sample_ids=wanted)
        answer = await self.calls.call(self.ends.run.FetchSamples, request)
        if self._lost(answer) or batch.in_doubt:
            require(answer.reason in LEASE_LOST, f"FetchSamples of a lost lease was answered {answer}")
            batch.in_doubt = True
            return
        require(answer.ok, f"FetchSamples was answered {answer}")
        names = [name for message in answer.response for name in message.sample_ids]
        require(sorted(names) == sorted(wanted), f"{sorted(wanted)} were requested, {sorted(names)} came")

    async def prefetch(self) -> None:
        """Read the payloads ahead of a lease for a moment: each is as it was written, and not in use."""
        request = pb.PrefetchSamplesRequest(**self.common())
        answer, messages = await self.calls.read_for(self.ends.run.PrefetchSamples, request, AHEAD_S)
        if self.model.stopped:
            require(
                answer.reason == "RUN_ENDED" or answer.code in LOST, f"prefetching after the end was answered {answer}"
            )
            return
        require(answer.code in LOST, f"PrefetchSamples was answered {answer}")
        held = self.model.batch.samples if self.model.batch is not None else ()
        for message in messages:
            names = tuple(message.sample_ids)
            self.model.check_fresh(names)
            for name in names:
                sample = self.model.samples.get(name)
                if sample is None:
                    raise Violation(f"{name} was never reported")
                require(name not in held, f"{name} is leased and was sent as READY")
                require(not self.model.end_of(sample), f"{name} was sent as READY, not {self.model.end_of(sample)}")
                require(not sample.contradicted, f"metadata of {name} contradicts its payload, and it was delivered")
                stamps = _stamps_of(message.episode, name)
                require(stamps == sample.stamps, f"payload of {name}: stamps {stamps}, written were {sample.stamps}")

    def _check_payload(self, name: str, message: pb.FetchSamplesResponse, batch: HeldBatch) -> None:
        """Check that the trainable tokens are within the bound by the stamps in the payload."""
        sample = self.model.samples[name]
        if message.HasField("failure"):
            episode = [s for s in self.model.samples.values() if s.episode == sample.episode]
            require(any(s.contradicted for s in episode), f"{name} is withheld: {message.failure}")
            require(message.failure.reason == "METADATA_MISMATCH", f"{name} is withheld: {message.failure}")
            self.withheld.add(name)
            batch.unreadable.add(name)
            return
        require(not sample.contradicted, f"metadata of {name} contradicts its payload, and it was delivered")
        stamps = _stamps_of(message.episode, name)
        require(stamps == sample.stamps, f"payload of {name}: stamps {stamps}, written were {sample.stamps}")
        below = batch.mask_below.get(name, 0)
        kept = [stamp.step for stamp in stamps if stamp.step >= below]
        require(all(batch.update - 1 - step <= batch.eta for step in kept), f"{name} is beyond the bound: {stamps}")

    async def renew(self) -> None:
        batch = self.model.batch
        if batch is None:
            return
        request = pb.RenewBatchRequest(**self.common(), lease_id=batch.lease_id)
        answer = await self.calls.call(self.ends.run.RenewBatch, request)
        if self._lost(answer) or batch.in_doubt:
            require(answer.reason == "LEASE_EXPIRED", f"RenewBatch of a lost lease was answered {answer}")
            batch.in_doubt = True
            return
        require(answer.ok and answer.response.lease_s > 0, f"RenewBatch was answered {answer}")

    async def release(self) -> None:
        batch = self.model.batch
        if batch is None:
            return
        request = pb.ReleaseBatchRequest(**self.common(), lease_id=batch.lease_id)
        answer = await self.calls.call(self.ends.run.ReleaseBatch, request)
        if self._lost(answer) or batch.in_doubt:
            require(answer.reason == "LEASE_EXPIRED", f"ReleaseBatch of a lost lease was answered {answer}")
            batch.in_doubt = True
            return
        require(answer.ok, f"ReleaseBatch was answered {answer}")
        self.model.returned.add(batch.lease_id)
        self.model.batch = None

    async def commit(self) -> None:
        """Train on the batch and commit it, with some samples dropped or the update skipped."""
        batch = self.model.batch
        if batch is None:
            return
        if not batch.fetched:
            await self.fetch()
        commit = self.plan(batch)
        answer = await self.calls.call(self.ends.run.CommitUpdate, self.commit_request(commit))
        if self._lost(answer) or batch.in_doubt:
            require(answer.reason in LEASE_LOST, f"CommitUpdate of a lost lease was answered {answer}")
            batch.in_doubt = True
            return
        require(answer.ok, f"CommitUpdate was answered {answer}")
        require(answer.response.digest == commit.digest, f"digest {answer.response.digest}, documented {commit.digest}")
        self.model.committed(commit)

    def plan(self, batch: HeldBatch) -> Commit:
        dropped = {name: "UNREADABLE" for name in batch.samples if name in batch.unreadable}
        if self.rng.random() < 0.3:
            dropped |= {name: "PLAYER" for name in batch.samples if self.rng.random() < 0.2}
        applied = self.rng.random() < 0.92
        return self.model.commit_of(batch.update, batch, applied=applied, dropped=dropped)

    async def checkpoint(self) -> None:
        """Store a checkpoint, and report it most of the time."""
        stored = Checkpoint(tuple(self.model.commits))
        if stored not in self.checkpoints:
            self.checkpoints.append(stored)
        if self.model.keeps_no_checkpoints or self.rng.random() < 0.3:
            return
        request = pb.ReportCheckpointRequest(**self.common(), update=stored.update, digest=stored.digest)
        answer = await self.calls.call(self.ends.run.ReportCheckpoint, request)
        require(answer.ok, f"ReportCheckpoint was answered {answer}")
        self.model.checkpointed(stored.update)

    async def checkpoint_ahead(self) -> None:
        """Write a checkpoint with the leased batch before the update is committed."""
        batch = self.model.batch
        if batch is None or self.model.keeps_no_checkpoints:
            return
        if not batch.fetched:
            await self.fetch()
        if not batch.in_doubt:
            self.ahead.append((Checkpoint((*self.model.commits, self.plan(batch))), batch))

    async def crash(self) -> None:
        """Attach again, from some checkpoint."""
        if self.model.keeps_no_checkpoints:
            await self.attach(Checkpoint(tuple(self.model.commits)))
        elif self.ahead and self.rng.random() < 0.7:
            checkpoint, batch = self.rng.choice(self.ahead)
            epoch = self.model.epoch
            await self.attach(checkpoint, batch)
            if self.model.epoch == epoch:  # rejected, because that checkpoint belongs to another history by now
                self.ahead.clear()
                await self.attach(self._newest())
        else:
            await self.attach(self._newest() if self.rng.random() < 0.7 else self.rng.choice(self.checkpoints))
        await self.publish()

    def _newest(self) -> Checkpoint:
        return max(self.checkpoints, key=lambda one: one.update)

    async def repeat(self) -> None:
        """Repeat a valid commit, exactly and with changes; repeat a release and a publication."""
        model = self.model
        if model.commits:
            commit = self.rng.choice(model.commits[-3:])
            answer = await self.calls.call(self.ends.run.CommitUpdate, self.commit_request(commit))
            require(answer.ok, f"the same commit again was answered {answer}")
            require(answer.response.digest == commit.digest, "the same commit has another digest")
            await self._conflict(commit)
        for lease_id in sorted(model.returned)[:1]:
            request = pb.ReleaseBatchRequest(**self.common(), lease_id=lease_id)
            answer = await self.calls.call(self.ends.run.ReleaseBatch, request)
            require(answer.ok, f"the same release again was answered {answer}")
        for (step, incarnation), digest in list(model.published.items())[-2:]:
            if incarnation == model.incarnation and step <= model.applied:
                answer = await self.calls.call(
                    self.ends.run.PublishVersion, self.publish_request(step=step, weights_digest=digest)
                )
                require(answer.ok, f"the same publication again was answered {answer}")

    async def _conflict(self, commit: Commit) -> None:
        changes: list[Mapping[str, Any]] = [{"lease_ids": ["b0.0.0.0"]}]
        if commit.applied and commit.used:
            changes.append({"samples": dispositions({**dict(commit.dropped), commit.used[0]: "OTHER"})})
        if commit.lease_ids:
            changes.append({"outcome": SKIPPED if commit.applied else APPLIED})
        request = self.commit_request(commit, **self.rng.choice(changes))
        answer = await self.calls.call(self.ends.run.CommitUpdate, request)
        require(answer.reason == "COMMIT_CONFLICT", f"another commit of update {commit.update} was answered {answer}")

    def _lost(self, answer: Answer) -> bool:
        """Return whether a lease was lost because its term ended."""
        return self.short_leases and answer.reason == "LEASE_EXPIRED"


def dispositions(dropped: Mapping[str, str]) -> list[pb.DisposedSample]:
    return [pb.DisposedSample(sample_id=n, disposition=DROPPED, reason=r) for n, r in sorted(dropped.items())]


def _stamps_of(episode: types_pb2.Episode, name: str) -> tuple[Stamp, ...]:
    """Return the stamps on the path of a sample, oldest first."""
    (leaf,) = [sample.leaf for sample in episode.samples if sample.sample_id == name]
    stamps = []
    while leaf >= 0:
        segment = episode.segments[leaf]
        num = sum(segment.loss_mask)
        if segment.source == types_pb2.SEGMENT_SOURCE_POLICY and num:
            stamps.append(Stamp(segment.version.step, segment.version.incarnation, num))
        leaf = segment.parent
    return tuple(reversed(stamps))
