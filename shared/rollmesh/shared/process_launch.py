"""Commands that the kernel kills when the process that started them ends for any reason.

    subprocess.Popen(bound_to_parent([sys.executable, "-m", "worker"]))

Linux sends the death signal when the parent's *thread* that started the command ends. Start it from the main thread, or from one
that runs as long as the command should. The signal goes to this command only, so its children must be bound to it in turn.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# Runs in a fresh interpreter and becomes the command. Python code between fork and exec in the parent (preexec_fn) could deadlock on a
# lock that another of its threads held. PR_SET_PDEATHSIG (1) survives exec; the parent may have exited before it was set. SIGKILL (9),
# because a stopped or stuck process handles no other signal.
_LAUNCHER = """
import ctypes, os, sys
parent, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(parent): sys.exit("the parent is gone")
os.execvp(command[0], command)
"""


def bound_to_parent(command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` (same process id, streams and environment) and is killed when this process ends."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
