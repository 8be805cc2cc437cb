"""Prepare versions of the weights while serving, activate them by a swap, and verify them before their tokens leave.

prepare:  fetch the manifest and hashed chunks -> assemble the files -> the engine loads them into its second buffer
activate: hold the new version's tokens -> the engine swaps -> score the probes -> release the tokens, or quarantine the
node

A node whose active weights score the probes wrong serves no request until its process restarts. A real engine was
observed to report success and serve other weights, so a second activation proves nothing.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from rollmesh.services.inference.config import InferenceConfig
from rollmesh.services.inference.engine import EngineBroken, KvPolicy
from rollmesh.services.inference.engine import WeightsMismatch as EngineRejects
from rollmesh.services.inference.state import ServingState
from rollmesh.shared.domain.text import count_of
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import (
    DeadlineExceeded,
    DiskFull,
    EngineFailed,
    InvalidInput,
    MeshError,
    NotPrepared,
    ProbeMismatch,
    UnknownPolicy,
    WeightsRejected,
)
from rollmesh.shared.shared_tasks import SharedTasks
from rollmesh.shared.store.disk import disk_full_errors
from rollmesh.shared.weights.blobs import LINKED_BYTES, BlobStore, run_sized
from rollmesh.shared.weights.delta_cache import DeltaCache
from rollmesh.shared.weights.digests import check_digest
from rollmesh.shared.weights.fetcher import Fetcher, OpenChannel, SourceChannels
from rollmesh.shared.weights.manifest import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PROBE_TOLERANCE,
    ROUNDED_PROBE_TOLERANCE,
    version_owner,
)
from rollmesh.shared.weights.precision import dtypes_of, misstated, rounded
from rollmesh.shared.weights.probes import probes_of
from rollmesh.v1 import weights_pb2

ASSEMBLED_PREFIX = "files-"
"""Begins the name of a folder beside the blobs, in which the files of a version are assembled from their chunks while
it is prepared."""


class WeightKeeper:
    """The versions of one node. A call continues if its caller is cancelled, and a second call for the same version
    joins it."""

    def __init__(
        self,
        state: ServingState,
        store: BlobStore,
        open_channel: OpenChannel,
        config: InferenceConfig,
        *,
        deltas: DeltaCache | None = None,
    ) -> None:
        self._state = state
        self._store = store
        self._sources = SourceChannels(open_channel)
        self._config = config
        self._deltas = deltas
        self._active: weights_pb2.WeightManifest | None = None
        """Manifest of the active version, whose chunks are the bases of deltas."""
        self._prepared: dict[PolicyVersion, weights_pb2.WeightManifest] = {}
        self._preparing: SharedTasks[PolicyVersion, int] = SharedTasks("the preparation of")
        self._activating: SharedTasks[PolicyVersion, float] = SharedTasks("the activation of")
        self._swap = asyncio.Lock()
        self._probe_error = 0.0

    async def start(self) -> None:
        """Delete the assembled files that a killed node left. Call it when the store has started."""
        for folder in self._store.directory.glob(f"{ASSEMBLED_PREFIX}*"):
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def prepare(self, version: PolicyVersion, sources: Sequence[str]) -> int:
        """Fetch, verify and load a version. Return the bytes that crossed the network. Idempotent.

        Raises `UnknownBlob`, `HashMismatch`, `WeightsRejected`, `DiskFull`, `DeadlineExceeded`, `EngineFailed`.
        """
        self._check(version)
        if version in self._prepared or version == self._state.active:
            return 0
        return await self._preparing.join(version, lambda: self._prepare(version, sources))

    async def activate(self, version: PolicyVersion, kv: KvPolicy, retain: Collection[PolicyVersion] = ()) -> float:
        """Swap and score the probes. Return the largest error in nats. Idempotent. Waits for a prepare in progress.

        The older versions of `retain` keep serving, then those of running pinned requests, as many as the engine can
        hold.

        Raises `NotPrepared`; `ProbeMismatch` or `EngineFailed`, after which the node is quarantined.
        """
        self._check(version)
        if (preparing := self._preparing.running(version)) is not None:
            await asyncio.wait([preparing])  # its own caller gets its error; this caller gets NotPrepared
        return await self._activating.join(version, lambda: self._activate(version, kv, retain))

    async def discard(self, version: PolicyVersion) -> None:
        """Drop a prepared or an older version, or stop preparing it. Idempotent. The active version stays."""
        await self._preparing.cancel(version)
        if version == self._state.engine.active:
            return
        if self._prepared.pop(version, None) is not None or version in self._state.engine.held:
            self._state.engine.discard(version)
        self._store.release(version_owner(version))

    async def close(self) -> None:
        await self._preparing.close()
        await self._activating.close()
        await self._sources.close()

    # Prepare ----------------------------------------------------------------------------------------------------------

    async def _prepare(self, version: PolicyVersion, sources: Sequence[str]) -> int:
        try:
            return await self._fetch(version, sources)
        except DiskFull:
            if not self._release_unused():
                raise
            return await self._fetch(version, sources)  # without what versions that failed have left

    async def _fetch(self, version: PolicyVersion, sources: Sequence[str]) -> int:
        fetcher = Fetcher(self._store, self._sources, self._config.transfer, self._deltas)
        try:
            with disk_full_errors(self._store.directory):
                async with asyncio.timeout(self._config.prepare_s):
                    owner, base = version_owner(version), self._active
                    manifest = await fetcher.version(version.weights_digest, sources, owner=owner, base=base)
                    await self._load(version, manifest)
        except TimeoutError as err:
            raise DeadlineExceeded(f"{version} was not prepared within prepare_s = {self._config.prepare_s}") from err
        except OSError as err:
            raise EngineFailed(f"{version} was not prepared: {err}; check the disk of {self._store.directory}") from err
        self._prepared[version] = manifest
        return fetcher.fetched_bytes

    async def _load(self, version: PolicyVersion, manifest: weights_pb2.WeightManifest) -> None:
        folder = self._store.directory / f"{ASSEMBLED_PREFIX}{version.weights_digest}"
        try:
            files = await self._files(manifest, folder)
            num_bytes = sum(file.size_bytes for file in manifest.files)
            await run_sized(num_bytes, lambda: self._check_precision(manifest, files), inline_max=LINKED_BYTES)
            await self._state.engine.prepare(version, files)
        except EngineRejects as err:
            raise WeightsRejected(f"{version}: {err}", version=version) from err
        except EngineBroken as err:
            raise EngineFailed(f"{version} was not prepared: {err}") from err
        finally:
            if folder.exists():  # only for files of several chunks
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _check_precision(self, manifest: weights_pb2.WeightManifest, files: Mapping[str, Path]) -> None:
        """Raise `EngineRejects` if the files have another precision than the manifest states, or if the engine would
        round them."""
        base = [path for name, path in files.items() if name not in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
        try:
            dtypes = dtypes_of(base)
        except InvalidInput as err:
            raise EngineRejects(str(err)) from err
        if what := misstated(manifest, dtypes):
            raise EngineRejects(f"{what}; build the manifest from the files that are published")
        own = self._state.engine.capabilities.dtype
        if not self._config.cast_weights and (names := rounded(dtypes, own)):
            raise EngineRejects(
                f"{count_of(len(names), 'tensor')}, first {names[0]} of {dtypes[names[0]]}, would be rounded to {own}, "
                f"in which the engine computes; publish {own}, set `inference.engine.options.dtype` or the --dtype of "
                "the attached server, or allow it with `inference.cast_weights: true`"
            )

    async def _files(self, manifest: weights_pb2.WeightManifest, folder: Path) -> Mapping[str, Path]:
        """Return the local path per file name: the blob itself if the file is one chunk, else a file assembled in
        `folder`."""
        files: dict[str, Path] = {}
        for file in manifest.files:
            parts = [await self._store.open(chunk.digest) for chunk in file.chunks]
            if len(parts) == 1:
                files[file.name] = parts[0]
            else:
                files[file.name] = folder / file.name
                await asyncio.to_thread(_concatenate, parts, files[file.name])
        return files

    # Activate ---------------------------------------------------------------------------------------------------------

    async def _activate(self, version: PolicyVersion, kv: KvPolicy, retain: Collection[PolicyVersion]) -> float:
        async with self._swap:
            self._check(version)
            if version == self._state.active:
                return self._probe_error
            manifest = self._prepared.get(version)
            if manifest is None:
                raise NotPrepared(f"{version} is not prepared on this node; prepare it first", version=version)
            self._probe_error = await self._swap_and_judge(version, manifest, kv, retain)
            self._active = manifest
            self._forget_others(version)
            return self._probe_error

    async def _swap_and_judge(
        self,
        version: PolicyVersion,
        manifest: weights_pb2.WeightManifest,
        kv: KvPolicy,
        retain: Collection[PolicyVersion],
    ) -> float:
        verdict: MeshError | None = EngineFailed(f"the activation of {version} was interrupted; restart the node")
        kept = self._state.announce_swap(version, retain)
        try:
            async with asyncio.timeout(self._config.activate_s):
                error = await self._worst_probe(version, manifest, kv, kept)
            verdict = _judge(version, error, self._tolerance(manifest))
        except KeyError:  # the engine dropped it for newer versions and swapped nothing
            verdict = None
            del self._prepared[version]
            raise NotPrepared(f"{version} is no longer prepared on this node; prepare it again") from None
        except (TimeoutError, EngineBroken, ValueError) as err:
            cause = str(err) or f"no response within activate_s = {self._config.activate_s}"
            verdict = EngineFailed(f"the activation of {version} failed: {cause}; restart the node")
            raise verdict from err
        finally:
            self._decide(verdict)
        if verdict is not None:
            raise verdict
        return error

    def _tolerance(self, manifest: weights_pb2.WeightManifest) -> float:
        """Return the tolerance of the probes, which is larger if the engine rounds the published weights
        (`cast_weights`)."""
        tolerance = manifest.probe_tolerance or PROBE_TOLERANCE
        casts = rounded({"weights": manifest.dtype}, self._state.engine.capabilities.dtype)
        return max(tolerance, ROUNDED_PROBE_TOLERANCE) if casts else tolerance

    def _decide(self, verdict: MeshError | None) -> None:
        if verdict is None:
            self._state.gate.release()
        else:
            self._state.gate.fail(verdict)

    async def _worst_probe(
        self,
        version: PolicyVersion,
        manifest: weights_pb2.WeightManifest,
        kv: KvPolicy,
        retain: Collection[PolicyVersion],
    ) -> float:
        """Activate a version. Return the largest |log-prob difference| over all probes, in nats; infinite if the engine
        scored under another version."""
        engine, probes = self._state.engine, probes_of(manifest)
        rows = [probe.token_ids for probe in probes]
        results = await engine.activate_scored(version, kv, rows, retain)
        if any(result.version != version for result in results):
            return float("inf")
        pairs = zip(results, probes, strict=True)
        return max(
            (float(np.abs(result.logprobs[1:] - probe.logprobs[1:]).max()) for result, probe in pairs), default=0.0
        )

    def _forget_others(self, version: PolicyVersion) -> None:
        """Drop older versions. The blobs of the active one stay, because peers fetch them from this node."""
        order = (version.incarnation, version.step)
        for other in [v for v in self._prepared if (v.incarnation, v.step) < order]:
            del self._prepared[other]
            self._state.engine.discard(other)
        self._prepared.pop(version, None)
        self._release_unused()

    def _release_unused(self) -> int:
        """Delete the blobs of versions that are neither active nor prepared nor being prepared. Return the freed
        bytes."""
        active = self._state.engine.active
        used = (*self._prepared, *self._preparing, *([active] if active is not None else []))
        unused = self._store.owners - {version_owner(version) for version in used}
        return sum(self._store.release(owner) for owner in unused)

    def _check(self, version: PolicyVersion) -> None:
        if self._state.gate.failure is not None:
            raise self._state.gate.failure
        if version.policy != self._state.policy:
            raise UnknownPolicy(f"this node serves policy {self._state.policy!r}, not {version.policy!r}")
        check_digest(version.weights_digest, "version.weights_digest")


def _judge(version: PolicyVersion, error: float, tolerance: float) -> MeshError | None:
    if error <= tolerance:  # false for NaN
        return None
    return ProbeMismatch(
        f"the probes of {version} differ by {error:.4g} nats, at most {tolerance:g} is allowed: the engine serves "
        "other weights than were uploaded; this node is quarantined, restart it",
        version=version,
        probe_error=error,
        probe_tolerance=tolerance,
    )


def _concatenate(parts: Sequence[Path], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, file, 1 << 20)
