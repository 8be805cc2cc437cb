"""Programs in any language from a client's session and from an agent's tool box, over a real service into a real
jail."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from rollmesh.services.rollout.config import ToolConfig
from rollmesh.services.rollout.tools import ToolBox
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.node import SandboxNode
from rollmesh.shared.clients.sandbox import ExecOutcome, OutputPiece, SandboxClient
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.domain.trajectory import EpisodeKey
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.server import ServerConfig

ACCESS = Access(token="t")
TOOLS = {
    "bash": ToolConfig(profile="shell", language="bash"),
    "c": ToolConfig(profile="shell", language="c", arguments=("7",)),
    "python": ToolConfig(profile="shell"),
    "sql": ToolConfig(profile="shell", language="sqlite", arguments=("a.db",)),
}


def connect(address: str) -> grpc.aio.Channel:
    return open_channel(address, access=ACCESS)


@asynccontextmanager
async def client_of_a_node(folder: Path) -> AsyncIterator[SandboxClient]:
    server = ServerConfig(stop_s=0.0)
    async with SandboxNode(SandboxConfig(), node_id="a", access=ACCESS, state_dir=folder, server=server) as node:
        client = SandboxClient(lambda: [node.address], connect, SystemClock())
        try:
            yield client
        finally:
            await client.close()


async def test_session_runs_any_language_and_brings_files_back(tmp_path: Path) -> None:
    async with client_of_a_node(tmp_path) as client, client.session("shell", session_id="s") as session:
        shell = await session.run(
            "echo hi > out.txt; exit_with() { return $1; }", language="bash", return_paths=["out.txt", "no"]
        )
        assert (shell.outcome, shell.files) == (ExecOutcome.OK, {"out.txt": b"hi\n"})
        assert (await session.run("exit_with 4", language="bash")).exit_status == 4
        code = "process.stdin.on('data', d => { console.log(process.argv[2] + d); process.exit(3); })"
        script = await session.run(code, language="javascript", stdin=b"in", arguments=["arg-"])
        assert (script.outcome, script.stdout, script.exit_status) == (ExecOutcome.ERROR, "arg-in\n", 3)
        assert script.cpu_s > 0
        assert (await session.run("open('out.txt').read()")).result == repr("hi\n")


async def test_agent_has_tools_in_any_language_by_config_alone(tmp_path: Path) -> None:
    key = EpisodeKey(run="run", task="t", group="g", episode="episode")
    async with client_of_a_node(tmp_path) as client, ToolBox(client, TOOLS, list(TOOLS), key, 60.0) as box:
        assert (await box.call("bash", "mkdir d; cd d; export X=5")).text == ""
        said = await box.call("bash", "pwd; echo $X; false")
        assert (said.text, said.ok) == ("/session/d\n5\nerror: ExitStatus: 1", False)
        wrong = await box.call("c", "int main() { return x; }")
        assert not wrong.ok
        assert "main.c:1" in wrong.text
        assert "undeclared" in wrong.text
        right = await box.call("c", "#include <stdio.h>\nint main(int n, char **v) { puts(v[1]); }")
        assert (right.text, right.ok) == ("7", True)
        await box.call("python", "import sqlite3; sqlite3.connect('a.db').execute('create table t(x)')")
        assert (await box.call("sql", "select count(*) as n from t")).text == '{"columns": ["n"], "rows": [[0]]}'


PRINTERS = {
    "python": "import sys, time\nprint('first')\ntime.sleep({hold})\nsys.stdout.write('second\\n')",
    "a child of python": "import subprocess\nsubprocess.run(['sh', '-c', 'echo first; sleep {hold}; echo second'])",
    "bash": "echo first; sleep {hold}; echo second",
    "c": """
#include <stdio.h>
#include <unistd.h>
int main() {{ puts("first"); fflush(stdout); sleep({hold}); puts("second"); }}
""",
}


@pytest.mark.parametrize("printer", PRINTERS)
async def test_output_arrives_while_the_program_runs(tmp_path: Path, printer: str) -> None:
    """Two pieces, because the first was sent while the program slept; sent together they would be one."""
    language = printer.rpartition(" ")[2]
    async with client_of_a_node(tmp_path) as client, client.session("shell", session_id="s") as session:
        pieces: list[OutputPiece] = []
        async for piece in session.stream(PRINTERS[printer].format(hold=3), language=language):
            if isinstance(piece, OutputPiece):
                pieces.append(piece)
            else:
                assert (piece.outcome, piece.stdout) == (ExecOutcome.OK, "first\nsecond\n")
        assert [(piece.descriptor, piece.text) for piece in pieces] == [(1, "first\n"), (1, "second\n")]


async def test_streamed_output_is_bounded_and_outcomes_stay(tmp_path: Path) -> None:
    async with client_of_a_node(tmp_path) as client, client.session("python", session_id="s") as session:
        pieces: list[str] = []
        flood = await session.run("while True: print('x' * 99)", on_output=lambda _, text: pieces.append(text))
        assert flood.outcome is ExecOutcome.OUTPUT_LIMIT
        assert "".join(pieces) == flood.stdout
        pieces.clear()
        late = await session.run(
            "while True: print(end='y')", wall_s=0.5, on_output=lambda _, text: pieces.append(text)
        )
        assert late.outcome in (ExecOutcome.TIME_LIMIT, ExecOutcome.OUTPUT_LIMIT)
        assert late.session_alive
        assert set("".join(pieces)) == {"y"}
        threads = "import threading\nt = [threading.Thread(target=lambda: [print(i) for i in range(200)]) for i in range(4)]\n[x.start() for x in t]\n[x.join() for x in t]\nNone"
        pieces.clear()
        many = await session.run(threads, on_output=lambda _, text: pieces.append(text))
        assert many.outcome is ExecOutcome.OK
        assert sorted("".join(pieces)) == sorted(many.stdout)
        assert (await session.run("1 + 1")).result == "2"


async def test_output_of_a_fork_is_received_and_does_not_answer_for_the_session(tmp_path: Path) -> None:
    async with client_of_a_node(tmp_path) as client, client.session("python", session_id="s") as session:
        code = "import os\nif os.fork() == 0:\n    print('child')\n    os._exit(0)\nos.wait()\nprint('parent')"
        result = await session.run(code, on_output=lambda _, text: None)
        assert (result.outcome, sorted(result.stdout.split())) == (ExecOutcome.OK, ["child", "parent"])
