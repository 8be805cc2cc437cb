"""The public `openai` packages of Python and npm, unmodified, in agents that are trained: four short runs (suite
clients)."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..vllm_process import PYTHON as VLLM_PYTHON
from ..vllm_process import needs_vllm_server
from .trained_run import MODULES, ClientArm, Sizes, check, train, warm_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
UPDATES = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warm_model(tmp_path_factory.mktemp("warm") / "model")


@pytest.mark.parametrize("kind", ["program", "url"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("package", ["python", "npm"])
def test_samples_are_the_tokens_of_the_engine_and_nothing_is_encoded_again(
    package: str, stream: bool, kind: str, model: Path, tmp_path: Path
) -> None:
    if package == "npm" and not (MODULES / "openai").is_dir():
        pytest.fail(f"the npm package openai is not installed in {MODULES}: run make suite NAME=clients")
    check(train(ClientArm(package, stream, kind), model, tmp_path, Sizes(updates=UPDATES)), UPDATES)


@needs_vllm_server
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_samples_are_the_tokens_of_vllm(stream: bool, model: Path, tmp_path: Path) -> None:
    """The engine is a real vLLM, which takes over new weights after each update."""
    arm, sizes = ClientArm("python", stream), Sizes(updates=UPDATES, batch_groups=2)
    run = train(arm, model, tmp_path, sizes, engine="RecordingVllm", python=VLLM_PYTHON, kv_bytes=1 << 27)
    check(run, UPDATES)
