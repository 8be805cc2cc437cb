"""A whole GRPO trainer over protos/rollmesh/v1 alone, from top to bottom; docs/trainers.md says why each step is where it is.

python examples/trainer_grpc.py HOST:PORT TOKEN_FILE MODEL_FOLDER configs/trainer_grpc.json OUT_FOLDER"""

import json
import os
import struct
import sys
import threading
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import grpc
import torch
from transformers import AutoModelForCausalLM, logging

from rollmesh.v1 import events_pb2, run_pb2, run_pb2_grpc, types_pb2, weights_pb2, weights_pb2_grpc

LR, WARMUP, MINIBATCHES, CHECKPOINT_EVERY, CHUNK, PIECE = 7e-4, 3, 2, 5, 16 << 20, 1 << 20
RETRY = {"maxAttempts": 5, "initialBackoff": "1s", "maxBackoff": "8s", "backoffMultiplier": 2}
VERBS = {"name": [{}], "waitForReady": True, "retryPolicy": {**RETRY, "retryableStatusCodes": ["UNAVAILABLE"]}}
OPTIONS = [("grpc.max_receive_message_length", 8 << 20), ("grpc.service_config", json.dumps({"methodConfig": [VERBS]}))]
LOST = ("ABORTED", "FAILED_PRECONDITION", "NOT_FOUND", "UNAVAILABLE", "DEADLINE_EXCEEDED")  # back to the checkpoint

logging.disable_progress_bar()
address, token_file, folder, spec_file, out, *returns = sys.argv[1], *map(Path, sys.argv[2:])
auth = [("authorization", f"Bearer {token_file.read_text().strip()}")]
gateway = run_pb2_grpc.RunServiceStub(grpc.insecure_channel(address, OPTIONS))


def ask(verb, **fields):
    return getattr(gateway, verb)(getattr(run_pb2, f"{verb}Request")(**fields), timeout=300.0, metadata=auth)


def renew(lease, done):
    with suppress(grpc.RpcError):  # the commit will be refused for the same reason
        while not done.wait(lease.lease_s / 3):
            ask("RenewBatch", **mine, lease_id=lease.lease_id)


def path_tokens(episode, at, mask_below):
    """(token, trained?, log-prob, temperature) from the root of the segments' tree to segment `at`."""
    if at < 0:
        return []
    s, n = episode.segments[at], len(episode.segments[at].token_ids) // 4
    old = s.source == types_pb2.SEGMENT_SOURCE_POLICY and s.version.step < mask_below
    trained = s.loss_mask if s.loss_mask and s.logprobs and not old else bytes(n)
    heat = episode.sampling_params[s.sampling].temperature if s.sampling >= 0 else 0.0
    columns = (struct.unpack(f"<{n}i", s.token_ids), trained, struct.unpack(f"<{n}f", s.logprobs or bytes(4 * n)))
    return [*path_tokens(episode, s.parent, mask_below), *zip(*columns, [heat or 1.0] * n, strict=True)]


def fetch(lease):
    """By sample: a tensor [n, 5] of (token, trained?, its log-prob, temperature, advantage); absent if not trainable."""
    leased, advantages, found = {s.meta.sample_id: s for s in lease.samples}, {}, {}
    for group in lease.groups:  # all scored members, trained or not: the baseline would be biased otherwise
        members = [m for m in group.members if all(r.outcome == types_pb2.REWARD_OUTCOME_OK for r in m.rewards)]
        sums = torch.tensor([sum(r.value for r in m.rewards) for m in members], dtype=torch.float64)
        ids = [m.episode for m in members]  # an episode with several samples counts once
        share = torch.tensor([1 / ids.count(one) / len(set(ids)) for one in ids], dtype=torch.float64)
        spread = sums - share @ sums
        values = (spread / ((share @ spread.square()).sqrt() + 1e-6)).tolist()
        advantages |= zip([m.sample_id for m in members], values, strict=True)
    for message in ask("FetchSamples", **mine, lease_id=lease.lease_id):
        for name in () if message.HasField("failure") else message.sample_ids:  # what cannot be read is left out
            tokens = path_tokens(message.episode, leased[name].meta.leaf, leased[name].mask_below_step)
            if leased[name].meta.trainable and name in advantages and any(trained for _, trained, *_ in tokens):
                found[name] = torch.tensor([(*t, advantages[name]) for t in tokens], dtype=torch.float64)
    return dict(sorted(found.items()))


