"""A whole GRPO trainer over protos/rollmesh/v1 alone: docs/trainers.md has the reasons, `rollmesh up` the first three arguments.

python trainer_grpc.py --address HOST:PORT --token-file FILE --model FOLDER --spec configs/trainer_grpc.json --out FOLDER
"""

import argparse
import hashlib
import json
import os
import struct
import threading
from pathlib import Path

import grpc
import torch
from transformers import AutoModelForCausalLM

from rollmesh.v1 import events_pb2, run_pb2, run_pb2_grpc, types_pb2, weights_pb2, weights_pb2_grpc

LR, WARMUP, MINIBATCHES, CHECKPOINT_EVERY, RETURNS_MAX, CHUNK, PIECE = 7e-4, 3, 2, 5, 20, 16 << 20, 1 << 20
RETRY = {"maxAttempts": 5, "initialBackoff": "1s", "maxBackoff": "8s", "backoffMultiplier": 2}
VERBS = {"name": [{}], "waitForReady": True, "retryPolicy": {**RETRY, "retryableStatusCodes": ["UNAVAILABLE"]}}
OPTIONS = [("grpc.max_receive_message_length", 8 << 20), ("grpc.service_config", json.dumps({"methodConfig": [VERBS]}))]
LOST = ("ABORTED", "FAILED_PRECONDITION", "NOT_FOUND", "UNAVAILABLE", "DEADLINE_EXCEEDED")  # back to the checkpoint


