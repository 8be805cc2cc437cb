"""The agents `program` and `url`: real programs, which call the model over HTTP, and how they end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollmesh.services.rollout.agent import load_agent
from rollmesh.services.rollout.config import LimitsConfig, RolloutConfig
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.endpoints.client import Endpoints
from rollmesh.shared.endpoints.config import EndpointConfig
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.process.process_launch import kept_tree
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.v1 import coordinator_pb2

from ..shared.chat_server import chat_server

COMPLETED = coordinator_pb2.EPISODE_OUTCOME_COMPLETED
INFRA_FAILURE = coordinator_pb2.EPISODE_OUTCOME_INFRA_FAILURE
ASK = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
def ask(content, key=os.environ["OPENAI_API_KEY"], **fields):
    body = {"model": os.environ["ROLLMESH_MODEL"], "messages": [{"role": "user", "content": content}], **fields}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + key, "Content-Type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


@pytest.fixture
async def mesh() -> AsyncIterator[LocalMesh]:
    limits = LimitsConfig(turns_max=4, run_s_max=60)
    made = LocalMesh(script=lambda text: "<answer>4</answer><|end|>", config=RolloutConfig(limits=limits))
    yield made
    assert (made.server.num_episodes, made.num_open) == (0, 0)
    await made.server.close()


async def run(mesh: LocalMesh, folder: Path, code: str, **options: Any) -> coordinator_pb2.EpisodeReport:
    """Run an episode whose program is Python code."""
    (folder / "agent.py").write_text(code)
    chosen = {"command": [sys.executable, "-S", "agent.py"], "stop_s": 0.5, **options}
    return await mesh.runner(load_agent(Extension("program", chosen), folder)).run(lease())


async def test_a_program_gets_the_task_and_the_model(mesh: LocalMesh, tmp_path: Path) -> None:
    seen = tmp_path / "seen.json"
    code = f"""{ASK}
said = ask(task["messages"][0]["content"])
same = json.load(open(os.environ["ROLLMESH_TASK"])) == task
json.dump([task, said, same, os.getcwd(), dict(os.environ)], open({str(seen)!r}, "w"))
"""
    report = await run(mesh, tmp_path, code, env={"MINE": "1"})
    assert report.outcome == COMPLETED, report.failure
    task, said, same, cwd, env = json.loads(seen.read_text())
    assert (task["task_id"], task["episode"], task["purpose"], task["index"]) == ("t", "e-l1", "train", 0)
    assert (said, same, env["MINE"], env["ROLLMESH_EPISODE"]) == ("<answer>4</answer>", True, "1", "e-l1")
    assert env["OPENAI_API_KEY"].startswith("rm-")
    assert "PYTEST_CURRENT_TEST" not in env
    assert not os.path.exists(cwd)  # noqa: ASYNC240
    (episode,) = mesh.samples.episodes
    assert episode.samples[0].rewards[0].value == 1.0


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "import sys; sys.exit('lost my keys') if ask('a') else 0",
            "exited with 1, expected 0; stdout: empty; stderr: lost my keys",
        ),
        ("ask('a'); print('out'); sys.exit(3)", "exited with 3, expected 0; stdout: out"),
        ("ask('a'); os.kill(os.getpid(), 9)", "was killed by signal 9"),
        ("os.write(2, b'\\xff\\x00' * 200000); os.write(1, b'x' * 200000); os._exit(1)", "exited with 1"),
        ("pass", "exited without a turn of the model"),
    ],
)
async def test_a_program_that_fails_is_an_infra_failure_with_its_cause(
    mesh: LocalMesh, tmp_path: Path, code: str, message: str
) -> None:
    report = await run(mesh, tmp_path, f"{ASK}\n{code}")
    assert report.outcome == INFRA_FAILURE
    assert message in report.failure.message
    assert report.failure.reason == "PROGRAM_FAILED"
    assert len(report.failure.message) < 12000


async def test_a_program_that_never_exits_ends_at_the_time_limit_with_its_children(tmp_path: Path) -> None:
    mesh = LocalMesh(
        script=lambda text: "<answer>4</answer><|end|>", config=RolloutConfig(limits=LimitsConfig(run_s_max=12.0))
    )
    pids = tmp_path / "pids"
    code = f"""{ASK}
