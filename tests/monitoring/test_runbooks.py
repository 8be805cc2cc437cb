"""The runbooks have a section for every alert, and their commands show what they say on a real mesh with the
symptom."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.alerts import ALERTS

from ..integration.test_cli import save_user_folder
from .prometheus import POLL_S, prometheus, until_any
from .promtool import ROOT

PAGE = (ROOT / "docs" / "runbooks.md").read_text()
SECTION = re.compile(r"^#{2,3} (.+)\n((?:(?!^#{2,3} ).*\n?)*)", re.MULTILINE)
LIMIT_S = 240.0
"""Maximum time for one symptom or command, in seconds. A busy host takes long."""
POISON = "7+7"
AGENT = f"""
class Agent:
    async def run(self, task, env):
        if {POISON!r} in task.messages[0].content:
            raise RuntimeError("malformed task")
        await env.generate(max_tokens=4)
"""
CONFIG = """
model: model
run: {name: mine, max_staleness: 2, batch_groups: 2, group_size: 4, updates_max: 100000, eval_every: 0, stall_s: 6, tries_max: 2,
      first_failures_max: 0, episode_lease_s: 4, batch_lease_s: 6}
counts: {sandbox: 0}
telemetry: {metrics: prometheus}
processes: {restarts_max: 1000, backoff_s: 0.05, backoff_s_max: 0.2}
coordinator: {fleet: {heartbeat_s: 0.5, suspect_after_s: 2, dead_after_s: 20}}
data: {source: {name: jsonl, options: {path: tasks.jsonl, labels: {parity: parity}, validation_share: 0.1, test_share: 0.1}}}
rollout: {agent: "agent.py:Agent"}
reward: {scorers: [{name: "scorer.py:Scorer", reward: correct}]}
inference: {engine: fake}
learner: {engine: fake, checkpoint_every: 5, publish: {num_probes: 0}, tensorboard: false}
"""


def sections() -> dict[str, str]:
    """Return the text of each section by its anchor."""
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-"): text for title, text in SECTION.findall(PAGE)}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_alert_has_its_section(alert: object) -> None:
    name, runbook = getattr(alert, "name", ""), getattr(alert, "runbook", "")
    assert f"`Rollmesh{name}`" in sections()[runbook]


def test_sections_name_alerts_that_exist_and_have_all_parts() -> None:
    assert set(re.findall(r"`Rollmesh(\w+)`", PAGE)) == {alert.name for alert in ALERTS}
    for anchor in {alert.runbook for alert in ALERTS}:
        for part in ("**Cause.**", "**Confirm.**", "**Remedy.**", "```sh"):
            assert part in sections()[anchor], (anchor, part)


# A run with symptoms --------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """`rollmesh train` of a run in `folder`/runs/mine with fake engine and trainer, and a Prometheus that reads it."""

    folder: Path
    url: str

    async def command(self, line: str, code: int | None = 0) -> str:
        """Execute a command of the runbooks, and return what it prints."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", line, cwd=self.folder, env={**os.environ, "PATH": path, "COLUMNS": "200"},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        async with asyncio.timeout(LIMIT_S):
            output, _ = await process.communicate()
        assert code in (None, process.returncode), f"{line}\n{output.decode()}"
        return output.decode()

    async def until_prints(self, line: str, pattern: str) -> str:
        """Repeat a command until its output matches."""
        deadline_s, output = time.monotonic() + LIMIT_S, ""
        while time.monotonic() < deadline_s:
            output = " ".join((await self.command(line, code=None)).split())  # lines are wrapped
            if re.search(pattern, output):
                return output
            await asyncio.sleep(POLL_S)
        pytest.fail(f"{line!r} did not print {pattern!r} but\n{output}")

    async def until_fires(self, alert: str) -> None:
        await until_any(self.url, f'ALERTS{{alertname="Rollmesh{alert}",alertstate="firing"}}', limit_s=LIMIT_S)

    async def until_holds(self, alert: str) -> None:
        """Wait until the expression of an alert holds, which fires after its `for`."""
        await until_any(self.url, self.expr(alert), limit_s=LIMIT_S)

    @staticmethod
    def expr(alert: str) -> str:
        return next(one.expr for one in ALERTS if one.name == alert)

    def pid(self, process: str) -> int:
        """Return the newest process id of a process."""
        events = [json.loads(line) for line in (self.folder / "runs/mine/processes.jsonl").read_text().splitlines()]
        return int(next(e["pid"] for e in reversed(events) if (e["process"], e["what"]) == (process, "started")))

    def signal(self, process: str, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid(process), number)

    def nats(self) -> int:
        """Return the process id of nats-server, a child of the process `nats`."""
        (ports,) = (self.folder / "runs/mine/nats").glob("nats-server_*.ports")
        return int(ports.stem.rpartition("_")[2])


