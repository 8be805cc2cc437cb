"""The signals that ask a process of rollmesh to stop cleanly."""

from __future__ import annotations

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return SIGINT, SIGTERM and, unless it is ignored as under `nohup`, SIGHUP.

    SIGHUP is sent when the terminal or its SSH session is closed. Its default action would end the process immediately.
    """
    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hang_up)
