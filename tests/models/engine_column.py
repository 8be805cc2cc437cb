"""Run each tiny architecture in the engine, and compare its log-probs with the plain forward."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from rollmesh.services.inference.engines.torch.config import TorchEngineConfig
from rollmesh.services.inference.engines.torch.execution import open_runner
from rollmesh.services.inference.engines.torch.self_check import SLOTS, SelfCheck
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.weights.model_folder import positions_max
from rollmesh.trainer.model_config import use_whole_attention
from rollmesh.trainer.model_files import published_state, write_model_folder
from tests.models.architectures import CONTEXT, build_model


@dataclass(frozen=True, slots=True)
class EngineResult:
    """The result for one model. `forward` is empty if it is rejected. `reason` is why a faster forward is not used. The
    error is absolute, in nats."""

    forward: str
    reason: str
    logprob_error: float = 0.0


def engine_result(name: str) -> EngineResult:
    """Run sequences longer than every window, scored and generated, through the engine's runner and the plain forward.

    The weights travel as the learner publishes them.
    """
    model = build_model(name)
    with TemporaryDirectory(prefix="rollmesh-models-") as folder:
        write_model_folder(model, None, Path(folder))
        context = positions_max(model.config.to_dict()) or CONTEXT
        config = TorchEngineConfig(model=folder, context_max=context, slots_max=SLOTS)
        try:
            runner, execution = open_runner(config)
        except ConfigError as error:
            return EngineResult("", str(error))
    use_whole_attention(model)
    check = SelfCheck(model, torch.device("cpu"))
    return EngineResult(*execution, check.difference(runner, runner.lay_out(published_state(model))))
