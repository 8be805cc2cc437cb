"""Check the files of a state dict against a model, without loading it: names, shapes, types and finite values, one
tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollmesh.services.inference.engine import WeightsMismatch
from rollmesh.services.inference.engines.common.weights_buffer import check_values
from rollmesh.trainer.model_config import has_tied_head


class ExpectedTensors:
    """The tensors of a model by name. Construct it with a transformers model on the device `meta`."""

    def __init__(self, model: Any) -> None:
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        tied = has_tied_head(model)
        names = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
        self._head = f"{names[id(head)]}.weight" if tied else ""
        self._embedding = f"{names[id(embedding)]}.weight" if tied else ""

    def check(self, files: Mapping[str, Path]) -> None:
        """Raise WeightsMismatch naming the first tensor or file that does not fit."""
        seen: set[str] = set()
        tied: dict[str, Tensor] = {}
        for file_name in sorted(files):
            try:
                with safe_open(str(files[file_name]), framework="pt", device="cpu") as file:
                    for name in file.keys():  # noqa: SIM118 - not a mapping
                        if name in seen:
                            raise WeightsMismatch(
                                f"tensor {name} is in two files, the second is {file_name}: send each tensor once"
                            )
                        seen.add(name)
                        tensor = file.get_tensor(name)
                        self._check_tensor(name, tensor)
                        if name in (self._head, self._embedding):
                            tied[name] = tensor
            except (OSError, SafetensorError) as error:
                raise WeightsMismatch(
                    f"file {file_name} at {files[file_name]} is not readable safetensors: {error}"
                ) from error
        self._check_complete(seen, tied)

    def _check_tensor(self, name: str, tensor: Tensor) -> None:
        expected = self._shapes.get(name)
        if expected is None:
            raise WeightsMismatch(
                f"tensor {name} does not belong to this model: send weights of the configured model only"
            )
        if tuple(tensor.shape) != expected:
            raise WeightsMismatch(
                f"tensor {name} has shape {list(tensor.shape)}, the model needs {list(expected)}: is this the "
                "configured model?"
            )
        check_values(name, tensor)

    def _check_complete(self, seen: set[str], tied: Mapping[str, Tensor]) -> None:
        if missing := sorted(set(self._shapes) - seen - {self._head}):
            raise WeightsMismatch(
                f"tensor {missing[0]} is missing: send the whole state dict under its transformers names"
            )
        if len(tied) == 2 and not torch.equal(*tied.values()):
            raise WeightsMismatch(
                f"tensor {self._head} differs from {self._embedding}, but config.json ties them: send them equal or "
                "untie the config"
            )
