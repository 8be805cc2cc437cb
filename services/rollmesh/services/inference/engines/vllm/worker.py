"""What the engine adds to each worker process of vLLM: the transfer of weights from files, and the sampler.

vLLM imports this module in a worker, because the engine names `WorkerExtension` as its `worker_extension_cls`; the
import registers the transfer engine under `BACKEND`. Never imported in the node's own process.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from rollmesh.services.inference.engines.vllm.host import BACKEND
from rollmesh.services.inference.engines.vllm.sampler import KeyedSampler

if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(
        BACKEND, "rollmesh.services.inference.engines.vllm.weights", "FileTransferEngine"
    )


class WorkerExtension:
    """Methods that vLLM adds to its worker class. The engine calls them by name, on all workers at once."""

    model_runner: Any
    weight_transfer_engine: Any

    def rollmesh_install(self) -> str:
        """Install the sampler. Return the type of the device."""
        transfer = self.weight_transfer_engine
        self.model_runner.sampler = KeyedSampler(self.model_runner, lambda: transfer.serial)
        return str(self.model_runner.device.type)
