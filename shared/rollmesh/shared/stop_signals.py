"""The signals that ask a process of rollmesh to stop in order."""

from __future__ import annotations

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGINT, SIGTERM, and SIGHUP unless it is ignored, as `nohup` arranges.

    SIGHUP comes when the terminal or its SSH session is closed. Its default action would end the process at once.
    """
    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hang_up)