import signal, subprocess, time
ask("a")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
time.sleep(1000)
"""
    report = await run(mesh, tmp_path, code)
    await mesh.server.close()
    assert report.outcome == COMPLETED, report.failure
    assert mesh.samples.episodes[0].samples[0].finish.name == "LENGTH"
    await until(lambda: not any(map(is_running, map(int, pids.read_text().split()))))


async def test_a_program_that_neither_calls_the_model_nor_exits_is_an_infra_failure(tmp_path: Path) -> None:
    mesh = LocalMesh(
        script=lambda text: "<answer>4</answer><|end|>", config=RolloutConfig(limits=LimitsConfig(run_s_max=1.0))
    )
    report = await run(mesh, tmp_path, "import time; time.sleep(1000)")
    await mesh.server.close()
    assert report.outcome == INFRA_FAILURE
    assert "no token was sampled before the limit `seconds` (1 s)" in report.failure.message
    assert "that the agent calls the model" in report.failure.message
    assert not mesh.samples.episodes


# Bad input ------------------------------------------------------------------------------------------------------------

IGNORE_JUDGE = """
try: ask("who?", model="judge")
except Exception as error: print(error.read() if hasattr(error, "read") else error)
ask("a")
"""
EXIT_WITH_THE_ERROR = """
try: {call}
except urllib.error.HTTPError as error: sys.exit(f"{{error.code}}: {{error.read().decode()}}")
"""


@pytest.mark.parametrize("unreachable", [True, False])
async def test_an_endpoint_that_does_not_answer_fails_the_episode_though_the_program_ignores_it(
    tmp_path: Path, unreachable: bool
) -> None:
    async with chat_server() as server:
        server.gate = asyncio.Event()
        report = await asking(tmp_path, "http://127.0.0.1:1/v1" if unreachable else server.url, timeout_s=0.2)
    assert (report.outcome, report.failure.reason) == (INFRA_FAILURE, "ENDPOINT_FAILED")
    assert report.failure.message.startswith("ask: endpoint `judge`: POST ")
    assert ("connect" if unreachable else "no response within 0.2 s") in report.failure.message


async def test_a_reply_of_an_endpoint_that_is_not_of_the_protocol_fails_the_episode(tmp_path: Path) -> None:
    async with chat_server(lambda body: web.Response(text="<html>")) as server:
        report = await asking(tmp_path, server.url)
    assert (report.outcome, report.failure.reason) == (INFRA_FAILURE, "ENDPOINT_FAILED")
    assert "endpoint `judge`: " in report.failure.message
    assert "the response is not as expected" in report.failure.message


async def test_an_exhausted_price_limit_fails_the_episode_with_the_remedy(tmp_path: Path) -> None:
    async with chat_server() as server:
        code = IGNORE_JUDGE.replace('ask("who?"', 'ask("first", model="judge"); ask("who?"')
        report = await asking(tmp_path, server.url, code, price_completion=1e6, price_max=1.5)
    assert (report.outcome, report.failure.reason) == (INFRA_FAILURE, "PRICE_LIMIT")
    assert "`price_max` = 1.5; raise it and resume the run" in report.failure.message


async def asking(folder: Path, url: str, code: str = IGNORE_JUDGE, **options: Any) -> coordinator_pb2.EpisodeReport:
    """Run a program that asks the endpoint `judge` and ignores its error."""
    entry = {"kind": "openai", "base_url": url, "model": "m", "retry_s": 0.0, **options}
    endpoints = Endpoints({"judge": config_from_dict(EndpointConfig, entry)}, base_dir=folder)
    mesh = LocalMesh(script=lambda text: "<answer>4</answer><|end|>", endpoints=endpoints)
    report = await run(mesh, folder, f"{ASK}\n{code}")
    await mesh.server.close()
    await endpoints.close()
    assert not mesh.samples.episodes
    return report


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ('ask("a", logit_bias={"5": 1})', '"param":"logit_bias"'),
        ('ask("a", key="rm-foreign")', "401: "),
        ('ask("a", model="gpt-5")', "must be policy, got 'gpt-5'"),
    ],
)
async def test_a_rejected_request_is_in_the_cause_of_the_program_that_fails_with_it(
    mesh: LocalMesh, tmp_path: Path, call: str, message: str
) -> None:
    report = await run(mesh, tmp_path, ASK + EXIT_WITH_THE_ERROR.format(call=call))
    assert report.outcome == INFRA_FAILURE
    assert message in report.failure.message
    assert not mesh.samples.episodes


async def test_garbage_from_a_program_does_not_matter_if_it_works_on_the_task(mesh: LocalMesh, tmp_path: Path) -> None:
    code = """
