"""A headless Chromium that has logged in to the live page."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

import pytest

from rollmesh.mesh import Mesh

from .world import login_link

CHROMIUM = os.environ.get("ROLLMESH_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
BROWSER = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("playwright") is None, reason="playwright is not installed; run make suite NAME=page"),
    pytest.mark.skipif(not CHROMIUM, reason="no chromium is installed; run make suite NAME=page"),
]
"""Marks of the tests that need a browser."""
WAIT_MS = 90_000


@asynccontextmanager
async def browser_page(mesh: Mesh | None = None, **options: Any) -> AsyncIterator[tuple[Any, list[str]]]:
    """A page of a headless browser that has logged in, and the errors of its console."""
    from playwright import async_api as playwright

    errors: list[str] = []
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        context = await browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        page = await context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        if mesh is not None:
            await page.goto(login_link(mesh))
            await page.wait_for_selector("#run-page")
        yield page, errors
        await browser.close()


async def until(page: Any, expression: str, limit_s: float = WAIT_MS / 1000) -> None:
    """Wait until an expression is true. The driver's wait_for_function evaluates strings in the page, which its policy
    forbids."""
    async with asyncio.timeout(limit_s):
        while not await page.evaluate(expression):
            await page.wait_for_timeout(100)


async def open_view(page: Any, view: str, selector: str) -> None:
    """Open a view by its URL, and wait for an element of it."""
    await page.evaluate("hash => { location.hash = hash }", view)
    await page.wait_for_selector(selector)
