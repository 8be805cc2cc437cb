"""CPU seconds of processes other than one's own."""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.cpu_profile import cpu_s_of

BURN_S = 0.3
BURN = f"import time\nwhile time.process_time() < {BURN_S}: pass"
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]]); print('ended', flush=True); sys.stdin.read()"


def test_cpu_of_a_process_counts_children_that_have_ended() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ended\n"
        spent = cpu_s_of({"parent": parent.pid, "me": os.getpid()})
        parent.communicate(timeout=30)
    assert spent["parent"] >= BURN_S - 0.05
    assert spent["me"] >= spent["parent"], "what is below a process is its own too"


def test_cpu_of_a_process_that_is_gone_is_nothing() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(timeout=30)
    assert cpu_s_of({"gone": ended.pid}) == {"gone": 0.0}