import socket
from urllib.parse import urlsplit
for stream in (1, 2): os.write(stream, os.urandom(300000))
place = urlsplit(os.environ["OPENAI_BASE_URL"])
with socket.create_connection((place.hostname, place.port)) as connection:
    connection.sendall(b"\\x16\\x03\\x01 garbage\\r\\n\\r\\n")
    assert b"400" in connection.recv(100)
ask("a")
"""
    report = await run(mesh, tmp_path, f"{ASK}\n{code}")
    assert report.outcome == COMPLETED, report.failure
    assert len(mesh.samples.episodes[0].samples) == 1


async def test_a_limit_of_the_episode_ends_a_program_that_ignores_it(mesh: LocalMesh, tmp_path: Path) -> None:
    code = f"""{ASK}
number = 0
while True:
    number += 1
    try: ask(str(number))
    except Exception: pass
"""
    report = await run(mesh, tmp_path, code)
    assert report.outcome == COMPLETED, report.failure
    assert len(mesh.samples.episodes[0].samples) == 4


DAEMON = """
def daemon(pids):
    if not os.fork():
        os.setsid()
        if os.fork(): os._exit(0)
        open(pids, "a").write(f"{os.getpid()} ")
        time.sleep(1000)
    os.wait()
    while not os.path.exists(pids) or not open(pids).read(): time.sleep(0.01)
    open(pids, "a").write(f"{os.getpid()}")
"""


async def test_all_processes_end_after_the_keeper_of_a_program_was_killed(mesh: LocalMesh, tmp_path: Path) -> None:
    """The daemon holds the pipes of the program, and is not in its group."""
    pids, cwd = tmp_path / "pids", tmp_path / "cwd"
    code = f"""{ASK}{DAEMON}
import signal, time
ask("a")
open({str(cwd)!r}, "w").write(os.getcwd())
daemon({str(pids)!r})
os.kill(os.getppid(), signal.SIGKILL)
time.sleep(1000)
"""
    async with asyncio.timeout(30):
        report = await run(mesh, tmp_path, code)
    assert report.outcome == INFRA_FAILURE
    assert "was killed by signal 9" in report.failure.message
    await until(lambda: not any(map(is_running, map(int, pids.read_text().split()))))
    assert not os.path.exists(cwd.read_text())  # noqa: ASYNC240


async def test_a_program_whose_keeper_is_stopped_ends_at_the_time_limit(tmp_path: Path) -> None:
    mesh = LocalMesh(
        script=lambda text: "<answer>4</answer><|end|>", config=RolloutConfig(limits=LimitsConfig(run_s_max=12.0))
    )
    pids = tmp_path / "pids"
    code = f"""{ASK}{DAEMON}
import signal, time
ask("a")
daemon({str(pids)!r})
os.kill(os.getppid(), signal.SIGSTOP)
os.kill(os.getpid(), signal.SIGSTOP)
"""
    async with asyncio.timeout(60):
        report = await run(mesh, tmp_path, code)
    await mesh.server.close()
    assert report.outcome == COMPLETED, report.failure
    assert not any(map(is_running, map(int, pids.read_text().split())))


async def test_a_program_that_floods_its_output_ends_at_once_at_the_time_limit(tmp_path: Path) -> None:
    mesh = LocalMesh(
        script=lambda text: "<answer>4</answer><|end|>", config=RolloutConfig(limits=LimitsConfig(run_s_max=6.0))
    )
    code = f"{ASK}\nask('a')\nwhile True: os.write(1, b'x' * 65536)"
    begun_s = time.monotonic()
    report = await run(mesh, tmp_path, code, stop_s=20.0)
    await mesh.server.close()
    assert report.outcome == COMPLETED, report.failure
    assert time.monotonic() - begun_s < 20, "not at the end of `stop_s` after the limit"


async def test_a_cancelled_episode_ends_its_program(mesh: LocalMesh, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = f"open({str(pids)!r}, 'w').write(str(__import__('os').getpid())); __import__('time').sleep(1000)"
    running = asyncio.ensure_future(run(mesh, tmp_path, code))
    await until(lambda: pids.is_file() and pids.read_text())
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: not is_running(int(pids.read_text())))


async def test_the_folder_of_a_program_is_deleted_if_the_worker_was_killed_before_it_began(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    command = kept_tree(["touch", str(tmp_path / "began")], folder=str(folder), stop_s=1.0)
    command[command.index(str(os.getpid()))] = "1"  # another parent than this process
    keeper = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, said = await keeper.communicate()
    assert (keeper.returncode, said) == (1, b"the parent is gone\n")
    assert not folder.exists()
    assert not (tmp_path / "began").exists()


async def test_the_processes_of_a_killed_worker_end(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    folder = tmp_path / "work"
    folder.mkdir()
    code = f"""