class Trainer:
    """`update` is the last one in the model's weights, `digest` the commit digest after it."""

    def __init__(self, args):
        self.spec, self.initial, self.out = json.loads(args.spec.read_text()), args.model, args.out
        self.auth = [("authorization", f"Bearer {args.token_file.read_text().strip()}")]
        self.run = run_pb2_grpc.RunServiceStub(grpc.insecure_channel(args.address, OPTIONS))
        self.ask("CreateRun", spec=events_pb2.RunSpec(**self.spec))

    def ask(self, verb, **fields):
        return getattr(self.run, verb)(getattr(run_pb2, f"{verb}Request")(**fields), timeout=300.0, metadata=self.auth)

    def train(self):
        """From the checkpoint until a verb is refused; OUT_OF_RANGE after attaching means that the run has ended."""
        self.mine, saved, run = {}, {"update": 0, "digest": ""}, {"run": self.spec["run"]}
        self.model = AutoModelForCausalLM.from_pretrained(self.initial, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
        if (self.out / "checkpoint.pt").exists():
            saved = torch.load(self.out / "checkpoint.pt")
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
        self.update, self.digest = saved["update"], saved["digest"]
        self.attached = self.ask("AttachTrainer", **run, last_update=self.update, digest=self.digest)
        self.mine = {**run, "trainer_epoch": self.attached.trainer_epoch}
        self.publish()
        while True:
            lease = self.ask("LeaseBatch", **self.mine, update=self.update + 1, wait_s=20.0)
            if lease.lease_id:
                self.train_on(lease)
            else:
                print(f"waiting for {lease.waiting_for}", flush=True)

    def train_on(self, lease):
        done = threading.Event()
        threading.Thread(target=self.renew, args=(lease, done), daemon=True).start()
        samples = self.fetch(lease)
        applied = run_pb2.UPDATE_OUTCOME_APPLIED if self.learn(samples) else run_pb2.UPDATE_OUTCOME_SKIPPED
        out = {"disposition": run_pb2.SAMPLE_DISPOSITION_DROPPED, "reason": "NOT_TRAINABLE"}
        dropped = [s.meta.sample_id for s in lease.samples if s.meta.sample_id not in samples]
        fates = {"outcome": applied, "samples": [run_pb2.DisposedSample(sample_id=s, **out) for s in dropped]}
        commit = self.ask("CommitUpdate", **self.mine, update=self.update + 1, lease_ids=[lease.lease_id], **fates)
        self.update, self.digest = self.update + 1, commit.digest
        done.set()
        if self.update % CHECKPOINT_EVERY == 0:
            self.save()
        if self.update % self.spec["publish_every"] == 0:
            self.publish()
        reward = sum(r.value for s in lease.samples for r in s.meta.rewards) / len(lease.samples)
        lags = sorted(s.staleness for s in lease.samples)
        print(f"update {self.update}: reward {reward:.3f}, staleness {lags[0]} to {lags[-1]}", flush=True)

    def renew(self, lease, done):
        while not done.wait(lease.lease_s / 3):
            try:
                self.ask("RenewBatch", **self.mine, lease_id=lease.lease_id)
            except grpc.RpcError:
                return  # the commit says the same

    def fetch(self, lease):
        """By sample: a tensor [n, 5] of (token, trained?, its log-prob, temperature, advantage)."""
        leased, advantages, found = {s.meta.sample_id: s for s in lease.samples}, {}, {}
        for group in lease.groups:  # all scored members, trained or not: the baseline would be biased otherwise
            members = [m for m in group.members if all(r.outcome == types_pb2.REWARD_OUTCOME_OK for r in m.rewards)]
            sums = torch.tensor([sum(r.value for r in m.rewards) for m in members], dtype=torch.float64)
            values = (sums - sums.mean()) / (sums.std(correction=0) + 1e-6)
            advantages |= zip([m.sample_id for m in members], values.tolist(), strict=True)
        for message in self.ask("FetchSamples", **self.mine, lease_id=lease.lease_id):
            for s in (s for s in message.episode.samples if s.sample_id in message.sample_ids):
                tokens = path_tokens(message.episode, s.leaf, leased[s.sample_id].mask_below_step)
                if leased[s.sample_id].meta.trainable and s.sample_id in advantages and any(t[1] for t in tokens):
                    rows = [(*token, advantages[s.sample_id]) for token in tokens]
                    found[s.sample_id] = torch.tensor(rows, dtype=torch.float64)
        return dict(sorted(found.items()))

    def learn(self, found):
        """Some optimiser steps; returns whether any was taken."""
        self.optimizer.param_groups[0]["lr"] = LR * min(1.0, (self.update + 1) / WARMUP)
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(self.update)).tolist()
        parts = [[list(found.values())[i] for i in order[n::MINIBATCHES]] for n in range(MINIBATCHES)]
        steps = [step(self.model, self.optimizer, part) for part in parts if part]
        return any(steps)

    def save(self):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        with (self.out / "partial").open("wb") as file:
            torch.save({**state, "update": self.update, "digest": self.digest}, file)
            os.fsync(file.fileno())
        (self.out / "partial").rename(self.out / "checkpoint.pt")
        self.ask("ReportCheckpoint", **self.mine, update=self.update, digest=self.digest)

    def publish(self):
        """File -> chunks -> manifest -> depot -> announcement. Equal weights give an equal digest, so it may be repeated."""
        self.model.save_pretrained(self.out / "weights")
        data = (self.out / "weights" / "model.safetensors").read_bytes()
        chunks = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
        named = [weights_pb2.WeightChunk(digest=sha256(chunk), size_bytes=len(chunk)) for chunk in chunks]
        file = weights_pb2.WeightFile(name="model.safetensors", size_bytes=len(data), chunks=named)
        full = weights_pb2.WeightManifest(kind=weights_pb2.WeightManifest.KIND_FULL, files=[file], dtype="float32")
        manifest, incarnation = full.SerializeToString(deterministic=True), self.attached.incarnation
        with grpc.insecure_channel(self.attached.weights_address, OPTIONS) as channel:
            for blob in (*chunks, manifest):  # the manifest last: it never names what is not there
                self.put(weights_pb2_grpc.BlobServiceStub(channel), blob, f"weights:main@{self.update}.{incarnation}")
        step = {"policy": "main", "step": self.update, "incarnation": incarnation, "weights_digest": sha256(manifest)}
        self.ask("PublishVersion", **self.mine, version=types_pb2.PolicyVersion(**step))

    def put(self, depot, blob, owner):
        """Stores a blob; one that is there already only gets one more owner."""
        missing = depot.Has(weights_pb2.HasRequest(digests=[sha256(blob)]), metadata=self.auth).missing
        first = weights_pb2.PutRequest(digest=sha256(blob), size_bytes=len(blob), owner=owner)
        pieces = [blob[at : at + PIECE] for at in range(0, len(blob) if missing else 0, PIECE)]
        depot.Put(iter([first, *(weights_pb2.PutRequest(data=p) for p in pieces)]), timeout=120.0, metadata=self.auth)

    def finish(self):
        self.save()
        self.publish()
        state = next(news.state for news in self.ask("WatchRun", run=self.spec["run"]) if news.state.ended)
        print("held-out success:", {e.step: round(e.mean_rewards[self.spec["success_reward"]], 3) for e in state.evals})


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def path_tokens(episode, at, mask_below):
    """(token, trained?, log-prob, temperature) of the path from its root to segment `at`."""
    if at < 0:
        return []
    s, n = episode.segments[at], len(episode.segments[at].token_ids) // 4
    old = s.source == types_pb2.SEGMENT_SOURCE_POLICY and s.version.step < mask_below
    trained = s.loss_mask if s.loss_mask and s.logprobs and not old else bytes(n)
    logprobs = struct.unpack(f"<{n}f", s.logprobs or bytes(4 * n))
    heat = episode.sampling_params[s.sampling].temperature if s.sampling >= 0 else 0.0
    tokens = zip(struct.unpack(f"<{n}i", s.token_ids), trained, logprobs, [heat or 1.0] * n, strict=True)
    return [*path_tokens(episode, s.parent, mask_below), *tokens]


def step(model, optimizer, samples, rows=16):
    """One step of clipped policy gradient, every trained token alike. False if its gradient was not finite."""
    num_trained = sum(sample[:, 1].sum() for sample in samples)
    for start in range(0, len(samples), rows):
        batch = torch.nn.utils.rnn.pad_sequence(samples[start : start + rows], batch_first=True)
        mask, behaviour, heat, advantage = batch[:, 1:, 1:].float().unbind(-1)
        logits = model(input_ids=batch[:, :, 0].long()).logits[:, :-1] / torch.where(heat > 0, heat, 1.0)[..., None]
        logprobs = logits.log_softmax(-1).gather(-1, batch[:, 1:, :1].long()).squeeze(-1)
        ratio = ((logprobs - behaviour) * mask).clamp(-20, 20).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        (-(gain * mask).sum() / num_trained).backward()
    finite = bool(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite())
    if finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return finite


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    for name in ("token-file", "model", "spec", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    trainer = Trainer(parser.parse_args())
    for _ in range(RETURNS_MAX):
        try:
            trainer.train()
        except grpc.RpcError as err:
            print(f"{err.code().name}: {err.details()}", flush=True)
            if err.code() is grpc.StatusCode.OUT_OF_RANGE and trainer.mine:
                raise SystemExit(trainer.finish()) from None
            if err.code().name not in LOST:
                raise
    raise SystemExit("gave up")
