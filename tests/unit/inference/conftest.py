"""A tiny Qwen3 checkpoint with random weights, and an engine core over it that is stepped by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollmesh.services.inference.engine import GenerateDelta, GenerateRequest
from rollmesh.services.inference.engines.model_spec import read_model_spec
from rollmesh.services.inference.engines.stop import StopRules
from rollmesh.services.inference.engines.torch_config import TorchEngineConfig
from rollmesh.services.inference.engines.torch_core import TorchCore
from rollmesh.services.inference.engines.torch_engine import _load_decode
from rollmesh.services.inference.engines.torch_model import Weights
from rollmesh.services.inference.engines.torch_runner import TorchRunner
from rollmesh.services.inference.engines.weights_buffer import load_weights
from rollmesh.shared.trajectory import SamplingParams
from rollmesh.shared.versions import PolicyVersion

VOCAB = 112


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    torch.set_num_threads(1)


def save_tokenizer(folder: Path) -> None:
    """Token 16 + i is the character chr(32 + i); the ids below are specials."""
    vocab = {f"<|{i}|>": i for i in range(16)} | {chr(32 + i): 16 + i for i in range(96)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


@dataclass
class TinyModel:
    """A checkpoint folder and two sets of weights for it, as transformers models and as engine weights."""

    folder: Path
    models: list[Qwen3ForCausalLM]

    def weights(self, index: int) -> Weights:
        spec = read_model_spec(self.folder)
        return load_weights(spec, {"w": self.file(index)}, torch.float32, torch.device("cpu"))

    def file(self, index: int) -> Path:
        return self.folder / str(index) / "model.safetensors"

    def logprobs(self, index: int, token_ids: np.ndarray) -> np.ndarray:
        """Plain softmax log-prob of each token given those before it, by transformers; entry 0 is 0."""
        ids = torch.from_numpy(np.asarray(token_ids, np.int64))[None]
        with torch.no_grad():
            scores = torch.log_softmax(self.models[index](ids).logits[0].float(), dim=-1)
        picked = scores[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
        return np.concatenate((np.zeros(1, np.float32), picked))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder = tmp_path_factory.mktemp("tiny")
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=96, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.15,
        pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    built = []
    for index in range(2):
        torch.manual_seed(index)
        model = Qwen3ForCausalLM(config).eval()
        model.save_pretrained(folder / str(index))
        built.append(model)
    config.save_pretrained(folder)
    save_tokenizer(folder)
    return TinyModel(folder, built)


def version(step: int) -> PolicyVersion:
    return PolicyVersion(policy="main", step=step)


class Stepper:
    """A core under test: deltas are kept per request, steps are counted."""

    def __init__(self, core: TorchCore) -> None:
        self.core = core
        self.deltas: dict[str, list[GenerateDelta]] = {}

    def submit(self, name: str, token_ids: list[int], *, session: str = "", **params: object) -> None:
        params.setdefault("max_tokens", 8)
        request = GenerateRequest(
            request_id=name,
            token_ids=np.array(token_ids, np.int32),
            params=SamplingParams(**params),  # type: ignore[arg-type]
            session=session,
        )
        self.deltas[name] = []
        self.core.submit(request)

    def step(self) -> list[GenerateDelta]:
        deltas = self.core.step()
        self.core.answer()
        for delta in deltas:
            self.deltas[delta.request_id].append(delta)
        return deltas

    def run(self) -> None:
        for _ in range(2000):
            if self.core.idle:
                return
            self.step()
        raise AssertionError("requests did not end within 2000 steps")

    def tokens(self, name: str) -> list[int]:
        return [int(token) for delta in self.deltas[name] for token in delta.token_ids]

    def logprobs(self, name: str) -> np.ndarray:
        return np.concatenate([delta.logprobs for delta in self.deltas[name]])

    def logprobs_model(self, name: str) -> np.ndarray:
        return np.concatenate([delta.logprobs_model for delta in self.deltas[name] if delta.logprobs_model is not None])


@pytest.fixture
def stepper(tiny: TinyModel) -> Callable[..., Stepper]:
    def build(*, active: bool = True, **fields: int) -> Stepper:
        from rollmesh.services.inference.engine import KvPolicy

        settings: dict[str, int] = {"slots_max": 32, "context_max": 128} | fields
        config = TorchEngineConfig(model=str(tiny.folder), torchscript=False, **settings)  # type: ignore[arg-type]
        spec = read_model_spec(tiny.folder)
        runner = TorchRunner(
            spec,
            slots=config.slots_max,
            context_max=config.context_max,
            device="cpu",
            dtype=torch.float32,
            torchscript=False,
        )
        core = TorchCore(config, runner, StopRules(spec.vocab_size, _load_decode(tiny.folder)))
        built = Stepper(core)
        if active:
            core.activate(version(0), tiny.weights(0), KvPolicy.RECOMPUTE, lambda: None)
            built.step()
        return built

    return build
