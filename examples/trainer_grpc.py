"""A complete GRPO trainer that speaks gRPC to a mesh. It uses the messages of protos/rollmesh/v1, torch and
transformers, nothing else.

    python examples/trainer_grpc.py HOST:PORT TOKEN_FILE MODEL_FOLDER configs/trainer_grpc.json OUT_FOLDER

The order of the calls is in `train`; docs/trainers.md gives the reason for each. OUT_FOLDER gets the checkpoint and the
weights. After a crash, start the same command again: the trainer resumes from its checkpoint, and the coordinator
resolves the samples in between. The channel has no TLS, so the gateway must be on loopback.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import torch
from transformers import AutoModelForCausalLM, logging

from rollmesh.v1 import events_pb2, run_pb2, run_pb2_grpc, types_pb2, weights_pb2, weights_pb2_grpc

LEARNING_RATE = 7e-4
WARMUP_UPDATES = 3
NUM_MINIBATCHES = 2
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
CHECKPOINT_EVERY = 5

CHUNK_BYTES = 16 << 20
"""Size of the blobs that a weight file is cut into; at most 64 MiB."""
MESSAGE_BYTES = 1 << 20
"""Size of the messages that carry a blob; at most 2 MiB."""

RESTARTS_MAX = 9
LOST = ("ABORTED", "FAILED_PRECONDITION", "NOT_FOUND", "UNAVAILABLE", "DEADLINE_EXCEEDED")
"""Status codes after which the trainer returns to its checkpoint and attaches again."""

# Every call may be repeated, so gRPC retries while the gateway is away. Messages have at most 8 MiB.
RETRY = {
    "maxAttempts": 5,
    "initialBackoff": "1s",
    "maxBackoff": "8s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
METHODS = {"methodConfig": [{"name": [{}], "waitForReady": True, "retryPolicy": RETRY}]}
OPTIONS = [("grpc.max_receive_message_length", 8 << 20), ("grpc.service_config", json.dumps(METHODS))]


class Gateway:
    """Calls of RunService in the name of one trainer."""

    def __init__(self, address: str, token: str) -> None:
        self.metadata = [("authorization", f"Bearer {token}")]
        self.stub = run_pb2_grpc.RunServiceStub(grpc.insecure_channel(address, OPTIONS))
        self.names: dict[str, Any] = {}
        """Run and trainer epoch, once attached. The epoch fences every older trainer of the run."""

    def call(self, verb: str, **fields: Any) -> Any:
        """Make one call within 300 s. A streaming call returns an iterator of messages."""
        request = getattr(run_pb2, f"{verb}Request")(**fields)
        return getattr(self.stub, verb)(request, timeout=300.0, metadata=self.metadata)

    def call_attached(self, verb: str, **fields: Any) -> Any:
        return self.call(verb, **self.names, **fields)


# Batches --------------------------------------------------------------------------------------------------------------


def lease_batch(gateway: Gateway, update: int) -> run_pb2.LeaseBatchResponse:
    """Lease the batch of `update`. While there is none, the reply names the reason."""
    while True:
        lease = gateway.call_attached("LeaseBatch", update=update, wait_s=20.0)
        if lease.lease_id:
            return lease
        print(f"waiting for {lease.waiting_for}", flush=True)


@contextmanager
def renewed(gateway: Gateway, lease: run_pb2.LeaseBatchResponse) -> Iterator[None]:
    """Renew the lease in a thread every third of its term, so that two renewals may be lost."""
    done = threading.Event()

    def renew() -> None:
        with suppress(grpc.RpcError):  # if the lease is lost, the commit fails for the same reason
            while not done.wait(lease.lease_s / 3):
                gateway.call_attached("RenewBatch", lease_id=lease.lease_id)

    threading.Thread(target=renew, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def group_advantages(group: types_pb2.GroupContext) -> dict[str, float]:
    """GRPO: return (reward - mean) / (std + 1e-6) by sample id.

    The group has all scored members, trained or not; a baseline over the trained members alone would be biased. Members
    with a failed scorer have no reward. An episode with several samples counts once.
    """
    members = [m for m in group.members if all(r.outcome == types_pb2.REWARD_OUTCOME_OK for r in m.rewards)]
    rewards = torch.tensor([sum(r.value for r in m.rewards) for m in members], dtype=torch.float64)
    episodes = [m.episode for m in members]
    weights = [1 / episodes.count(episode) / len(set(episodes)) for episode in episodes]
    weight = torch.tensor(weights, dtype=torch.float64)
    centered = rewards - weight @ rewards
    std = (weight @ centered.square()).sqrt()
    values = (centered / (std + 1e-6)).tolist()
    return {member.sample_id: value for member, value in zip(members, values, strict=True)}


def seen(groups: Iterable[types_pb2.GroupContext]) -> str:
    """Return counts of what a method may read of all members of the groups, also of those that were not leased.

    `summary` has role, finish, and per turn the number of tokens, their mean log-prob and a digest of the observation
    before it.
    """
    members = [member for group in groups for member in group.members]
    turns = [turn for member in members for turn in member.summary.turns]
    answers = {reward.answer for member in members for reward in member.rewards if reward.answer}
    observations = {turn.observation for turn in turns}
    return (
        f"groups: {len(members)} members, {len(turns)} turns, {len(answers)} answers, {len(observations)} observations"
    )


def path_tokens(episode: types_pb2.Episode, leaf: int, mask_below_step: int) -> list[tuple[float, ...]]:
    """Return (token, trained?, behavior log-prob, temperature) per token, from the root of the segment tree to the
    segment `leaf`."""
    path = []
    while leaf >= 0:
        path.append(episode.segments[leaf])
        leaf = path[-1].parent
    rows: list[tuple[float, ...]] = []
    for segment in reversed(path):
        num = len(segment.token_ids) // 4
        tokens = struct.unpack(f"<{num}i", segment.token_ids)
        # Given tokens have no log-probs. With the bound policy `mask`, tokens below this step keep no loss.
        too_old = segment.source == types_pb2.SEGMENT_SOURCE_POLICY and segment.version.step < mask_below_step
        is_trained = bool(segment.loss_mask and segment.logprobs) and not too_old
        trained = segment.loss_mask if is_trained else bytes(num)
        logprobs = struct.unpack(f"<{num}f", segment.logprobs or bytes(4 * num))
        temperature = episode.sampling_params[segment.sampling].temperature if segment.sampling >= 0 else 0.0
        rows += zip(tokens, trained, logprobs, [temperature or 1.0] * num, strict=True)
    return rows


def fetch_samples(gateway: Gateway, lease: run_pb2.LeaseBatchResponse) -> dict[str, torch.Tensor]:
    """Return the trainable samples by id: [n, 5] of (token, trained?, behavior log-prob, temperature, advantage)."""
    leased = {sample.meta.sample_id: sample for sample in lease.samples}
    advantages: dict[str, float] = {}
    for group in lease.groups:
        advantages |= group_advantages(group)
    found = {}
    for message in gateway.call_attached("FetchSamples", lease_id=lease.lease_id):
        if message.HasField("failure"):  # the payload cannot be read; its samples are dropped in the commit
            continue
        for name in message.sample_ids:
            sample = leased[name]
            rows = path_tokens(message.episode, sample.meta.leaf, sample.mask_below_step)
            if sample.meta.trainable and name in advantages and any(trained for _, trained, *_ in rows):
                found[name] = torch.tensor([(*row, advantages[name]) for row in rows], dtype=torch.float64)
    return dict(sorted(found.items()))  # payloads arrive in any order, but equal batches should give equal updates


# Training -------------------------------------------------------------------------------------------------------------


def token_ratios(model: Any, samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return policy / behavior policy, advantage and mask, [samples, tokens] each. The ratio of a token that is not
    trained is 1."""
    rows = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)  # [samples, tokens, 5]
    token_ids = rows[:, :, 0].long()
    mask, behavior_logprobs, temperature, advantage = rows[:, 1:, 1:].float().unbind(-1)
    temperature = torch.where(temperature > 0, temperature, 1.0)  # padding has 0
    logits = model(input_ids=token_ids).logits[:, :-1] / temperature[..., None]
    logprobs = logits.log_softmax(-1).gather(-1, token_ids[:, 1:, None]).squeeze(-1)
    return ((logprobs - behavior_logprobs) * mask).clamp(-20, 20).exp(), advantage, mask