import os, subprocess, sys, time
from rollmesh.shared.process.process_launch import kept_tree
script = "setsid sleep 1000 & echo $! > {pids}; echo $$ >> {pids}; sleep 1000"
subprocess.Popen(kept_tree(["sh", "-c", script], folder={str(folder)!r}, stop_s=5.0))
time.sleep(1000)
"""
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    await until(lambda: pids.is_file() and len(pids.read_text().split()) == 2)
    worker.send_signal(signal.SIGKILL)
    await worker.wait()
    await until(lambda: not any(map(is_running, map(int, pids.read_text().split()))))
    await until(lambda: not folder.exists())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": []}, "command"),
        ({"command": ["no-such-program"]}, "must be an executable file or a program on PATH, got 'no-such-program'"),
        ({"comand": ["true"]}, "comand"),
    ],
)
def test_wrong_options_name_the_key(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_agent(Extension("program", options))
    with pytest.raises(ConfigError, match="url"):
        load_agent(Extension("url", {"url": "localhost"}))


# A running service ----------------------------------------------------------------------------------------------------


@pytest.fixture
async def service() -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """A service that works on tasks: at /ok it asks the model, at /bad it fails, at /moved it redirects, at /idle it
    does nothing."""
    import aiohttp

    seen: dict[str, Any] = {}

    async def work(request: web.Request) -> web.Response:
        seen.update(await request.json())
        if request.path == "/moved":
            raise web.HTTPTemporaryRedirect(location="/ok")
        if request.path == "/bad":
            return web.Response(status=500, text="out of ideas")
        if request.path == "/ok":
            body = {"model": seen["model"], "messages": seen["task"]["messages"]}
            headers = {"Authorization": f"Bearer {seen['api_key']}"}
            url = f"{seen['base_url']}/chat/completions"
            async with aiohttp.ClientSession(headers=headers) as session, session.post(url, json=body) as reply:
                assert reply.status == 200
        return web.Response(text="done")

    app = web.Application()
    for path in ("/ok", "/bad", "/moved", "/idle"):
        app.router.add_post(path, work)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", seen
    await runner.cleanup()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/ok", ""),
        ("/moved", "status 307, expected 200"),
        ("/bad", "status 500, expected 200: out of ideas"),
        ("/idle", "replied without a turn of the model"),
    ],
)
async def test_a_service_works_on_the_task(
    mesh: LocalMesh, service: tuple[str, dict[str, Any]], path: str, message: str
) -> None:
    url, seen = service
    report = await mesh.runner(load_agent(Extension("url", {"url": url + path}))).run(lease())
    assert report.outcome == (INFRA_FAILURE if message else COMPLETED), report.failure
    assert message in report.failure.message
    assert seen["task"]["episode"] == "e-l1"


async def test_a_service_that_does_not_run_is_named(mesh: LocalMesh) -> None:
    report = await mesh.runner(load_agent(Extension("url", {"url": "http://127.0.0.1:1/run"}))).run(lease())
    assert report.outcome == INFRA_FAILURE
    assert "http://127.0.0.1:1/run is not reachable" in report.failure.message


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until(condition: Callable[[], object]) -> None:
    """Polls: processes end in their own time."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
