"""Random adapters made by peft, log-probs under its models, and versions that travel from a depot to a node. Needs
peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from rollmesh.services.inference.node import InferenceNode
from rollmesh.services.weights.node import DepotNode
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.weights.manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BuiltManifest, version_owner
from rollmesh.shared.weights.transfer import TransferConfig, upload


def adapted(model: Path, folder: Path, *, seed: int, std: float, **settings: Any) -> tuple[Any, dict[str, Path]]:
    """Return peft's model with a random adapter, whose B is not zero and which is not merged, and the two files of the
    adapter."""
    torch.manual_seed(seed)
    wrapped: Any = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), peft.LoraConfig(**settings))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=std)
    wrapped.save_pretrained(folder)
    return wrapped, {name: folder / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}


def model_logprobs(model: Any, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return the log-prob of each token under a model of transformers or peft; entry 0 is 0."""
    ids = torch.from_numpy(token_ids.astype(np.int64))[None]
    with torch.inference_mode():
        table = model(input_ids=ids).logits[0].float().log_softmax(-1)
    return np.concatenate([[0.0], table[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()]).astype(np.float32)


async def upload_and_prepare(
    depot: DepotNode, node: InferenceNode, version: PolicyVersion, built: BuiltManifest, access: Access
) -> int:
    """Upload a version and prepare it. Return the bytes that the node fetched."""
    async with open_channel(depot.address, access=access) as channel:
        await upload(channel, built, owner=version_owner(version), config=TransferConfig(same_host=False))
    return await node.keeper.prepare(version, [depot.address])