def policy_loss(model: Any, samples: list[torch.Tensor]) -> torch.Tensor:
    """PPO's clipped objective against the policy that sampled, with a higher upper clip. Every trained token has the
    same weight."""
    ratio, advantage, mask = token_ratios(model, samples)
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    gain = torch.minimum(ratio * advantage, clipped * advantage) * mask
    return -gain.sum() / mask.sum()


@torch.no_grad()
def measure(model: Any, group: str, samples: list[torch.Tensor]) -> events_pb2.TrainedGroup:
    """Return what a selector may choose tasks by. Optional; it must be before the weights change."""
    ratio, advantage, mask = token_ratios(model, samples)
    signal, loss = (float((values * mask).sum() / mask.sum()) for values in (advantage.abs(), -ratio * advantage))
    return events_pb2.TrainedGroup(group=group, mean_abs_advantage=signal, policy_loss=loss, num_tokens=int(mask.sum()))


def learn(model: Any, optimizer: Any, samples: list[torch.Tensor], *, update: int, updates_max: int) -> bool:
    """Make one optimizer step per minibatch. Return whether any step changed the weights."""
    warmup = min(1.0, (update + 1) / WARMUP_UPDATES)
    decay = 1.0 - 0.95 * update / updates_max
    optimizer.param_groups[0]["lr"] = LEARNING_RATE * warmup * decay
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(update)).tolist()
    num_steps = 0
    for n in range(min(NUM_MINIBATCHES, len(samples))):
        minibatch = [samples[i] for i in order[n::NUM_MINIBATCHES]]
        policy_loss(model, minibatch).backward()
        if torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            optimizer.step()
            num_steps += 1
        optimizer.zero_grad()
    return num_steps > 0


