"""Languages work under the compiled filter, without the rest of the jail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rollmesh.sandbox_runtime import privileges, seccomp
from rollmesh.services.sandbox import seccomp_policy

C = "#include <stdio.h>\n#include <pthread.h>\nvoid *f(void *x) { return x; }\nint main(void) { pthread_t t; "
C += 'pthread_create(&t, 0, f, 0); pthread_join(t, 0); puts("42"); }\n'
CPP = '#include <iostream>\n#include <thread>\nint main() { std::thread t([] { std::cout << "42\\n"; }); t.join(); }\n'
POOL = "import multiprocessing as m; print(*m.get_context('fork').Pool(2).map(abs, [-42]))"
TREE = "import shutil; open('s', 'w').close(); shutil.copy2('s', 'd'); print(42)"
PTY = "import os, pty; pid, fd = pty.fork()\nif not pid: os.execvp('sh', ['sh', '-c', 'stty -echo; tty'])\n"
PTY += "print(42 if b'/dev' in os.read(fd, 99) else 'no terminal')"
ASYNC = "import asyncio, subprocess\nasync def f():\n  p = await asyncio.create_subprocess_exec('true'); return await p.wait()\n"
ASYNC += "print(42 + asyncio.run(f()))"
LOCKS = "import sqlite3, subprocess, sys\nsqlite3.connect('z.db', isolation_level=None).execute('create table t (a)')\n"
LOCKS += "held = sqlite3.connect('z.db', isolation_level=None); held.execute('begin exclusive')\n"
LOCKS += 'late = \'import sqlite3; sqlite3.connect("z.db", timeout=0).execute("insert into t values (1)")\'\n'
LOCKS += "print(42 if b'database is locked' in subprocess.run([sys.executable, '-c', late], stderr=-1).stderr else 'not locked')"
TAIL = "echo 4 > t; tail -n +1 -f t > out 2> err & for i in $(seq 300); do [[ -s out ]] && break; sleep 0.02; done; echo 2 >> t; "
TAIL += "for i in $(seq 300); do [[ $(wc -l < out) == 2 ]] && break; sleep 0.02; done; kill %1; grep -q 'reverting to polling' err; tr -d '\\n' < out"
WATCH = "try { require('fs').watch('.'); console.log('watches') } catch (e) { console.log(e.code == 'EPERM' ? 42 : e) }"
WATCH += "; require('fs').unwatchFile(require('fs').watchFile('.', () => {}) && '.')"
SOCKETS = "import socket; a, b = socket.socketpair(); a.setsockopt(1, 7, 9000); a.setsockopt(1, 20, bytes(16)); a.setblocking(False)\n"
SOCKETS += "import fcntl, os; fcntl.flock(os.open('l', os.O_CREAT), 6); fcntl.fcntl(os.pipe()[1], 1031, 8192); os.preadv(os.open('l', 0), [bytearray(1)], 0); print(42)"
NODE = "const {execSync} = require('child_process'); new (require('worker_threads').Worker)"
NODE += "('process.stdout.write(\"\")', {eval: true}); console.log(execSync('echo 42').toString().trim())"
SQL = (
    "import {0}; c = {0}.connect('x.db'); c.execute('create table t (a int)'); c.execute('insert into t values (42)'); "
)
SQL += "print(c.execute('select * from t').fetchall()[0][0])"
NUMPY = "import numpy as np; print(int((np.ones((300, 42)) @ np.ones((42, 300)))[0, 0]))"
PYTHON = [sys.executable, "-c"]


@pytest.mark.parametrize(
    "command",
    [
        [*PYTHON, POOL],
        [*PYTHON, TREE],
        [*PYTHON, PTY],
        [*PYTHON, ASYNC],
        [*PYTHON, NUMPY],
        [*PYTHON, SQL.format("sqlite3")],
        [*PYTHON, SQL.format("duckdb")],
        [*PYTHON, LOCKS],
        [*PYTHON, SOCKETS],
        ["bash", "-c", TAIL],
        [
            "bash",
            "-c",
            "sleep 0 & wait; mkfifo f; : > a; cp -p a b && cat <(echo 4) | tr -d '\\n'; [[ -p f ]] && echo 2",
        ],
        ["sh", "-c", "gcc -pthread -o c x.c && ./c"],
        ["sh", "-c", "g++ -pthread -o c x.cpp && ./c"],
        ["node", "-e", NODE],
        ["node", "-e", WATCH],
        ["sqlite3", "y.db", "create table t (a); insert into t values (42); select * from t"],
    ],
    ids=[
        "pool",
        "copies",
        "pty",
        "asyncio",
        "numpy",
        "sqlite module",
        "duckdb",
        "locks",
        "sockets",
        "tail",
        "bash",
        "gcc",
        "g++",
        "node",
        "watch",
        "sqlite3",
    ],
)
def test_language_works_under_the_filter(tmp_path: Path, command: list[str], request: pytest.FixtureRequest) -> None:
    tool = request.node.callspec.id
    if tool == "duckdb":
        pytest.importorskip("duckdb")
    if shutil.which(command[0]) is None or (tool in ("gcc", "g++") and shutil.which(tool) is None):
        pytest.skip(f"no {tool} here")
    (tmp_path / "x.c").write_text(C)
    (tmp_path / "x.cpp").write_text(CPP)
    rules = seccomp_policy.compiled()

    def confine() -> None:
        privileges.no_new_privileges()
        seccomp.install(rules)

    done = subprocess.run(command, preexec_fn=confine, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "42"), done.stderr
