"""Measure the CPU time per token of each output of the torch engine: `python -m tests.models.output_cost VOCAB HIDDEN
NUM_TOKENS`.

32 requests run together in the engine's core on a random model of 4 layers, on one thread. Each measurement is divided
by one without outputs that was taken just before, because other processes change the speed of a shared machine. Medians
of 5.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from rollmesh.services.inference.engine import GenerateRequest, KvPolicy
from rollmesh.services.inference.engines.common.stop import StopRules
from rollmesh.services.inference.engines.torch.built_in_runner import TorchRunner
from rollmesh.services.inference.engines.torch.config import TorchEngineConfig
from rollmesh.services.inference.engines.torch.core import TorchCore
from rollmesh.services.inference.engines.torch.model_spec import model_spec
from rollmesh.shared.domain.trajectory import SamplingParams
from rollmesh.shared.domain.versions import PolicyVersion

NUM_REQUESTS, NUM_REPETITIONS, CONTEXT = 32, 5, 320
OUTPUTS = ("entropy", "top_k", "kept_mass", "hidden", "mean_logprob")


def main(vocab_size: int, hidden_size: int, num_tokens: int) -> None:
    torch.set_num_threads(1)
    core = _core(vocab_size, hidden_size)
    choices = [(), *((output,) for output in OUTPUTS), OUTPUTS]
    for outputs in choices:
        _cpu_s(core, outputs, num_tokens)  # warms up
    for outputs in choices:
        ratios = []
        for _ in range(NUM_REPETITIONS):
            bare_s = _cpu_s(core, (), num_tokens)
            ratios.append(_cpu_s(core, outputs, num_tokens) / bare_s)
        print(f"{'+'.join(outputs) or 'none':50} {statistics.median(ratios):.2f}", flush=True)


def _core(vocab_size: int, hidden_size: int) -> TorchCore:
    config = Qwen3Config(
        vocab_size=vocab_size, hidden_size=hidden_size, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, intermediate_size=3 * hidden_size, max_position_embeddings=CONTEXT,
    )  # fmt: skip
    spec = model_spec(config)
    runner = TorchRunner(spec, slots=NUM_REQUESTS, context_max=CONTEXT, device="cpu", dtype=torch.float32)
    settings = TorchEngineConfig(model="-", slots_max=NUM_REQUESTS, context_max=CONTEXT)
    core = TorchCore(settings, runner, StopRules(vocab_size, None))
    make: Any = AutoModelForCausalLM.from_config
    state = make(config, dtype=torch.float32).state_dict()
    core.activate(PolicyVersion(policy="main", step=0), runner.lay_out(state), KvPolicy.RECOMPUTE, lambda: None)
    core.control()
    core.step()
    return core


def _cpu_s(core: TorchCore, outputs: tuple[str, ...], num_tokens: int) -> float:
    for index in range(NUM_REQUESTS):
        params = SamplingParams(max_tokens=num_tokens, seed=index)
        prompt = np.arange(1, 20, dtype=np.int32)
        core.submit(GenerateRequest(request_id=f"r{index}", token_ids=prompt, params=params, outputs=outputs))
    start_s = time.process_time()
    while not core.idle:
        core.step()
    return time.process_time() - start_s


if __name__ == "__main__":
    main(*(int(value) for value in sys.argv[1:4]))
