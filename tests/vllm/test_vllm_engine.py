"""Failures of a real vLLM: wrong arguments, and a process that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rollmesh.services.inference.engine import EngineBroken, GenerateDelta, GenerateRequest, KvPolicy
from rollmesh.services.inference.engines.vllm.config import VllmEngineConfig
from rollmesh.services.inference.engines.vllm.engine import VllmEngine
from rollmesh.shared.domain.trajectory import FinishReason, SamplingParams
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import ConfigError

from ..conformance.vllm_kit import needs_vllm
from ..integration.process_tree import descendants
from .test_vllm_fleet import save_models

pytestmark = [needs_vllm, pytest.mark.slow]
VERSION = PolicyVersion(policy="main", step=0, weights_digest="d0")


def engine(model: Path, **options: object) -> VllmEngine:
    return VllmEngine(VllmEngineConfig(model=str(model), kv_bytes=1 << 27, slots_max=4, **options))  # type: ignore[arg-type]


async def test_an_argument_that_vllm_does_not_have_is_a_config_error(tmp_path: Path) -> None:
    save_models(tmp_path)
    broken = engine(tmp_path, arguments={"no_such_argument": 1})
    with pytest.raises(ConfigError, match=r"vLLM did not start: .*no_such_argument"):
        await broken.start()
    await broken.close()
    with pytest.raises(EngineBroken):
        await broken.score([np.array([1, 2], np.int32)])


async def test_a_model_that_vllm_starts_with_but_cannot_run_is_a_config_error(tmp_path: Path) -> None:
    """vLLM's attention on a CPU has no heads of 16 numbers, which shows at the first token."""
    save_models(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "head_dim": 16}))
    broken = engine(tmp_path)
    with pytest.raises(ConfigError, match=r"`model`: vLLM has started, but cannot generate a token with .*: Engine"):
        await broken.start()
    await broken.close()


async def test_the_end_of_a_process_of_vllm_ends_the_requests_and_the_engine(tmp_path: Path) -> None:
    save_models(tmp_path)
    before = set(descendants(os.getpid()))
    vllm = engine(tmp_path, folder=str(tmp_path / "kept"))
    await vllm.start()
    try:
        await vllm.prepare(VERSION, {"model.safetensors": tmp_path / "0/model.safetensors"})
        await vllm.activate(VERSION, KvPolicy.RECOMPUTE)
        deltas: list[GenerateDelta] = []
        ended = asyncio.Event()

        def emit(delta: GenerateDelta) -> None:
            deltas.append(delta)
            if delta.finish is not None:
                ended.set()

        request = GenerateRequest(
            request_id="r", token_ids=np.array([3, 1, 4], np.int32), params=SamplingParams(max_tokens=60)
        )
        started = [process for process in descendants(os.getpid()) if process not in before]
        worker = next(process.pid for process in started if "Worker" in process.command)
        os.kill(worker, signal.SIGSTOP)  # so that the request does not end before
        vllm.submit(request, emit)
        os.kill(worker, signal.SIGKILL)
        await asyncio.wait_for(ended.wait(), 60)
        assert deltas[-1].finish is FinishReason.ERROR
        assert "vLLM" in deltas[-1].error
        with pytest.raises(EngineBroken):
            await asyncio.wait_for(vllm.failed(), 60)
        with pytest.raises(EngineBroken):
            vllm.submit(request, emit)
    finally:
        await vllm.close()
    assert not [process for process in started if "VLLM" in process.command and process.alive]
    assert not (tmp_path / "kept").exists()


def test_a_killed_node_leaves_no_process_of_vllm(tmp_path: Path) -> None:
    save_models(tmp_path)
    with subprocess.Popen([sys.executable, "-c", STARTS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        assert node.stdout.readline() == "started\n"
        started = descendants(node.pid)
        assert [process for process in started if "EngineCore" in process.command]
        node.kill()
    limit_s = time.monotonic() + 60
    while [process for process in started if process.alive]:
        assert time.monotonic() < limit_s, started
        os.sched_yield()


STARTS = """
import asyncio, os, sys, time
from pathlib import Path
from rollmesh.services.inference.engines.vllm.config import VllmEngineConfig
from rollmesh.services.inference.engines.vllm.engine import VllmEngine

async def main():
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    await VllmEngine(VllmEngineConfig(model=sys.argv[1], kv_bytes=1 << 27, slots_max=4)).start()
    print("started", file=out, flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":  # vLLM starts its processes by spawn
    asyncio.run(main())
"""
"""A node that has only started its engine. A module of a command line is not imported again by its children."""
