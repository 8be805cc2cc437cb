"""A real Prometheus that reads a mesh."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollmesh.shared.net.ports import lasting_ports

from .promtool import ROOT, tool

POLL_S = 0.5


@contextmanager
def prometheus(folder: Path, targets: Path) -> Iterator[str]:
    """Run Prometheus with the rules of deploy/, and yield its URL. It reads every process of `targets` once per
    second."""
    (port,) = lasting_ports(1)
    discovery = {"files": [f"{targets}/*.json"], "refresh_interval": "1s"}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ROOT / "deploy" / "alerts.yml")],
        "scrape_configs": [{"job_name": "rollmesh", "file_sd_configs": [discovery]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    command = [
        tool("prometheus"),
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/prometheus",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10.0)


def ask(url: str, path: str, **query: str) -> Any:
    """Return the `data` of a call of the HTTP API."""
    address = f"{url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(address, timeout=10.0) as answer:
        return json.load(answer)["data"]


async def until_any(url: str, expr: str, *, limit_s: float = 240.0) -> list[Any]:
    """Wait until `expr` has series, and return them."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        try:
            if found := (await asyncio.to_thread(ask, url, "query", query=expr))["result"]:
                return list(found)
        except OSError:
            pass  # it does not listen yet
        await asyncio.sleep(POLL_S)
    pytest.fail(f"not within {limit_s} s: {expr}")
