"""Compare every output of the engine on a tiny architecture with the plain transformers forward."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollmesh.services.inference.engines.torch.config import TorchEngineConfig
from rollmesh.services.inference.engines.torch.execution import chooses_experts, open_runner
from rollmesh.services.inference.engines.torch.runner import RowRules, Span
from rollmesh.shared.domain.trajectory import Columns
from rollmesh.shared.weights.model_folder import positions_max
from rollmesh.trainer.model_config import use_whole_attention
from rollmesh.trainer.model_files import published_state, write_model_folder
from tests.models.architectures import CONTEXT, VOCAB_SIZE, build_model

NUM_TOP = 7
NUM_PROMPT, NUM_TOKENS = 6, 15
BASE = ("entropy", "top_k", "kept_mass", "mean_logprob", "hidden")


def check_outputs(name: str) -> None:
    """Generate at temperature 1, token by token after a prompt, and score. Both equal one plain forward of the
    sequence."""
    model: Any = build_model(name)
    with TemporaryDirectory(prefix="rollmesh-models-") as folder:
        write_model_folder(model, None, Path(folder))
        context = positions_max(model.config.to_dict()) or CONTEXT
        runner, _ = open_runner(TorchEngineConfig(model=folder, context_max=context, slots_max=2))
        outputs = (*BASE, "routed_experts") if chooses_experts(Path(folder)) else BASE
    use_whole_attention(model)
    weights = runner.lay_out(published_state(model))
    tokens = np.random.default_rng(1).integers(3, VOCAB_SIZE, NUM_TOKENS).astype(np.int32)
    expected = _plain(model, tokens, outputs)
    drawn = [
        runner.prefill(
            weights, [Span(slot=1, start=0, tokens=tokens[:NUM_PROMPT])], np.zeros(1, np.int64), _rules(outputs)
        )
    ]
    for position in range(NUM_PROMPT, NUM_TOKENS):
        fed = tokens[position : position + 1].astype(np.int64)
        drawn.append(runner.decode(weights, fed, np.array([position]), np.array([1]), _rules(outputs)))
    found = {array: np.concatenate([one.columns[array] for one in drawn]) for array in expected}
    _compare(found, {array: rows[NUM_PROMPT - 1 :] for array, rows in expected.items()})
    np.testing.assert_array_equal(np.concatenate([one.columns["kept_mass"] for one in drawn]), 1.0)
    (scored,) = runner.score(weights, [tokens], outputs, NUM_TOP)
    _compare({array: scored[array][1:] for array in expected}, {array: rows[:-1] for array, rows in expected.items()})


def _plain(model: Any, tokens: NDArray[np.int32], outputs: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """Return the arrays after each token."""
    ids = torch.tensor(tokens[None].astype(np.int64))
    states: list[torch.Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, arguments: states.append(arguments[0]))
    with torch.no_grad():
        out = model(ids, use_cache=False)
    hook.remove()
    every = torch.log_softmax(out.logits[0].double(), dim=-1)
    top = every.topk(NUM_TOP, dim=-1)
    found = {
        "entropy": -(every.exp() * every).sum(-1).numpy(),
        "top_k_ids": top.indices.numpy(),
        "top_k_logprobs": top.values.numpy(),
        "mean_logprob": every.mean(-1).numpy(),
        "hidden": states[0][0].numpy(),
    }
    if "routed_experts" in outputs:
        with torch.no_grad():
            router_logits = model(ids, use_cache=False, output_router_logits=True).router_logits
        chosen = model.config.get_text_config().num_experts_per_tok
        layers = [logits.reshape(NUM_TOKENS, -1).topk(chosen, dim=-1).indices for logits in router_logits]
        found["routed_experts"] = torch.cat(layers, dim=-1).numpy()
    return found


def _compare(found: Columns, expected: dict[str, NDArray[Any]]) -> None:
    for array, rows in expected.items():
        assert found[array].shape == rows.shape, array
        if array in ("top_k_ids", "routed_experts"):
            np.testing.assert_array_equal(found[array], rows, err_msg=array)
        else:
            np.testing.assert_allclose(
                found[array], rows, rtol=2e-3, atol=2e-3 if array == "hidden" else 2e-4, err_msg=array
            )


def _rules(outputs: tuple[str, ...]) -> RowRules:
    return RowRules(
        seeds=np.zeros(1, np.int64),
        positions=np.zeros(1, np.int64),
        temperature=np.ones(1, np.float32),
        top_p=np.ones(1, np.float32),
        top_k=np.zeros(1, np.int64),
        outputs=outputs,
        num_top=NUM_TOP,
    )
