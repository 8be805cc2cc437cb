"""Publish versions: copy (export -> probes) -> manifest -> upload -> announce.

The copy runs in the compute thread between two updates, because it must be of one step. All that follows uses only the
copy. Copy and upload run while the update is committed, when the compute thread is idle; the announcement waits for the
commit. What is left then runs while the next update is computed. At most one publication is open, because they share a
folder.

A learner that restarts at its last published step publishes it again. The digest must then be the same; otherwise the
coordinator treats it as another history. The digest covers the probes, and their log-probs may differ in the last bit
on another machine. Therefore the manifest of the last version is stored in a file before the announcement, and reused
while it names the same chunks.

Probes are token sequences from the first trained batch, which are stored in a file too. At step 0 they are drawn from
the vocabulary. Collaborators: `engine` (weights, log-probs), `shared.weights` (manifest, upload),
`client.trainer.Trainer` (PublishVersion).
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from rollmesh.client import Trainer
from rollmesh.services.learner.compute import ComputeThread
from rollmesh.services.learner.config import PublishConfig
from rollmesh.services.learner.engine import ExportedWeights, TrainerEngine
from rollmesh.shared.domain.trajectory import IntArray, TrainingSample
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import InvalidInput, WeightsRejected
from rollmesh.shared.store.whole_files import write_whole
from rollmesh.shared.weights.digests import sha256_hex
from rollmesh.shared.weights.finite import first_not_finite
from rollmesh.shared.weights.manifest import BuiltManifest, build_manifest, parse_manifest
from rollmesh.shared.weights.probes import Probe
from rollmesh.v1 import weights_pb2

_SYNTHETIC_TOKENS = 32
_NOT_FINITE = (
    "so the version is not published; remove the checkpoints that hold this update, lower the learning rate, and resume"
)


@dataclass(frozen=True, slots=True)
class WeightsCopy:
    """The weights of one step in files, with the log-probs of the probes under them."""

    version: PolicyVersion
    exported: ExportedWeights
    probes: tuple[Probe, ...]


class Publisher:
    """Publish versions of one learner. No other component uses `folder`, which persists over restarts."""

    def __init__(self, compute: ComputeThread, files: ComputeThread, config: PublishConfig, folder: Path) -> None:
        """`files` is a thread for hashing and deleting copies, so that `compute` is free for the next update."""
        self._compute = compute
        self._files = files
        self._config = config
        self._folder = folder
        self._scratch = folder / "files"
        """Files of the newest copy."""
        self._kept: dict[tuple[Path, int, int], weights_pb2.WeightFile] = {}
        """Chunks of files that versions share, such as the base of adapters, by path, size and time of the last change
        in nanoseconds."""

    async def copy(self, engine: TrainerEngine, version: PolicyVersion) -> WeightsCopy:
        """Copy the engine's current weights, which are `version`, and score the probes on them. The previous copy is
        deleted.

        Raise `WeightsRejected` for weights that score a probe as NaN or infinite, and `DiskFull`.
        """
        return await self._compute.run(lambda: self._copy(engine, version))

    async def publish(
        self, trainer: Trainer, copying: Awaitable[WeightsCopy], may_announce: asyncio.Event
    ) -> PolicyVersion:
        """Upload a copy of the weights, and announce it as `trainer.version` once `may_announce` is set, which is after
        the commit of its update. Return it with its digest. Repeatable.

        Raise `WeightsRejected` for a tensor with a value that is NaN or infinite, `Fenced`, `WrongVersion`,
        `VersionConflict`, `DiskFull`, or `NotUploaded` if the depot repeatedly loses it.
        """
        config, allowed = self._config, None

        async def allow(copy: WeightsCopy, manifest: bytes) -> None:
            await self._files.run(lambda: self._store(copy.version, manifest))
            await may_announce.wait()
            assert str(copy.version) == str(trainer.version), (
                "after the commit of its update, and before that of the next"
            )

        try:
            copy = await copying
            built = await self._files.run(lambda: self._build(copy))
            allowed = asyncio.create_task(allow(copy, built.data))
            published = await trainer.publish_manifest(
                built,
                version=copy.version,
                transfer=config.transfer,
                attempts_max=config.attempts_max,
                before_announcement=allowed,
            )
            await self._files.run(lambda: self._forget_others(copy.version))
            return published
        finally:
            if allowed is not None:
                allowed.cancel()
                await asyncio.gather(allowed, return_exceptions=True)
            await self._files.run(lambda: shutil.rmtree(self._scratch, ignore_errors=True))

    def note_samples(self, samples: Sequence[TrainingSample]) -> None:
        """Take the probes from these samples unless probes exist. Called in the compute thread."""
        path = self._folder / "probes.json"
        if path.exists() or not self._config.num_probes:
            return
        prompts = _prompts(samples, self._config)
        if prompts:
            _write(path, msgspec.json.encode(prompts))

    # In the compute thread --------------------------------------------------------------------------------------------

    def _copy(self, engine: TrainerEngine, version: PolicyVersion) -> WeightsCopy:
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir(parents=True)
        exported = engine.export_weights(self._scratch)
        prompts = self._probe_prompts(engine)
        scored = engine.score(prompts) if prompts else []
        probes = tuple(Probe(token_ids=ids, logprobs=row) for ids, row in zip(prompts, scored, strict=True))
        if not all(np.isfinite(probe.logprobs).all() for probe in probes):
            raise WeightsRejected(
                f"the weights of {version} score a probe as NaN or infinite, {_NOT_FINITE}",
                version=version,
            )
        return WeightsCopy(version, exported, probes)

    def _probe_prompts(self, engine: TrainerEngine) -> list[IntArray]:
        if not self._config.num_probes or not engine.vocab_size:
            return []
        path = self._folder / "probes.json"
        if path.exists():
            return [np.asarray(p, np.int32) for p in msgspec.json.decode(path.read_bytes(), type=list[list[int]])]
        length = min(_SYNTHETIC_TOKENS, self._config.probe_tokens)
        draws = np.random.default_rng(0).integers(engine.vocab_size, size=(self._config.num_probes, length))
        return list(draws.astype(np.int32))

    # In the thread for files ------------------------------------------------------------------------------------------

    def _build(self, copy: WeightsCopy) -> BuiltManifest:
        exported, probes = copy.exported, [probe.encode() for probe in copy.probes]
        shared = {
            name: _identity(path) for name, path in exported.files.items() if not path.is_relative_to(self._scratch)
        }
        known = {name: self._kept[identity] for name, identity in shared.items() if identity in self._kept}
        changed = {name: path for name, path in {**exported.files, **exported.adapter}.items() if name not in known}
        for path in changed.values():
            if path.suffix == ".safetensors" and (name := first_not_finite(path)):
                raise WeightsRejected(
                    f"tensor {name} of {copy.version} has a value that is NaN or infinite, {_NOT_FINITE}",
                    version=copy.version,
                )
        built = build_manifest(
            exported.files,
            adapter=exported.adapter,
            tied=exported.tied,
            probes=probes,
            probe_tolerance=exported.probe_tolerance,
            known=known,
        )
        hashed = {file.name: file for file in parse_manifest(built.data).files}
        self._kept = {identity: hashed[name] for name, identity in shared.items()}
        return self._as_before(copy.version, built)

    def _as_before(self, version: PolicyVersion, built: BuiltManifest) -> BuiltManifest:
        """Return the stored manifest if these weights were published before; otherwise `built`."""
        return _read_manifest(self._manifest_path(version), built) or built

    def _store(self, version: PolicyVersion, manifest: bytes) -> None:
        """Store the manifest of the version that is uploaded meanwhile, unless it is stored."""
        path = self._manifest_path(version)
        if not path.exists() or path.read_bytes() != manifest:
            _write(path, manifest)

    def _forget_others(self, version: PolicyVersion) -> None:
        """Delete the manifests of other versions. Until `version` is announced, a restarted learner may publish the one
        before again."""
        for other in self._folder.glob("step-*.manifest"):
            if other != self._manifest_path(version):
                other.unlink()

    def _manifest_path(self, version: PolicyVersion) -> Path:
        return self._folder / f"step-{version.step:08d}.{version.incarnation}.manifest"


def _identity(path: Path) -> tuple[Path, int, int]:
    found = path.stat()
    return path, found.st_size, found.st_mtime_ns


def _prompts(samples: Sequence[TrainingSample], config: PublishConfig) -> list[list[int]]:
    """Return prefixes of up to `num_probes` samples, from as many groups as possible."""
    by_group: dict[str, list[int]] = {}
    for sample in samples:
        if sample.segments and sample.group not in by_group:
            tokens = np.concatenate([s.token_ids for s in sample.segments])[: config.probe_tokens]
            if len(tokens) >= 2:
                by_group[sample.group] = tokens.tolist()
    return list(by_group.values())[: config.num_probes]


def _read_manifest(path: Path, built: BuiltManifest) -> BuiltManifest | None:
    """Return the manifest in `path` if it is readable and names the same files in the same chunks; otherwise None."""
    try:
        data = path.read_bytes()
        same = list(parse_manifest(data).files) == list(parse_manifest(built.data).files)
    except (OSError, InvalidInput):
        return None
    return BuiltManifest(data=data, weights_digest=sha256_hex(data), chunks=built.chunks) if same else None


def _write(path: Path, data: bytes) -> None:
    """Write atomically, also in a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, data, private=False)
