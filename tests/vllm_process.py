"""Real vLLM servers in processes, for tests.

Their interpreter is `ROLLMESH_VLLM_PYTHON`, or this one if it has vLLM, as in `make suite NAME=vllm`. Without both, the
tests are skipped.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

PYTHON = os.environ.get("ROLLMESH_VLLM_PYTHON") or (sys.executable if find_spec("vllm") else "")
needs_vllm_server = pytest.mark.skipif(
    not PYTHON, reason="there is no interpreter with vLLM: run make suite NAME=vllm, or set ROLLMESH_VLLM_PYTHON"
)
_START_S = 240.0
_STOP_S = 20.0


class VllmProcess:
    """Starts in the constructor; `stop` ends the server and its children."""

    def __init__(
        self, model: Path, *, context_max: int, dev_mode: bool = True, logprobs_mode: str = "processed_logprobs"
    ) -> None:
        """`model` has `config.json`, a tokenizer and, in the folder `0`, the first weights."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = (model / "vllm.log").open("ab")
        command = [
            PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model / "0"), "--host", "127.0.0.1", "--port", str(port),
            "--enable-scale-out", "--enforce-eager", "--dtype", "float32", "--max-model-len", str(context_max), "--max-logprobs", "256",
            "--logprobs-mode", logprobs_mode,
        ]  # fmt: skip
        env = os.environ | {
            "VLLM_SERVER_DEV_MODE": str(int(dev_mode)), "VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": "",
        }  # fmt: skip
        self._process = subprocess.Popen(
            command, env=env, stdout=self._log, stderr=self._log, start_new_session=True, stdin=subprocess.DEVNULL
        )
        self._wait()

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(_STOP_S)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self._log.close()

    def kill(self) -> None:
        """End the server as a crash does."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_STOP_S)

    def _wait(self) -> None:
        end_s = time.monotonic() + _START_S
        while time.monotonic() < end_s and self._process.poll() is None:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        log = Path(self._log.name).read_text(errors="replace")[-3000:]
        self.stop()
        raise AssertionError(f"vLLM did not start within {_START_S:g} s:\n{log}")


_servers: dict[Path, VllmProcess] = {}


def shared_server(model: Path, context_max: int) -> VllmProcess:
    """Return the server of a model, which is started once, because a start takes 20 to 30 seconds."""
    if model not in _servers:
        _servers[model] = VllmProcess(model, context_max=context_max)
    return _servers[model]


def stop_servers() -> Iterator[None]:
    """Stop the shared servers afterwards; a fixture of the tests that start them."""
    yield
    while _servers:
        _servers.popitem()[1].stop()
