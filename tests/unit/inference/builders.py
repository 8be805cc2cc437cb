"""Tiny checkpoints with random weights, and an engine core whose steps the test runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models

from rollmesh.services.inference.engine import GenerateDelta, GenerateRequest, KvPolicy
from rollmesh.services.inference.engines.common.stop import StopRules
from rollmesh.services.inference.engines.common.weights_buffer import read_state
from rollmesh.services.inference.engines.torch.built_in_runner import TorchRunner
from rollmesh.services.inference.engines.torch.config import TorchEngineConfig
from rollmesh.services.inference.engines.torch.core import TorchCore
from rollmesh.services.inference.engines.torch.model import Weights
from rollmesh.services.inference.engines.torch.model_spec import ModelSpec, model_spec, read_config
from rollmesh.services.inference.engines.torch.weight_layout import lay_out
from rollmesh.shared.domain.outputs import NUM_TOP
from rollmesh.shared.domain.trajectory import FloatArray, SamplingParams
from rollmesh.shared.domain.versions import PolicyVersion

VOCAB = 112


def version(step: int) -> PolicyVersion:
    return PolicyVersion(policy="main", step=step)


def read_spec(folder: Path) -> ModelSpec:
    return model_spec(read_config(folder))


def load_weights(spec: ModelSpec, files: dict[str, Path], dtype: torch.dtype = torch.float32) -> Weights:
    return lay_out(spec, read_state(files), dtype, torch.device("cpu"))


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, num_tokens)]


def read_chars(tokens: Sequence[int]) -> str:
    """Return a tokenizer in which token t is the character chr(32 + t)."""
    return "".join(chr(32 + token) for token in tokens)


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={chr(32 + i): i for i in range(VOCAB)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


def hf_model(family: str, seed: int = 0, **fields: Any) -> Any:
    """Return a tiny transformers causal LM of `family` (Qwen3, Qwen2, Llama), with changes in `fields`."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 96, "max_position_embeddings": 256, "initializer_range": 0.15,
        "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**sizes | fields)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def hf_logprobs(model: Any, token_ids: Sequence[int] | NDArray[np.int32]) -> FloatArray:
    """Return the plain softmax log-prob of each token given those before it; entry 0 is 0."""
    ids = torch.tensor(np.asarray(token_ids, np.int64))[None]
    with torch.no_grad():
        scores = torch.log_softmax(model(ids).logits[0].float(), dim=-1)
    picked = scores[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
    return np.concatenate((np.zeros(1, np.float32), picked))


@dataclass
class TinyModel:
    """A checkpoint folder and two sets of weights for it, as transformers models and as files."""

    folder: Path
    models: list[Any]

    def file(self, index: int) -> Path:
        return self.folder / str(index) / "model.safetensors"

    def weights(self, index: int) -> Weights:
        return load_weights(read_spec(self.folder), {"w": self.file(index)})

    def logprobs(self, index: int, token_ids: Sequence[int] | NDArray[np.int32]) -> FloatArray:
        return hf_logprobs(self.models[index], token_ids)


def tiny_model(folder: Path) -> TinyModel:
    built = [hf_model("Qwen3", seed, head_dim=16, tie_word_embeddings=True) for seed in range(2)]
    for index, model in enumerate(built):
        model.save_pretrained(folder / str(index))
    built[0].config.save_pretrained(folder)
    save_tokenizer(folder)
    return TinyModel(folder, built)


class Stepper:
    """A core under test, with its deltas per request."""

    def __init__(self, core: TorchCore) -> None:
        self.core = core
        self.deltas: dict[str, list[GenerateDelta]] = {}

    def submit(
        self,
        name: str,
        token_ids: list[int],
        *,
        session: str = "",
        priority: int = 0,
        pinned: int | None = None,
        outputs: tuple[str, ...] = (),
        num_top: int = NUM_TOP,
        **params: Any,
    ) -> None:
        params.setdefault("max_tokens", 8)
        self.deltas[name] = []
        self.core.submit(
            GenerateRequest(
                request_id=name,
                token_ids=np.array(token_ids, np.int32),
                params=SamplingParams(**params),
                session=session,
                priority=priority,
                version=None if pinned is None else version(pinned),
                outputs=outputs,
                num_top=num_top,
            )
        )

    def activate(
        self, step: int, weights: Weights, kv: KvPolicy = KvPolicy.RECOMPUTE, retain: Sequence[int] = ()
    ) -> None:
        self.core.activate(version(step), weights, kv, lambda: None, [version(old) for old in retain])

    def step(self) -> None:
        self.core.control()
        for delta in self.core.step():
            self.deltas[delta.request_id].append(delta)
        self.core.answer()

    def run(self) -> None:
        for _ in range(2000):
            if self.core.idle:
                return
            self.step()
        raise AssertionError("requests did not end within 2000 steps")

    def tokens(self, name: str) -> list[int]:
        return [int(token) for delta in self.deltas[name] for token in delta.token_ids]

    def logprobs(self, name: str) -> FloatArray:
        return np.concatenate([delta.logprobs for delta in self.deltas[name]])

    def logprobs_model(self, name: str) -> FloatArray:
        return np.concatenate([delta.logprobs_model for delta in self.deltas[name] if delta.logprobs_model is not None])


def build_stepper(tiny: TinyModel, **fields: Any) -> Stepper:
    """Return a core in which weights 0 of the model are active as version 0."""
    settings: dict[str, Any] = {"slots_max": 32, "context_max": 128} | fields
    config = TorchEngineConfig(model=str(tiny.folder), **settings)
    spec = read_spec(tiny.folder)
    runner = TorchRunner(
        spec,
        slots=config.slots_max,
        context_max=config.context_max,
        device=config.device,
        dtype=torch.float32,
    )
    stepper = Stepper(TorchCore(config, runner, StopRules(spec.vocab_size, read_chars)))
    stepper.activate(0, tiny.weights(0))
    stepper.step()
    return stepper


Build = Callable[..., Stepper]
