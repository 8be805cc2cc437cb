"""Publishing: export -> probes -> manifest -> upload -> announce.

Publishing the same version again must give the same digest, or the coordinator takes it for another history: a learner that
restarts at the step it published last does publish it again. The digest covers the probes, and their log-probs may differ in the
last bit on another machine. Hence the manifest of the last version is kept in a file, written before the version is
announced, and reused as long as it names the same chunks.

Probes are token sequences from the first batch ever trained, kept in a file too. Before there is one (step 0), they are drawn
from the vocabulary.
Collaborators: `engine` (weights, log-probs), `shared.weights` (manifest, upload), `client.Trainer` (PublishVersion).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from rollmesh.client import Trainer
from rollmesh.services.learner.compute import ComputeThread
from rollmesh.services.learner.config import PublishConfig
from rollmesh.services.learner.engine import TrainerEngine
from rollmesh.shared.errors import InvalidInput, WeightsRejected
from rollmesh.shared.trajectory import IntArray, TrainingSample
from rollmesh.shared.versions import PolicyVersion
from rollmesh.shared.weights.digests import sha256_hex
from rollmesh.shared.weights.manifest import BuiltManifest, build_manifest, parse_manifest
from rollmesh.shared.weights.probes import Probe

_SYNTHETIC_TOKENS = 32


class Publisher:
    """Publishes versions of one learner; `folder` is its own and kept over restarts."""

    def __init__(self, compute: ComputeThread, config: PublishConfig, folder: Path) -> None:
        self._compute = compute
        self._config = config
        self._folder = folder

    async def publish(self, trainer: Trainer, engine: TrainerEngine) -> PolicyVersion:
        """Upload and announce the engine's current weights as `trainer.version`; return it with its digest. Repeatable.

        Raises `Fenced`, `WrongVersion`, `VersionConflict`, `DiskFull`; `NotUploaded` if the depot keeps losing it.
        """
        scratch = self._folder / "files"
        try:
            built = await self._compute.run(lambda: self._build(engine, trainer.version, scratch))
            config = self._config
            return await trainer.publish_manifest(built, transfer=config.transfer, attempts_max=config.attempts_max)
        finally:
            await self._compute.run(lambda: shutil.rmtree(scratch, ignore_errors=True))

    def note_samples(self, samples: Sequence[TrainingSample]) -> None:
        """Takes the probes from these samples unless there are some already. Called in the compute thread."""
        path = self._folder / "probes.json"
        if path.exists() or not self._config.num_probes:
            return
        prompts = _prompts(samples, self._config)
        if prompts:
            _write(path, msgspec.json.encode(prompts))

    # In the compute thread --------------------------------------------------------------------------------------------

    def _build(self, engine: TrainerEngine, version: PolicyVersion, scratch: Path) -> BuiltManifest:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        exported = engine.export_weights(scratch)
        probes = [Probe(token_ids=ids, logprobs=engine.score(ids)) for ids in self._probe_prompts(engine)]
        if not all(np.isfinite(probe.logprobs).all() for probe in probes):
            raise WeightsRejected(
                f"the weights of {version} score a probe as NaN or infinite: the update went wrong, and they are not published; "
                "remove the checkpoints that hold it, lower the learning rate, and go on",
                version=version,
            )
        built = build_manifest(exported.files, tied=exported.tied, probes=[probe.encode() for probe in probes])
        return self._as_before(version, built)

    def _as_before(self, version: PolicyVersion, built: BuiltManifest) -> BuiltManifest:
        """The manifest under which these very weights were published before, if they were; else this one, noted down."""
        path = self._folder / f"step-{version.step:08d}.{version.incarnation}.manifest"
        known = _read_manifest(path, built)
        if known is not None:
            return known
        _write(path, built.data)
        for other in self._folder.glob("step-*.manifest"):
            if other != path:
                other.unlink()
        return built

    def _probe_prompts(self, engine: TrainerEngine) -> list[IntArray]:
        if not self._config.num_probes or not engine.vocab_size:
            return []
        path = self._folder / "probes.json"
        if path.exists():
            return [np.asarray(p, np.int32) for p in msgspec.json.decode(path.read_bytes(), type=list[list[int]])]
        length = min(_SYNTHETIC_TOKENS, self._config.probe_tokens)
        draws = np.random.default_rng(0).integers(engine.vocab_size, size=(self._config.num_probes, length))
        return list(draws.astype(np.int32))


def _prompts(samples: Sequence[TrainingSample], config: PublishConfig) -> list[list[int]]:
    """The beginnings of up to `num_probes` samples, of as many groups as there are."""
    by_group: dict[str, list[int]] = {}
    for sample in samples:
        if sample.segments and sample.group not in by_group:
            tokens = np.concatenate([s.token_ids for s in sample.segments])[: config.probe_tokens]
            if len(tokens) >= 2:
                by_group[sample.group] = tokens.tolist()
    return list(by_group.values())[: config.num_probes]


def _read_manifest(path: Path, built: BuiltManifest) -> BuiltManifest | None:
    """The manifest in `path`, if it can be read and names the same files in the same chunks."""
    try:
        data = path.read_bytes()
        same = list(parse_manifest(data).files) == list(parse_manifest(built.data).files)
    except (OSError, InvalidInput):
        return None
    return BuiltManifest(data=data, weights_digest=sha256_hex(data), chunks=built.chunks) if same else None


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all, also over a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
