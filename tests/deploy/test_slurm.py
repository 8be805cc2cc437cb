"""The Slurm scripts, executed with an `srun` and an `scontrol` that run everything on this host."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from rollmesh.shared.config.loader import to_yaml

from ..chaos.world import ROOT, mesh_config, save_model_folder
from ..integration.up_mesh import COMMAND
from .manifests import DEPLOY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RUN_S = 600.0
TOOLS = {
    "srun": 'while [[ $1 == --* ]]; do shift; done\nSLURMD_NODENAME=127.0.0.1 exec "$@"\n',
    "scontrol": "echo 127.0.0.1\n",
}


async def test_a_job_trains_to_the_end_of_the_run_and_stops_what_it_started(tmp_path: Path) -> None:
    for name, text in TOOLS.items():
        tool = tmp_path / "bin" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"#!/bin/bash\n{text}")
        tool.chmod(0o755)
    config = mesh_config(save_model_folder(tmp_path / "model"), updates_max=2, batch_groups=2, group_size=2)
    (tmp_path / "mesh.yaml").write_text(to_yaml(config))
    run = tmp_path / "run"
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT), "CONFIG": str(tmp_path / "mesh.yaml"), "RUN": str(run), "START_S": "300",
        "SLURM_JOB_ID": "7", **{f"SLURM_JOB_NODELIST_HET_GROUP_{n}": "here" for n in range(4)},
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        "bash", str(DEPLOY / "slurm" / "mesh.sbatch"), env=environment, cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        async with asyncio.timeout(RUN_S):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, 9)
    assert process.returncode == 0, said.decode()
    audit = await asyncio.create_subprocess_exec(*COMMAND, "audit", str(run), stdout=asyncio.subprocess.PIPE)
    report, _ = await audit.communicate()
    assert audit.returncode == 0, report.decode()
