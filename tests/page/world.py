"""A mesh with a live page: fake engine and trainer, and texts that would run as code if the page interpreted them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.mesh import Mesh, MeshConfig
from rollmesh.mesh.live_page import page_parts
from rollmesh.services.gateway.page.login import new_ticket
from rollmesh.services.gateway.page.server import LivePage
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.domain.trajectory import IntArray

from ..chaos.world import mesh_config, save_model_folder

HOSTILE = "<script>window.owned = 1</script><img src=x onerror='window.owned = 2'>"
"""A text of a task and of sampled tokens."""


class HostileDecoder:
    """Every tenth id is a token with markup; the others are words."""

    def decode(self, token_ids: IntArray) -> str:
        return "".join(HOSTILE if number % 10 == 0 else f"w{number} " for number in token_ids.tolist())


def page_config(folder: Path, **run: Any) -> MeshConfig:
    """Return a run of tasks with markup in their labels and prompts. It trains until it is stopped, unless
    `updates_max` is given."""
    model = save_model_folder(folder / "model")
    defaults: dict[str, Any] = {"name": "page", "batch_groups": 4, "group_size": 4, "eval_every": 2, "eval_tasks": 8}
    tree = msgspec.to_builtins(mesh_config(model, **(defaults | run)))
    lines = [
        {"kind": f"{HOSTILE}{n % 2}", "question": f"{HOSTILE} what is {n} + 1?", "answer": str(n + 1)}
        for n in range(64)
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {
        "path": str(folder / "tasks.jsonl"),
        "prompt": "question",
        "answer": "answer",
        "labels": {"kind": "kind"},
        "test_share": 0.25,
    }
    tree["data"]["source"] = {"name": "jsonl", "options": options}
    tree["rollout"]["agent"] = {"name": f"{Path(__file__).parent / 'agent.py'}:MarkupTurns"}
    tree["inference"]["engine"]["options"]["step_s"] = 0.02  # the browser needs the processor too
    tree["gateway"]["page"] = {"refresh_s": 0.3}
    return config_from_dict(MeshConfig, tree)


@asynccontextmanager
async def page_mesh(folder: Path, **run: Any) -> AsyncIterator[Mesh]:
    """Run a mesh whose page decodes sampled tokens to markup."""
    mesh = Mesh(page_config(folder, **run), run_dir=folder / "run")
    parts = page_parts(mesh.layout, HostileDecoder)
    mesh = Mesh(mesh.layout.config, run_dir=folder / "run", options={"gateway": {"page": parts}})
    async with mesh:
        yield mesh


def page_of(mesh: Mesh) -> LivePage:
    page = mesh.service("gateway").page
    assert isinstance(page, LivePage)
    return page


def login_link(mesh: Mesh) -> str:
    """Return a link that logs in, as `rollmesh page` prints it."""
    return f"{page_of(mesh).url}?login={new_ticket(mesh.access.token, clock=SystemClock())}"
