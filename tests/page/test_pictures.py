"""The pictures of docs/live_page.md, of a run that `rollmesh train` started: the link that it prints, and what the page
shows of it."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from .browser import BROWSER, browser_page, open_view, until

pytestmark = BROWSER

UPDATES = int(os.environ.get("ROLLMESH_PICTURE_UPDATES", "24"))
"""Number of updates of the run before the pictures."""
START_S = 900.0
LIMIT_MS = 1_500_000
COLORS = 96


@asynccontextmanager
async def training(folder: Path) -> AsyncIterator[str]:
    """Train with the command until the block ends. Yield the link that it prints."""
    config = Path(__file__).parent / "pictures.yaml"
    command = [sys.executable, "-m", "rollmesh.cli", "train", str(config), "--out", str(folder)]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    assert process.stdout is not None
    said = []
    try:
        async with asyncio.timeout(START_S):
            while "live page: " not in (line := (await process.stdout.readline()).decode()):
                said.append(line)
                assert line, f"it ended without a link:\n{''.join(said)}"
        reading = asyncio.create_task(process.stdout.read())
        yield line.partition("live page: ")[2].strip()
        reading.cancel()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(START_S):
            await process.wait()


async def picture(page: Any, folder: Path, name: str) -> None:
    """Store the visible part of the page as a PNG with few colors, so that it is small."""
    from PIL import Image

    taken = Image.open(io.BytesIO(await page.screenshot()))
    taken.convert("RGB").quantize(COLORS).save(folder / f"page_{name}.png", optimize=True)


@pytest.mark.timeout(3000)
async def test_the_pictures_of_the_docs(tmp_path: Path) -> None:
    folder = Path(os.environ.get("ROLLMESH_PICTURES", tmp_path))
    async with training(tmp_path / "run") as link, browser_page() as (page, errors):
        await page.goto(link)
        await page.wait_for_selector("#run-demo")
        await open_view(page, "#/run/demo", ".card")
        shown = "Number(document.querySelector('.card b').textContent.replaceAll(',', ''))"
        await until(page, f"{shown} >= {UPDATES}", LIMIT_MS / 1000)
        await page.wait_for_selector(".verdict.holds", timeout=LIMIT_MS)
        await page.wait_for_selector("#lag-svg")
        await picture(page, folder, "run")
        await open_view(page, "#/nodes", "#node-table")
        await page.set_viewport_size({"width": 1280, "height": 520})
        await picture(page, folder, "nodes")
        await page.set_viewport_size({"width": 1280, "height": 900})
        await page.emulate_media(color_scheme="dark")
        sample = await page.evaluate(  # of the newest ones with an advantage, the one with the most turns
            """async () => {
                const {samples} = await (await fetch("/api/runs/demo/samples")).json();
                let best = null;
                for (const one of samples.filter((s) => s.purpose === "train" && s.steps.length).slice(0, 12)) {
                    const shown = await (await fetch(`/api/runs/demo/samples/${one.sample_id}`)).json();
                    if (shown.runs?.length && shown.advantage !== null && (!best || shown.runs.length > best.runs.length)) best = shown;
                }
                return best.sample_id;
            }"""
        )
        await open_view(page, f"#/run/demo/sample/{sample}?color=version", "#transcript")
        await picture(page, folder, "sample")
        assert errors == []
