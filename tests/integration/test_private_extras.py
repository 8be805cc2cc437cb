"""A whole run whose agent reads private extras: nothing that the run stores or prints contains one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rollmesh.cli.__main__ import app

from .test_cli import CONFIG, save_user_folder

SECRET, PUBLIC = "the-walrus-is-in-the-garden", "the-fox-is-on-the-hill"
AGENT = """
from pathlib import Path

from rollmesh.services.rollout.agent import Agent
from rollmesh.shared.domain.trajectory import Purpose


class Reader(Agent):
    private_extras = ("solution",)

    def __init__(self, *, base_dir):
        self.file = Path(base_dir, "read.txt")

    async def run(self, task, env):
        if env.purpose is not Purpose.EVAL:
            with self.file.open("a") as file:
                print(env.private_text("solution"), task.extras["fact"], file=file)
        await env.generate(max_tokens=4)
"""
SETTINGS = (
    "data.source.name=files",
    "data.source.options.private_extras={solution: worked}",
    "data.source.options.extras={fact: fact}",
    "rollout.agent=reader.py:Reader",
    "run.updates_max=2",
    "telemetry.traces=file",
)
PERMITTED = "rollout.private_extras={'reader.py:Reader': [solution]}"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def files_with(folder: Path, text: str) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    folder = save_user_folder(tmp_path)
    (folder / "reader.py").write_text(AGENT)
    (folder / "mine.yaml").write_text(CONFIG)
    tasks = [
        {"question": f"{n}+{n}", "answer": str(2 * n), "parity": str(n % 2), "worked": SECRET, "fact": PUBLIC}
        for n in range(60)
    ]
    (folder / "tasks.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    return folder


def test_no_file_or_output_of_a_run_has_a_private_extra(mine: Path) -> None:
    out = mine / "run"
    done = run("train", mine / "mine.yaml", *SETTINGS, PERMITTED, "--out", out, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["updates"] == 2
    read = (mine / "read.txt").read_text().splitlines()
    assert len(read) >= 16
    assert set(read) == {f"{SECRET} {PUBLIC}"}, "every episode of training had both extras"
    assert files_with(out, PUBLIC), "the ledger has public extras, so that this search finds what is stored"
    assert files_with(out, SECRET) == []
    shown = run("show", out, "--json", "--limit", 1000)
    samples = mine / "samples.jsonl"
    exported = run("rollout", mine / "mine.yaml", *SETTINGS, PERMITTED, "-n", 4, "--out", samples)
    assert (shown.exit_code, exported.exit_code) == (0, 0), exported.output
    assert SECRET not in done.output + shown.output + exported.output + samples.read_text()


def test_commands_reject_a_run_without_the_permission(mine: Path) -> None:
    for command in ("check", "train"):
        done = run(command, mine / "mine.yaml", *SETTINGS)
        assert done.exit_code == 2
        assert "reads the private extra `solution` of its tasks, which the configuration does not permit" in done.output