def prepare(folder: Path) -> None:
    save_user_folder(folder)
    (folder / "agent.py").write_text(AGENT)
    (folder / "mine.yaml").write_text(CONFIG)


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Run]:
    command = [str(Path(sys.executable).parent / "rollmesh"), "train", "mine.yaml", "--out", "runs/mine"]
    with (folder / "train.log").open("wb") as log, prometheus(folder, folder / "runs/mine/metrics") as url:
        train = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=log, stderr=log)
        try:
            run = Run(folder, url)
            await run.until_prints("rollmesh status runs/mine", r"applied [1-9]")
            yield run
        finally:
            with suppress(ProcessLookupError):
                train.send_signal(signal.SIGTERM)
            async with asyncio.timeout(LIMIT_S):
                await train.wait()


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_the_commands_confirm_and_remedy_the_symptoms_of_a_run(tmp_path: Path) -> None:
    prepare(tmp_path)
    async with running(tmp_path) as run:
        await _poison_tasks(run)
        await _node_flapping(run)
        await _slow_nats(run)
        await _stuck_trainer(run)
        await _no_ready_node(run)
        audit = await run.command("rollmesh audit runs/mine", code=None)
        assert "holds" in audit


async def _poison_tasks(run: Run) -> None:
    await run.until_prints("rollmesh dead list runs/mine", "malformed task")
    await run.until_fires("DeadLetters")
    listed = await run.command("rollmesh dead list runs/mine --all")
    assert len(listed.splitlines()) >= 1
    assert "tasks will be retried" in await run.command("rollmesh dead replay runs/mine --all")


async def _node_flapping(run: Run) -> None:
    lost = 'rollmesh_coordinator_node_changes_total{kind="inference",state="suspect"}'
    for num in range(1, 7):
        run.signal("inference-0", signal.SIGKILL)
        await until_any(run.url, f"{lost} >= {num}")
        await until_any(run.url, 'rollmesh_coordinator_nodes{kind="inference",state="ready"} > 0')
    await run.until_fires("NodeFlapping")
    exits = await run.command("""grep '"ended"' runs/mine/processes.jsonl | tail -n 5""")
    assert exits.count('"code":-9') == 5
    changes = await run.command("grep 'node state changed' runs/mine/logs/coordinator.log | tail -n 5")
    assert "node=inference-0" in changes


async def _slow_nats(run: Run) -> None:
    server = run.nats()
    slow = asyncio.create_task(until_any(run.url, run.expr("LedgerSlow").replace("[5m]", "[10s]")))
    while not slow.done():  # it answers for a moment every two seconds
        os.kill(server, signal.SIGSTOP)
        await asyncio.sleep(2.0)
        os.kill(server, signal.SIGCONT)
        await asyncio.sleep(0.02)
    assert slow.result()
    assert "running" in await run.command("rollmesh status runs/mine")


async def _stuck_trainer(run: Run) -> None:
    run.signal("learner", signal.SIGSTOP)
    output = await run.until_prints("rollmesh status runs/mine", r"stalled: .*learner")
    assert re.search(r"learner without heartbeat for \d+ s", output), output
    await run.until_fires("NoProgress")
    started = await run.command("""grep '"learner"' runs/mine/processes.jsonl | tail -n 1""")
    await run.command(f"kill -9 {json.loads(started)['pid']}")
    await until_any(run.url, "rollmesh_coordinator_stalled == 0")


async def _no_ready_node(run: Run) -> None:
    await run.command("rollmesh drain reward runs/mine --wait")
    await run.until_prints("rollmesh status runs/mine", r"stalled: .*reward has left")
    await run.until_holds("KindMissing")
    addresses = json.loads((run.folder / "runs/mine/addresses.json").read_text())
    line = f"exec rollmesh serve reward --join {addresses['gateway']} --token-file runs/mine/token --dir node"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    added = await asyncio.create_subprocess_exec(
        "bash", "-c", line, cwd=run.folder, env={**os.environ, "PATH": path},
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        await until_any(run.url, "rollmesh_coordinator_stalled == 0")
    finally:
        added.terminate()
        async with asyncio.timeout(LIMIT_S):
            await added.wait()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 320 MiB, where the run is stored."""
    (tmp_path / "runs").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=320m", "tmpfs", str(tmp_path / "runs")]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.strip()}")
    yield tmp_path / "runs"
    subprocess.run(["umount", "-l", str(tmp_path / "runs")], check=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_the_commands_confirm_and_remedy_a_full_disk(tmp_path: Path, small_disk: Path) -> None:
    prepare(tmp_path)
    async with running(tmp_path) as run:
        await run.until_holds("DiskNearlyFull")
        free = os.statvfs(small_disk)
        (small_disk / "ballast").write_bytes(bytes(free.f_bavail * free.f_frsize - (32 << 20)))
        await run.until_prints("cat train.log", "disk_free_bytes_min")
    assert "/runs" in await run.command("df -h runs/mine")
    dry = await run.command("rollmesh clean runs/mine --dry-run")
    (small_disk / "ballast").unlink()
    assert "checkpoints" in dry or "depot" in dry
    await run.command("rollmesh clean runs/mine --keep-last 1")
    await run.command("rollmesh audit runs/mine")