def learn(samples):
    """A few steps of PPO's objective against the policy that sampled, with clip-higher. Returns what became of the update."""
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(update)).tolist()
    rate, num_steps = LR * min(1.0, (update + 1) / WARMUP) * (1.0 - 0.95 * update / spec.updates_max), 0
    optimizer.param_groups[0]["lr"] = rate
    for part in [[samples[i] for i in order[n::MINIBATCHES]] for n in range(min(MINIBATCHES, len(samples)))]:
        rows = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
        mask, behaviour, heat, advantage = rows[:, 1:, 1:].float().unbind(-1)
        logits = model(input_ids=rows[:, :, 0].long()).logits[:, :-1] / torch.where(heat > 0, heat, 1.0)[..., None]
        logprobs = logits.log_softmax(-1).gather(-1, rows[:, 1:, :1].long()).squeeze(-1)
        ratio = ((logprobs - behaviour) * mask).clamp(-20, 20).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage) * mask
        (-gain.sum() / mask.sum()).backward()  # every trained token counts alike
        if torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            optimizer.step()
            num_steps += 1
        optimizer.zero_grad()
    return "UPDATE_OUTCOME_APPLIED" if num_steps else "UPDATE_OUTCOME_SKIPPED"


def publish():
    """Chunks, then the manifest, then the announcement. Equal weights give an equal digest, so it may be repeated."""
    model.save_pretrained(out)
    data, owner = (out / "model.safetensors").read_bytes(), f"weights:{spec.run}/main@{update}.{me.incarnation}"
    chunks = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
    named = [weights_pb2.WeightChunk(digest=sha256(chunk).hexdigest(), size_bytes=len(chunk)) for chunk in chunks]
    file = weights_pb2.WeightFile(name="model.safetensors", size_bytes=len(data), chunks=named)
    manifest = weights_pb2.WeightManifest(kind="KIND_FULL", files=[file], dtype="float32")
    blobs = {sha256(b).hexdigest(): b for b in (*chunks, manifest.SerializeToString(deterministic=True))}
    lacking = depot.Has(weights_pb2.HasRequest(digests=blobs), timeout=60.0, metadata=auth).missing
    for digest, blob in blobs.items():  # the manifest last; what is there already gets one more owner
        head = {"digest": digest, "size_bytes": len(blob), "owner": owner}
        pieces = [{"data": blob[at : at + PIECE]} for at in range(0, len(blob), PIECE) if digest in lacking]
        depot.Put((weights_pb2.PutRequest(**fields) for fields in (head, *pieces)), timeout=120.0, metadata=auth)
    version = {"step": update, "incarnation": me.incarnation, "weights_digest": list(blobs)[-1]}
    ask("PublishVersion", **mine, version=version)


try:
    spec, update, digest = events_pb2.RunSpec(**json.loads(spec_file.read_text())), 0, ""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    if (out / "checkpoint.pt").exists():
        weights, moments, update, digest = torch.load(out / "checkpoint.pt")
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
    ask("CreateRun", spec=spec)
    me = ask("AttachTrainer", run=spec.run, last_update=update, digest=digest)
    mine = {"run": spec.run, "trainer_epoch": me.trainer_epoch}
    depot = weights_pb2_grpc.BlobServiceStub(grpc.insecure_channel(me.weights_address, OPTIONS))
    publish()
    while update < spec.updates_max:
        while not (lease := ask("LeaseBatch", **mine, update=update + 1, wait_s=20.0)).lease_id:
            print(f"waiting for {lease.waiting_for}", flush=True)
        threading.Thread(target=renew, args=(lease, done := threading.Event()), daemon=True).start()
        samples = fetch(lease)
        drop = {"disposition": "SAMPLE_DISPOSITION_DROPPED", "reason": "NOT_TRAINABLE"}
        left_out = [{"sample_id": s.meta.sample_id, **drop} for s in lease.samples if s.meta.sample_id not in samples]
        batch = {"lease_ids": [lease.lease_id], "samples": left_out, "outcome": learn(list(samples.values()))}
        digest, update = ask("CommitUpdate", **mine, **batch, update=update + 1).digest, update + 1
        done.set()
        if update % CHECKPOINT_EVERY == 0 or update == spec.updates_max:
            with (out / "partial").open("wb") as file:
                torch.save((model.state_dict(), optimizer.state_dict(), update, digest), file)
                os.fsync(file.fileno())
            (out / "partial").rename(out / "checkpoint.pt")
            ask("ReportCheckpoint", **mine, update=update, digest=digest)
        if update % spec.publish_every == 0 or update == spec.updates_max:
            publish()
        reward = sum(r.value for s in lease.samples for r in s.meta.rewards) / len(lease.samples)
        print(f"update {update}: reward {reward:.3f}, staleness {max(s.staleness for s in lease.samples)}", flush=True)
    state = next(news.state for news in ask("WatchRun", run=spec.run) if news.state.ended)
    print("held-out success:", {e.step: round(e.mean_rewards[spec.success_reward], 3) for e in state.evals})
except grpc.RpcError as err:
    print(f"{err.code().name}: {err.details()}", flush=True)
    if err.code().name not in LOST or len(returns) == 9:
        raise
    threading.Event().wait(2.0 ** len(returns))
    os.execv(sys.executable, [sys.executable, *sys.argv, "again"])  # the checkpoint is the truth: begin again from it
