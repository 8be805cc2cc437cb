"""The live page over HTTP: who may read it, what it answers, and how it follows a mesh."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from rollmesh.mesh import Mesh
from rollmesh.mesh.joining import JoinOptions, open_joined
from rollmesh.services.gateway.page.login import new_ticket
from rollmesh.shared.clock import SystemClock

from ..page.world import HOSTILE, page_mesh, page_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMIT_S = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """A run of three updates that has finished, with its mesh."""
    async with page_mesh(tmp_path_factory.mktemp("page"), updates_max=3) as found:
        async with asyncio.timeout(LIMIT_S):
            await found.finished()
        await until(found, "api/runs/page", lambda state: state["ended"])  # the last evaluation follows the learner
        yield found


def browser(mesh: Mesh | None = None) -> aiohttp.ClientSession:
    """Return a client, with the token of `mesh` if it is given."""
    headers = {"authorization": f"Bearer {mesh.access.token}"} if mesh is not None else {}
    jar = aiohttp.CookieJar(unsafe=True)  # cookies of a numeric address
    return aiohttp.ClientSession(headers=headers, cookie_jar=jar, timeout=aiohttp.ClientTimeout(total=LIMIT_S))


async def get(mesh: Mesh, path: str) -> Any:
    async with browser(mesh) as client, client.get(page_of(mesh).url + path) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def until(mesh: Mesh, path: str, condition: Any) -> Any:
    """Read until the answer satisfies the condition."""
    async with asyncio.timeout(LIMIT_S):
        while not condition(found := await get(mesh, path)):  # noqa: ASYNC110 (another process answers)
            await asyncio.sleep(0.1)
        return found


async def test_data_needs_the_token_and_the_page_itself_does_not(mesh: Mesh) -> None:
    url = page_of(mesh).url
    async with browser() as client:
        for path in ("", "static/main.js", "static/page.css"):
            async with client.get(url + path) as response:
                assert response.status == 200
        for path in (
            "api/mesh",
            "api/runs/page",
            "api/runs/page/samples",
            "api/runs/page/audit",
            "api/events?run=page",
        ):
            async with client.get(url + path) as response:
                assert response.status == 401, path
                assert (await response.json())["error"]["reason"] == "UNAUTHENTICATED"
            async with client.get(url + path, headers={"authorization": "Bearer wrong"}) as response:
                assert response.status == 401, path


async def test_every_response_forbids_foreign_and_inline_code(mesh: Mesh) -> None:
    async with browser(mesh) as client:
        for path in ("", "static/main.js", "api/mesh", "unknown"):
            async with client.get(page_of(mesh).url + path) as response:
                policy = response.headers["content-security-policy"]
                assert "default-src 'self'" in policy
                assert "unsafe" not in policy
                assert response.headers["x-content-type-options"] == "nosniff"
        async with client.get(page_of(mesh).url) as response:
            text = await response.text()
    assert "<script>" not in text
    assert "style=" not in text
    assert "http://" not in text.replace("http://www.w3.org", "")


async def test_a_login_sets_a_cookie_that_scripts_cannot_read(mesh: Mesh) -> None:
    url = page_of(mesh).url
    async with browser() as client:
        async with client.post(f"{url}api/login", json={"token": "wrong"}) as response:
            assert response.status == 401
        async with client.post(f"{url}api/login", json={"token": mesh.access.token}) as response:
            assert response.status == 200
            cookie = response.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert mesh.access.token not in cookie
        async with client.get(f"{url}api/mesh") as response:
            assert response.status == 200
        async with client.post(f"{url}api/logout", json={}) as response:
            assert response.status == 200
        async with client.get(f"{url}api/mesh") as response:
            assert response.status == 401


async def test_a_link_logs_in_once(mesh: Mesh) -> None:
    url, ticket = page_of(mesh).url, new_ticket(mesh.access.token, clock=SystemClock())
    for status in (200, 401):
        async with browser() as client, client.post(f"{url}api/login", json={"ticket": ticket}) as response:
            assert response.status == status


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"data": b"{}", "headers": {"content-type": "text/plain"}}, 400),
        ({"json": {}, "headers": {"sec-fetch-site": "cross-site"}}, 400),
        ({"data": b"no json", "headers": {"content-type": "application/json"}}, 400),
        ({"data": b'{"token": "' + b"a" * 100_000, "headers": {"content-type": "application/json"}}, 413),
    ],
    ids=["form of another site", "another site", "malformed", "too long"],
)
async def test_bad_posts_are_rejected(mesh: Mesh, options: dict[str, Any], status: int) -> None:
    async with browser() as client, client.post(f"{page_of(mesh).url}api/login", **options) as response:
        assert response.status == status
        assert (await response.json())["error"]["message"]


@pytest.mark.parametrize("path", ["api/runs/absent", "api/runs/absent/history", "api/runs/page/samples/absent", "api/events?run=absent", "static/..%2fapp.py"])  # fmt: skip
async def test_what_does_not_exist_is_an_error_with_a_remedy(mesh: Mesh, path: str) -> None:
    async with browser(mesh) as client, client.get(page_of(mesh).url + path) as response:
        assert response.status == 404, await response.text()
        assert (await response.json())["error"]["message"]


async def test_the_history_agrees_with_the_coordinator(mesh: Mesh) -> None:
    state = await get(mesh, "api/runs/page")
    history = await until(mesh, "api/runs/page/history", lambda found: found["position"] >= state["ledger_position"])
    assert len(history["updates"]) == 3
    assert history["problem"] == ""
    lags: dict[str, int] = {}
    for point in history["updates"]:
        for lag, num in point["lags"].items():
            lags[lag] = lags.get(lag, 0) + num
    assert lags == state["policies"][0]["trained_by_staleness"]
    assert history["updates"][-1]["rewards"] == pytest.approx(state["mean_rewards"])
    assert sum(point["ends"]["used"] for point in history["updates"]) == state["samples"]["trained"]
    assert [one["step"] for one in history["evals"]] == [one["step"] for one in state["evals"]]
    assert all(one["time_unix_s"] for one in history["evals"])
    metrics = await get(mesh, "api/runs/page/metrics")
    assert metrics["updates"] == [1, 2, 3]
    assert metrics["missing"] == ""


async def test_samples_have_their_end_and_their_history(mesh: Mesh) -> None:
    samples = (await get(mesh, "api/runs/page/samples"))["samples"]
    assert {one["finish"] for one in samples if one["rewards"]} <= {"stop", "length"}
    (listed,) = (await get(mesh, "api/mesh"))["runs"]
    assert listed["run"] == "page"
    assert listed["progress"]["update"] >= 1
    assert list(listed["progress"]["rewards"]) == ["correct"]
    assert {one["purpose"] for one in samples} == {"train", "eval"}
    trained = next(one for one in samples if one["end"] == "used")
    shown = await get(mesh, f"api/runs/page/samples/{trained['sample_id']}")
    assert HOSTILE in shown["labels"]["kind"], "texts are data: JSON, which the page inserts as text"
    events = [line["what"] for line in shown["history"]]
    assert any("was leased to rollout-0" in event for event in events)
    assert any(f"used by update {trained['update']}" in event for event in events)
    assert shown["advantage"] is not None
    assert "estimator grpo" in shown["advantage_of"]
    assert shown["update"] == trained["update"]
    assert len(shown["siblings"]) == 4


async def test_the_audit_runs_on_request_and_holds(mesh: Mesh) -> None:
    url = page_of(mesh).url
    async with browser(mesh) as client, client.post(f"{url}api/runs/page/audit", json={}) as response:
        assert (await response.json())["state"] in ("waiting", "running", "done")
    verdict = await until(mesh, "api/runs/page/audit", lambda found: found["state"] in ("done", "failed"))
    assert verdict["state"] == "done", verdict["cause"]
    assert verdict["report"]["holds"], verdict["report"]["findings"]
    assert verdict["report"]["updates"] == 3
    assert verdict["report"]["heads"], "the heads of the gateway are compared"
    assert verdict["next_in_s"] > 0


async def events(response: aiohttp.ClientResponse, wanted: str) -> Any:
    """Return the data of the next event of a kind."""
    name = ""
    async for raw in response.content:
        line = raw.decode().rstrip("\n")
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: ") and name == wanted:
            return json.loads(line.removeprefix("data: "))
    raise AssertionError(f"the stream ended without {wanted}")


async def test_events_have_the_mesh_and_the_run_and_are_limited(mesh: Mesh) -> None:
    page = page_of(mesh)
    url = f"{page.url}api/events?run=page"
    async with browser(mesh) as client:
        async with client.get(url) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            nodes = (await events(response, "mesh"))["nodes"]
            assert {"inference-0", "rollout-0", "learner"} <= {node["node_id"] for node in nodes}
        async with client.get(url) as response:
            assert (await events(response, "run"))["state"]["ended"] == "UPDATES_MAX"
        opened = [await client.get(url) for _ in range(page._config.streams_max)]
        try:
            async with asyncio.timeout(LIMIT_S):
                while True:
                    async with client.get(url) as response:
                        if response.status == 429:
                            assert "streams_max" in (await response.json())["error"]["message"]
                            assert response.headers["retry-after"]
                            break
        finally:
            for one in opened:
                one.close()


async def test_a_restarted_gateway_has_its_address_and_knows_its_sessions(mesh: Mesh) -> None:
    url = page_of(mesh).url
    async with browser() as client:
        async with client.post(f"{url}api/login", json={"token": mesh.access.token}) as response:
            assert response.status == 200
        async with client.get(f"{url}api/events") as stream:
            await events(stream, "mesh")
            await mesh.restart("gateway")
            assert page_of(mesh).url == url
        async with client.get(f"{url}api/runs/page/history") as response:
            assert response.status == 200
            assert len((await response.json())["updates"]) == 3


async def test_a_gateway_of_another_host_shows_the_run_and_names_what_it_lacks(mesh: Mesh, tmp_path: Path) -> None:
    run_dir = mesh.layout.run_dir
    options = JoinOptions(
        kind="gateway", address=mesh.layout.gateway, token_file=run_dir / "token", folder=tmp_path / "node"
    )
    layout, name = await open_joined(options)
    async with Mesh(layout.config, run_dir=layout.run_dir, layout=layout, services=[name]) as joined:
        page = joined.service(name).page
        async with browser(mesh) as client:

            async def read(path: str) -> Any:
                async with client.get(f"{page.url}api/runs/page{path}") as response:
                    assert response.status == 200, await response.text()
                    return await response.json()

            assert (await read("/history"))["updates"] == (await get(mesh, "api/runs/page/history"))["updates"]
            assert "which this gateway cannot read" in (await read("/metrics"))["missing"]
            async with client.post(f"{page.url}api/runs/page/audit", json={}):
                pass
            async with asyncio.timeout(LIMIT_S):
                while (verdict := await read("/audit"))["state"] not in ("done", "failed"):  # noqa: ASYNC110 (as above)
                    await asyncio.sleep(0.1)
            assert verdict["report"]["holds"], verdict
            assert verdict["report"]["checkpoint"] is None


async def test_without_pages_nothing_is_read(tmp_path: Path) -> None:
    async with page_mesh(tmp_path, updates_max=1) as mesh:
        async with asyncio.timeout(LIMIT_S):
            await mesh.finished()
        page = page_of(mesh)
        assert page._server is None, "the HTTP server starts with the first connection"
        assert not page.feed.is_reading
