"""The general plugin of vLLM, which it calls in each of its processes: a process that the node started is killed with
the node.

vLLM itself ends its engine core only if the node exits cleanly. Without effect in processes that this engine did not
start.
"""

from __future__ import annotations

import ctypes
import os
import signal

NODE = "ROLLMESH_VLLM_NODE"
"""Environment variable with the process id of the node."""
_PR_SET_PDEATHSIG = 1


def end_with_node() -> None:
    """Let the kernel kill this process when its parent thread in the node ends."""
    node = os.environ.get(NODE, "")
    if node and os.getpid() != int(node) and os.getppid() in (int(node), 1):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(node):  # it ended before the signal was set
            os.kill(os.getpid(), signal.SIGKILL)
