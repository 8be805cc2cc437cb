"""Check a state dict and lay it out for the built-in forward pass: `x @ w`, fused projections, constants folded into weights.

Collaborators: `model_spec` names the tensors, `torch_model.Weights` is the result, `weights_buffer` reads the files.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rollmesh.services.inference.engine import WeightsMismatch
from rollmesh.services.inference.engines.torch.model import LayerWeights, Weights
from rollmesh.services.inference.engines.torch.model_spec import ModelSpec

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
_EXPERT = re.compile(r"(model\.layers\.\d+\.)(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_EXPERT_PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


def lay_out(spec: ModelSpec, state: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> Weights:
    """Return the weights of a whole state dict. Raises WeightsMismatch naming the first tensor that does not fit."""
    state = with_stacked_experts(state) if spec.experts else dict(state)
    _check(spec, state)
    return fuse(spec, {name: tensor.to(device=device, dtype=dtype) for name, tensor in state.items()})


def _check(spec: ModelSpec, state: dict[str, Tensor]) -> None:
    expected = spec.tensor_shapes()
    if spec.tied and HEAD in state:
        _check_tied(state)
    for name, shape in expected.items():
        if name not in state:
            raise WeightsMismatch(f"tensor {name} is missing: send the whole state dict under its transformers names")
        _check_tensor(name, state[name], shape)
    for name in state:
        if name not in expected:
            raise WeightsMismatch(
                f"tensor {name} does not belong to this model: send weights of the configured model only"
            )


def _check_tied(state: dict[str, Tensor]) -> None:
    """Remove a tied head, which is redundant. Reject one that differs from the embedding, because it would be
    ignored."""
    head = state.pop(HEAD)
    if EMBED in state and not torch.equal(head, state[EMBED]):
        raise WeightsMismatch(
            f"tensor {HEAD} differs from {EMBED}, but config.json ties them: send them equal or untie the config"
        )


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise WeightsMismatch(
            f"tensor {name} has shape {list(tensor.shape)}, the model needs {list(shape)}: is this the configured "
            "model?"
        )

    if not tensor.is_floating_point():
        raise WeightsMismatch(f"tensor {name} has dtype {tensor.dtype}: send float32, bfloat16 or float16")


def fuse(spec: ModelSpec, state: Mapping[str, Tensor]) -> Weights:
    """Fuse query, key and value to one matrix, and gate and up to another, per layer. A tied head is a view of the embedding."""
    layers = [_Layer(spec, state, layer) for layer in range(spec.num_layers)]
    embed = state[EMBED].clone()
    sandwich, norm = spec.sandwich, "post_attention_layernorm"
    return Weights(
        embed=embed,
        head=(embed if spec.tied else state[HEAD].clone()).t(),
        norm=state["model.norm.weight"] + spec.norm_offset,
        attn_norm=[layer.norm("input_layernorm") for layer in layers],
        qkv=[layer.qkv("weight").t().contiguous() for layer in layers],
        qkv_bias=[layer.qkv("bias") for layer in layers] if spec.qkv_bias else [],
        qk_norm=[layer.qk_norm() for layer in layers] if spec.qk_norm else [],
        out=[layer.added(layer.transposed("self_attn.o_proj.weight")) for layer in layers],
        out_bias=[layer.added(layer["self_attn.o_proj.bias"].clone()) for layer in layers] if spec.out_bias else [],
        attn_post_norm=[layer.norm(norm) for layer in layers] if sandwich else [],
        mlp_norm=[layer.norm("pre_feedforward_layernorm" if sandwich else norm) for layer in layers],
        gate_up=[layer.gate_up() for layer in layers],
        down=[layer.down() for layer in layers],
        mlp_post_norm=[layer.norm("post_feedforward_layernorm") for layer in layers] if sandwich else [],
        router=[layer.of_experts("mlp.gate.weight") for layer in layers] if spec.experts else [],
        expert_gate_up=[layer.of_experts("mlp.experts.gate_up_proj") for layer in layers] if spec.experts else [],
        expert_down=[layer.added(layer.of_experts("mlp.experts.down_proj")) for layer in layers]
        if spec.experts
        else [],
        shared_gate=[layer.of_experts("mlp.shared_expert_gate.weight") for layer in layers] if spec.experts else [],
    )


class _Layer:
    """The tensors of one layer."""

    def __init__(self, spec: ModelSpec, state: Mapping[str, Tensor], layer: int) -> None:
        self._spec, self._state, self._prefix = spec, state, f"model.layers.{layer}."
        self._sparse = spec.is_sparse(layer)

    def __getitem__(self, name: str) -> Tensor:
        return self._state[self._prefix + name]

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._state

    def transposed(self, name: str) -> Tensor:
        return self[name].transpose(-1, -2).contiguous()

    def added(self, tensor: Tensor) -> Tensor:
        """Return the last matrix or bias before the residual sum, scaled."""
        return tensor if self._spec.residual_scale == 1.0 else tensor * self._spec.residual_scale

    def norm(self, name: str) -> Tensor:
        return self[f"{name}.weight"] + self._spec.norm_offset

    def qkv(self, kind: str) -> Tensor:
        """Return the rows of query, key and value heads, with the dimensions of a head ordered for `rotate`."""
        names = ("qkv_proj",) if self._spec.fused else ("q_proj", "k_proj", "v_proj")
        rows = torch.cat([self[f"self_attn.{name}.{kind}"] for name in names])
        heads = rows.view(-1, self._spec.head_dim, *rows.shape[1:])
        both = self._spec.num_heads + self._spec.num_kv_heads
        return torch.cat((heads[:both][:, _rotation_order(self._spec)], heads[both:])).flatten(0, 1)

    def qk_norm(self) -> Tensor:
        """Return one row per query and key head, so that both are normalized in one pass."""
        q = self.norm("self_attn.q_norm").expand(self._spec.num_heads, -1)
        k = self.norm("self_attn.k_norm").expand(self._spec.num_kv_heads, -1)
        return torch.cat((q, k))[:, _rotation_order(self._spec)].contiguous()

    def gate_up(self) -> Tensor:
        dense = self._dense()
        if self._spec.fused or not dense:
            return self.transposed(f"{dense}.gate_up_proj.weight") if dense else self._none()
        return torch.cat((self[f"{dense}.gate_proj.weight"], self[f"{dense}.up_proj.weight"])).t().contiguous()

    def down(self) -> Tensor:
        dense = self._dense()
        return self.added(self.transposed(f"{dense}.down_proj.weight")) if dense else self._none()

    def of_experts(self, name: str) -> Tensor:
        return self.transposed(name) if name in self else self._none()

    def _dense(self) -> str:
        """Return the name of the feed-forward that every token takes; empty if the layer has none."""
        if not self._sparse:
            return "mlp"
        return "mlp.shared_expert" if "mlp.shared_expert_gate.weight" in self else ""

    def _none(self) -> Tensor:
        return self._state[EMBED].new_empty(0)


def _rotation_order(spec: ModelSpec) -> list[int]:
    """Return the dimensions of a head such that rotated pairs are half a head apart; the others fill up both halves.

    Attention scores do not depend on the order of the dimensions of query and key."""
    half, rest = spec.rotary_dim // 2, (spec.head_dim - spec.rotary_dim) // 2
    dims = list(range(spec.head_dim))
    passed = dims[spec.rotary_dim :]
    return [*dims[:half], *passed[:rest], *dims[half : spec.rotary_dim], *passed[rest:]]


def with_stacked_experts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a state dict that names each expert, as files on the Hugging Face Hub do, to the names of the model's modules."""
    parts: dict[str, dict[str, dict[int, Tensor]]] = {}
    stacked: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if (match := _EXPERT.fullmatch(name)) and match[3] in _EXPERT_PARTS:
            layer = parts.setdefault(match[1], {"gate": {}, "up": {}, "down": {}})
            layer[_EXPERT_PARTS[match[3]]][int(match[2])] = tensor
        else:
            stacked[name.replace(".block_sparse_moe.gate.", ".mlp.gate.")] = tensor
    for prefix, layer in parts.items():
        gate, up, down = ([layer[part][index] for index in sorted(layer[part])] for part in ("gate", "up", "down"))
        try:
            pairs = [torch.cat(pair) for pair in zip(gate, up, strict=True)]
            stacked[f"{prefix}mlp.experts.gate_up_proj"] = torch.stack(pairs)
            stacked[f"{prefix}mlp.experts.down_proj"] = torch.stack(down)
        except (RuntimeError, ValueError) as error:
            raise WeightsMismatch(f"tensors {prefix}mlp.experts.* do not fit together: {error}") from error
    return stacked
