"""The live page in a real browser: every view, the keyboard, dark colors, live updates, and a gateway that restarts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from .browser import BROWSER, WAIT_MS, browser_page, open_view, until
from .world import HOSTILE, login_link, page_mesh, page_of

pytestmark = BROWSER


async def sample_with_tokens(page: Any) -> str:
    """Return the id of a sample whose payload is stored."""
    found: str = await page.evaluate(
        """async () => {
            for (let n = 0; n < 200; n += 1) {
                const {samples} = await (await fetch("/api/runs/page/samples")).json();
                for (const one of samples.filter((s) => s.purpose === "train" && s.steps.length).slice(0, 5)) {
                    const shown = await (await fetch(`/api/runs/page/samples/${one.sample_id}`)).json();
                    if (shown.runs?.length && shown.advantage !== null && shown.update) return one.sample_id;
                }
                await new Promise((done) => setTimeout(done, 100));
            }
            throw new Error("no sample has tokens, an advantage and an update");
        }"""
    )
    return found


async def test_every_view_loads_without_errors_and_no_text_runs_as_code(tmp_path: Path) -> None:
    async with page_mesh(tmp_path) as mesh, browser_page(mesh) as (page, errors):
        await open_view(page, "#/run/page", "#success-svg")
        await page.wait_for_selector("#lag-svg")
        await page.wait_for_selector("#ends-svg")
        await page.wait_for_selector(".verdict")
        await open_view(page, "#/nodes", "#node-table")
        assert "inference-0" in await page.inner_text("#node-table")
        await open_view(page, "#/run/page/samples", "#sample-table")
        sample = await sample_with_tokens(page)
        for color in ("version", "source", "advantage", "log-prob"):
            await open_view(page, f"#/run/page/sample/{sample}?color={color}", "#transcript")
            assert await page.is_checked(f"#color-{color}"), "the color is part of the URL"
            assert await page.locator(".legend .key.token").count() > 0
        assert HOSTILE in await page.inner_text("#transcript"), "a sampled token is shown as text"
        assert f"kind {HOSTILE}" in await page.inner_text("#content"), "a label of the task is shown as text"
        await page.click("#messages-summary")
        assert f"{HOSTILE} what is" in await page.inner_text("#messages"), "the prompt is shown as text"
        await open_view(page, "#/run/page/audit", "#audit-now")
        await page.wait_for_selector("#claims")
        assert "BROKEN" not in await page.inner_text("#claims")
        assert await page.evaluate("window.owned") is None
        assert await page.locator("#content script, #content img").count() == 0
        assert errors == []


async def test_the_page_is_usable_with_the_keyboard(tmp_path: Path) -> None:
    async with page_mesh(tmp_path, updates_max=4) as mesh, browser_page(mesh) as (page, errors):
        async with asyncio.timeout(60):
            await mesh.finished()
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.id") == "skip"
        await page.focus("#run-page")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#lag-svg")
        assert await page.evaluate("document.activeElement.id") == "title", "the heading of the new view has the focus"
        await page.focus("#reward-svg")
        newest = await page.inner_text("#reward-readout")
        await page.keyboard.press("ArrowLeft")
        assert await page.inner_text("#reward-readout") != newest
        await page.focus("#reward-summary")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#reward-table table")
        await page.focus("#nav-samples")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#sample-table")
        await page.focus("#filter-purpose")
        await page.keyboard.type("eval")
        await until(page, "location.hash.includes('purpose=eval')")
        reached = await page.evaluate(
            """() => [...document.querySelectorAll("a[href], button, select, input, summary")]
                .filter((one) => one.offsetParent && one.tabIndex < 0).length"""
        )
        assert reached == 0, "every control is reachable with Tab"
        assert errors == []


async def test_dark_and_light_follow_the_system_and_the_button(tmp_path: Path) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    async with page_mesh(tmp_path, updates_max=1) as mesh, browser_page(mesh, color_scheme="dark") as (page, errors):
        dark = await page.evaluate(background)
        await page.click("#theme")
        light = await page.evaluate(background)
        assert await page.inner_text("#theme") == "Theme: light"
        assert dark != light
        await page.click("#theme")
        assert await page.evaluate(background) == dark
        await page.reload()
        await page.wait_for_selector("#run-page")
        assert await page.inner_text("#theme") == "Theme: dark", "the choice is kept"
        contrast = await page.evaluate(CONTRAST)
        assert min(contrast) >= 4.5
        assert errors == []


CONTRAST = """() => {
    const light = (text) => {
        const [r, g, b] = text.match(/[0-9.]+/g).map((v) => { const c = v / 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((m, n) => n - m); return (x + 0.05) / (y + 0.05); };
    const resolve = (name) => { const e = document.createElement("i"); document.body.append(e); e.style.color = `var(${name})`; const c = getComputedStyle(e).color; e.remove(); return c; };
    return ["--ink", "--muted", "--accent", "--good", "--bad", "--warn"].map((name) => Math.min(ratio(resolve(name), resolve("--panel")), ratio(resolve(name), resolve("--back"))));
}"""
"""Contrast of each color of text with the backgrounds."""


async def test_updates_arrive_and_a_restarted_gateway_is_found_again(tmp_path: Path) -> None:
    updates = "Number(document.querySelector('.card b').textContent.replaceAll(',', ''))"
    async with page_mesh(tmp_path) as mesh, browser_page(mesh) as (page, errors):
        await open_view(page, "#/run/page", ".card")
        seen = await page.evaluate(updates)
        await until(page, f"{updates} > {seen + 2}")
        url = page_of(mesh).url
        await mesh.stop("gateway")
        await page.wait_for_selector("#connection:not(.live)")
        seen = await page.evaluate(updates)
        await mesh.start("gateway")
        assert page_of(mesh).url == url, "the port stays"
        await page.wait_for_selector("#connection.live")
        await until(page, f"{updates} > {seen}")
        assert all("ERR_" in error or "Failed to load" in error for error in errors), errors


async def test_a_page_in_the_background_has_no_stream(tmp_path: Path) -> None:
    hide = """hidden => {
        Object.defineProperty(document, "hidden", {configurable: true, get: () => hidden});
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    updates = "Number(document.querySelector('.card b').textContent.replaceAll(',', ''))"
    async with page_mesh(tmp_path) as mesh, browser_page(mesh) as (page, errors):
        await open_view(page, "#/run/page", ".card")
        await page.wait_for_selector("#connection.live")
        await page.evaluate(hide, True)
        async with asyncio.timeout(WAIT_MS / 1000):
            while page_of(mesh).feed._num_pages:  # noqa: ASYNC110 (the browser ends it)
                await asyncio.sleep(0.05)
        seen = await page.evaluate(updates)
        await page.evaluate(hide, False)
        await page.wait_for_selector("#connection.live")
        await until(page, f"{updates} > {seen}")
        assert errors == []


async def test_without_a_session_the_page_has_only_a_login(tmp_path: Path) -> None:
    async with page_mesh(tmp_path, updates_max=1) as mesh, browser_page() as (page, _):
        await page.goto(f"{page_of(mesh).url}#/run/page")
        await page.wait_for_selector("#token")
        await page.fill("#token", "wrong")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("text=not the token")
        await page.fill("#token", mesh.access.token)
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".card")
        assert await page.evaluate("document.cookie") == "", "scripts cannot read the session"
        assert mesh.access.token not in await page.content()
        await page.click("#logout")
        await page.wait_for_selector("#token")
        await page.goto(login_link(mesh))
        await page.wait_for_selector("#run-page")
        assert "login" not in page.url
