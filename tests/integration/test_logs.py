"""JSON logs of a mesh: each line with the ids it is about, and no secret in any of them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rollmesh.mesh import Mesh
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.telemetry import LoggingConfig, set_up_logging

from ..chaos.world import save_model_folder
from .test_mesh import Operator
from .test_tracing import config

BROKEN = """
import logging

class Agent:
    num = 0

    async def run(self, task, env):
        await env.generate()
        Agent.num += 1
        logging.getLogger("rollmesh.user").info("acting")
        if Agent.num == 1:
            raise ValueError("boom")
"""


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """Everything that is logged, from DEBUG on, libraries included."""
    root, own = logging.getLogger(), logging.getLogger("rollmesh")
    before = root.handlers[:], root.level, own.level
    stream = io.StringIO()
    set_up_logging(LoggingConfig(level="DEBUG", format="json"), stream)
    root.setLevel(logging.DEBUG)
    yield stream
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    own.setLevel(before[2])


async def test_lines_carry_their_ids_and_no_secret(tmp_path: Path, lines: io.StringIO) -> None:
    (tmp_path / "agent.py").write_text(BROKEN)
    made = config(save_model_folder(tmp_path / "model"), traces="file", log_format="json")
    made = msgspec.structs.replace(
        made, rollout=msgspec.structs.replace(made.rollout, agent=Extension("agent.py:Agent"))
    )
    async with Mesh(made, run_dir=tmp_path / "run", base_dir=tmp_path) as mesh:
        await Operator(mesh).finished()
        secret = mesh.layout.access.token
    text = lines.getvalue()
    assert secret
    assert secret not in text
    found = [json.loads(line) for line in text.splitlines()]
    (failed,) = [line for line in found if line["message"].startswith("infra failure: agent: ValueError: boom")]
    assert (failed["run"], failed["node"]) == ("chaos", "rollout-0")
    assert failed["lease"].startswith(f"chaos/{failed['episode']}#")
    assert len(failed["trace_id"]) == 32
    acting = [line for line in found if line["message"] == "acting"]
    assert {line["episode"].partition(".")[0] for line in acting} >= {"g0", "g1"}
    by_coordinator = [line for line in found if line["logger"].startswith("rollmesh.services.coordinator")]
    assert by_coordinator
    assert {line["run"] for line in by_coordinator if "run" in line} == {"chaos"}
    fleet = [line for line in by_coordinator if line["logger"].endswith("fleet_keeper")]
    assert fleet
    assert not [line for line in fleet if "run" in line], "the fleet serves every run of the mesh"
