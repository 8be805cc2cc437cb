"""The image of a repository is created once, whatever becomes of the callers, and delays no other repository."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from rollmesh.services.sandbox import repository_images
from rollmesh.services.sandbox.config import RepositoryConfig
from rollmesh.services.sandbox.repository_images import RepositoryImages


async def test_a_cancelled_caller_leaves_the_image_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begun = threading.Event(), []

    def slow(repository: RepositoryConfig, path: Path, bytes_max: int) -> None:
        begun.append(repository.name)
        if repository.name == "slow":
            gate.wait(10)
        path.write_bytes(b"image")

    monkeypatch.setattr(repository_images, "_make", slow)
    images = RepositoryImages(tmp_path)
    one, other = (RepositoryConfig(name=name, path="/repo", commit="c" * 40) for name in ("slow", "fast"))
    first, second = (asyncio.create_task(images.image(one, 1 << 20)) for _ in range(2))
    async with asyncio.timeout(10):
        while not begun:  # noqa: ASYNC110 (a thread appends to it)
            await asyncio.sleep(0.001)
        first.cancel()
        await asyncio.wait([first])
        assert [piece async for piece in await images.image(other, 1 << 20)] == [b"image"]
        gate.set()
        assert [piece async for piece in await second] == [b"image"]
    assert begun == ["slow", "fast"]
