"""The transfer of weights into a worker of vLLM: from the verified files of this host, without a second copy over a
socket.

vLLM's own reload of layers keeps the packed copy of the old output layer if a model ties it to the embedding (vLLM 0.32
on a CPU: no error, and log-probs of other weights). `TiedHeads` packs it again and compares its product with that of
the embedding. An update that cannot be verified raises, and the engine then serves nothing.

Imported in processes of vLLM only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

_PROBE_ROWS = 4
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Largest difference between two products with the same weights, as a share of the largest entry."""


@dataclass
class FileInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Settings of the transfer, sent once."""

    tied_repair: bool = True


@dataclass
class FileUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One update. `files` are paths of safetensors files with the whole state dict, `serial` is the number of these
    weights."""

    files: list[str]
    serial: int


class FileTransferEngine(WeightTransferEngine[FileInit, FileUpdate]):  # type: ignore[misc]
    """Loads state dicts from files. `serial` is the number of the weights that the model has now; 0 before the first
    update."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.serial = 0
        self._next_serial = 0
        self._heads: TiedHeads | None = None

    def init_transfer_engine(self, init_info: FileInit) -> None:
        self._heads = TiedHeads(self.model) if init_info.tied_repair else None

    def start_weight_update(self) -> None:
        self.serial = 0  # an update that fails half-way leaves weights without a number
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdate) -> None:
        self.model.load_weights(_tensors(update_info.files))
        self._next_serial = update_info.serial

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self._heads is not None:
            self._heads.repair()
        self.serial = self._next_serial

    def shutdown(self) -> None:
        """Nothing is open between updates."""


class TiedHeads:
    """The output layers that share the weights of an embedding, found before the first update."""

    def __init__(self, model: torch.nn.Module) -> None:
        modules = list(model.modules())
        heads = [module for module in modules if isinstance(module, ParallelLMHead)]
        embeddings = [m for m in modules if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)]
        self._pairs = [
            (head, embedding)
            for head in heads
            for embedding in embeddings
            if head.weight.data_ptr() == embedding.weight.data_ptr()
        ]

    def repair(self) -> None:
        """Pack the output layers again. Raises RuntimeError if one still differs from its embedding."""
        for head, embedding in self._pairs:
            head.tie_weights(embedding)
            head.quant_method.process_weights_after_loading(head)
            _check(head, embedding.weight)


def _check(head: Any, weight: Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_PROBE_ROWS, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    with torch.inference_mode():
        got = head.quant_method.apply(head, rows).float()[:, : weight.shape[0]]
        expected = torch.nn.functional.linear(rows.float(), weight.float())
    share = float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-20))
    tolerance = _TOLERANCES.get(weight.dtype, 0.0)
    if not share <= tolerance:
        raise RuntimeError(
            f"the output layer differs from the embedding that it is tied to by {share:.2g} of its largest logit, at "
            f"most {tolerance:g} is "
            "allowed: this vLLM does not update tied embeddings; use weights with tie_word_embeddings: false"
        )


def _tensors(files: list[str]) -> Iterator[tuple[str, Tensor]]:
    for path in files:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)
