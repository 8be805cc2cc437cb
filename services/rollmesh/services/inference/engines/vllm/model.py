"""What the vLLM engine reads of the model's folder, and the files of prepared versions after a check against it.

Imports torch and transformers, which come with vLLM.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rollmesh.services.inference.engine import WeightsMismatch
from rollmesh.services.inference.engines.common.adapters import merge_adapter
from rollmesh.services.inference.engines.common.stop import Decode, load_decode
from rollmesh.services.inference.engines.torch.execution import chooses_experts
from rollmesh.services.inference.engines.torch.model_spec import read_config
from rollmesh.services.inference.engines.vllm.config import VllmEngineConfig
from rollmesh.services.inference.engines.vllm.prepared_files import PreparedFiles, files_in, keep_files
from rollmesh.services.inference.engines.vllm.weights_fit import ExpectedTensors
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.store.disk import is_disk_full
from rollmesh.shared.weights.model_folder import check_positions, positions_max
from rollmesh.trainer.model_config import auto_class


class ModelFolder:
    """The model's vocabulary, context and tensors, and the prepared versions. Construct it in a thread."""

    def __init__(self, config: VllmEngineConfig) -> None:
        """Raises ConfigError for a folder without a causal language model, or a context beyond its positions."""
        folder = Path(config.model)
        try:
            model_config = read_config(folder)
            with torch.device("meta"):
                model: Any = auto_class(model_config).from_config(model_config)
        except (ValueError, RuntimeError, AttributeError, KeyError) as err:
            raise ConfigError(f"`model`: transformers cannot make the model in {folder}: {err}", key="model") from err
        if chooses_experts(folder):
            raise ConfigError(
                f"`model`: the engine vllm does not take the weights of mixture-of-experts models such as {folder}; "
                "use the engine torch",
                key="model",
            )
        text = model_config.get_text_config()
        key = "inference.engine.options.context_max"
        check_positions(text.to_dict(), config.context_max, model=str(folder), key=key)
        self.context_max = config.context_max or positions_max(text.to_dict()) or 0
        if not self.context_max:
            raise ConfigError(f"`{key}`: {folder} does not state the positions of the model; set the context", key=key)
        self.vocab_size = int(text.vocab_size)
        self.decode: Decode | None = load_decode(folder)
        self._expected = ExpectedTensors(model)
        self._prepared = PreparedFiles(config.folder, config.prepared_max)
        self._loader = concurrent.futures.ThreadPoolExecutor(1, "engine-loader")

    async def prepare(self, version: PolicyVersion, files: Mapping[str, Path]) -> None:
        """Check and keep the files of a version. Idempotent. Raises WeightsMismatch."""
        if version in self._prepared:
            return
        folder = self._prepared.new_folder()
        try:
            await asyncio.get_running_loop().run_in_executor(self._loader, self._keep, dict(files), folder)
        except BaseException:
            self._loader.submit(shutil.rmtree, folder, ignore_errors=True)
            raise
        self._prepared.put(version, folder)

    def take(self, version: PolicyVersion) -> Path:
        """Return the folder of a prepared version, which the caller deletes. Raises KeyError."""
        return self._prepared.take(version)

    def paths(self, folder: Path) -> list[str]:
        return files_in(folder)

    def discard(self, version: PolicyVersion) -> None:
        self._prepared.discard(version)

    def close(self) -> None:
        self._loader.shutdown(wait=True, cancel_futures=True)
        self._prepared.close()

    def _keep(self, files: Mapping[str, Path], folder: Path) -> None:
        torch.set_num_threads(1)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(prefix="merged-", dir=folder.parent) as scratch:
                merged = merge_adapter(files, Path(scratch))
                self._expected.check(merged)
                keep_files(merged, folder)
        except OSError as err:
            if is_disk_full(err):  # a fault of this node, not of the weights
                raise
            raise WeightsMismatch(f"the files cannot be kept in {folder}: {err}") from err