def save_checkpoint(path: Path, model: Any, optimizer: Any, update: int, digest: str) -> None:
    """Write the checkpoint durably and atomically. It is the commit point: a crash leaves the old or the new one."""
    partial = path.with_name("partial")
    with partial.open("wb") as file:
        torch.save((model.state_dict(), optimizer.state_dict(), update, digest), file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


# Weights --------------------------------------------------------------------------------------------------------------


def upload_weights(depot: Any, metadata: Any, data: bytes, owner: str) -> str:
    """Upload one safetensors file in chunks, then its manifest. Return the digest of the manifest, which names the
    weights.

    Equal weights have an equal digest, so the upload may be repeated. The depot keeps blobs as long as they have an
    owner.
    """
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    named = [weights_pb2.WeightChunk(digest=sha256(chunk).hexdigest(), size_bytes=len(chunk)) for chunk in chunks]
    file = weights_pb2.WeightFile(name="model.safetensors", size_bytes=len(data), chunks=named)
    manifest = weights_pb2.WeightManifest(kind="KIND_FULL", files=[file], dtype="float32")
    manifest_data = manifest.SerializeToString(deterministic=True)
    blobs = {sha256(blob).hexdigest(): blob for blob in (*chunks, manifest_data)}  # the manifest is the last one
    missing = depot.Has(weights_pb2.HasRequest(digests=blobs), timeout=60.0, metadata=metadata).missing
    for digest, blob in blobs.items():
        # The first message names the blob and its owner. A blob that the depot has needs no data, only the new owner.
        messages = [weights_pb2.PutRequest(digest=digest, size_bytes=len(blob), owner=owner)]
        if digest in missing:
            pieces = (blob[at : at + MESSAGE_BYTES] for at in range(0, len(blob), MESSAGE_BYTES))
            messages += [weights_pb2.PutRequest(data=piece) for piece in pieces]
        depot.Put(iter(messages), timeout=120.0, metadata=metadata)
    return sha256(manifest_data).hexdigest()


# The loop -------------------------------------------------------------------------------------------------------------


def train(address: str, token: str, model_folder: Path, spec: events_pb2.RunSpec, out: Path) -> None:
    """Train from the newest checkpoint until the run ends. Raises grpc.RpcError."""
    gateway = Gateway(address, token)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    checkpoint = out / "checkpoint.pt"
    update, digest = 0, ""
    if checkpoint.exists():
        weights, moments, update, digest = torch.load(checkpoint)
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)

    # Attaching with the state of the checkpoint resolves the samples whose use is unknown after a crash.
    gateway.call("CreateRun", spec=spec)
    attached = gateway.call("AttachTrainer", run=spec.run, last_update=update, digest=digest)
    gateway.names = {"run": spec.run, "trainer_epoch": attached.trainer_epoch}
    depot = weights_pb2_grpc.BlobServiceStub(grpc.insecure_channel(attached.weights_address, OPTIONS))

    def publish() -> None:
        model.save_pretrained(out)
        owner = f"weights:{spec.run}/main@{update}.{attached.incarnation}"
        data = (out / "model.safetensors").read_bytes()
        weights_digest = upload_weights(depot, gateway.metadata, data, owner)
        version = {"step": update, "incarnation": attached.incarnation, "weights_digest": weights_digest}
        gateway.call_attached("PublishVersion", version=version)

    publish()  # before the first lease, because no node can sample without weights
    while update < spec.updates_max:
        lease = lease_batch(gateway, update + 1)
        with renewed(gateway, lease):
            samples = fetch_samples(gateway, lease)
            dropped = [
                run_pb2.DisposedSample(
                    sample_id=sample.meta.sample_id,
                    disposition=run_pb2.SAMPLE_DISPOSITION_DROPPED,
                    reason="NOT_TRAINABLE",
                )
                for sample in lease.samples
                if sample.meta.sample_id not in samples
            ]
            used = {g.group: [samples[m.sample_id] for m in g.members if m.sample_id in samples] for g in lease.groups}
            groups = [measure(model, name, own) for name, own in used.items() if own]
            applied = learn(model, optimizer, list(samples.values()), update=update, updates_max=spec.updates_max)
            committed = gateway.call_attached(
                "CommitUpdate",
                update=update + 1,
                lease_ids=[lease.lease_id],
                samples=dropped,  # samples that are not named were used
                outcome=run_pb2.UPDATE_OUTCOME_APPLIED if applied else run_pb2.UPDATE_OUTCOME_SKIPPED,
                groups=groups if applied else [],
            )
        update, digest = update + 1, committed.digest
        is_last = update == spec.updates_max
        if update % CHECKPOINT_EVERY == 0 or is_last:
            save_checkpoint(checkpoint, model, optimizer, update, digest)
            gateway.call_attached("ReportCheckpoint", update=update, digest=digest)
        if update % spec.publish_every == 0 or is_last:
            publish()
        print(seen(lease.groups))
        reward = sum(r.value for sample in lease.samples for r in sample.meta.rewards) / len(lease.samples)
        staleness = max(sample.staleness for sample in lease.samples)
        print(f"update {update}: reward {reward:.3f}, staleness {staleness}", flush=True)

    state = next(news.state for news in gateway.call("WatchRun", run=spec.run) if news.state.ended)
    success = {each.step: round(each.mean_rewards[spec.success_reward], 3) for each in state.evals}
    print("held-out success:", success)


def main() -> None:
    if len(sys.argv) != 6:
        print((__doc__ or "").strip())
        sys.exit(0 if sys.argv[1:] == ["--help"] else 2)
    address, token_file, model_folder, spec_file, out = sys.argv[1:]
    token = Path(token_file).read_text().strip()
    spec = events_pb2.RunSpec(**json.loads(Path(spec_file).read_text()))
    logging.disable_progress_bar()
    for restarts in range(RESTARTS_MAX + 1):
        try:
            return train(address, token, Path(model_folder), spec, Path(out))
        except grpc.RpcError as err:
            print(f"{err.code().name}: {err.details()}", flush=True)
            if err.code().name not in LOST or restarts == RESTARTS_MAX:
                raise
        time.sleep(2.0**restarts)  # then begin again from the checkpoint, which is the only state that counts


if __name__ == "__main__":
    main()
