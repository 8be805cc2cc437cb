"""A shell on a pseudo-terminal, and the text that comes out of it: no echo, no translation, no control sequences.

The shell tells by a mark on its terminal that it waits for the next line: a random word, so that programs don't print it by
accident, with the status of the last command and the CPU time used so far. A terminal keeps the order of what is written to it,
so everything before the mark is the command's output. The shell's builtins print the mark; where a program has disabled one of them, the
prompt does, without the times.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import struct
import termios
import tty
from collections.abc import Mapping
from dataclasses import dataclass

from rollmesh.sandbox_runtime.languages import children
from rollmesh.sandbox_runtime.output import Capture
from rollmesh.sandbox_runtime.process_env import private_dir

_ROWS, _COLUMNS = 40, 120
_TIOCGPTN = 0x80045430
_START, _END = b"\x1e", b"\x1f"
_MARK_BYTES_MAX = 200
_TIMES = re.compile(r"(\d+)m([\d.,]+)s")
_SEQUENCE = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    rb"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC: titles, links
    rb"|\x1b[PX^_][^\x1b]*\x1b\\"
    rb"|\x1b[ -/]*[0-Z\\^-~]"
)
_SEQUENCE_BYTES_MAX = 256
"""An escape that goes on for longer is no sequence: it is let through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The shell waits again."""

    status: int
    cpu_s: float


class Shell:
    """A running bash as leader of its own terminal session. `master` and `pidfd` are there to be polled."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        import subprocess  # as late as in `children`

        self._word = os.urandom(8).hex()
        self.master, slave = os.openpty()
        try:
            self._name = f"/dev/pts/{_pts_number(self.master)}"
            fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
            self.reset_mode()
            self._process = subprocess.Popen(
                ["/bin/bash", "--norc", "--noprofile", "--noediting", "-i"],
                stdin=slave,
                stdout=slave,
                stderr=slave,
                cwd=private_dir(),
                env={**environment, "TERM": "dumb", "SHELL": "/bin/bash", "PS1": "", "PS2": ""},
                start_new_session=True,
                preexec_fn=_become_leader,  # noqa: PLW1509 - as in `children`
            )
        except BaseException:
            os.close(self.master)
            raise
        finally:
            os.close(slave)
        os.set_blocking(self.master, False)
        self.pidfd = os.pidfd_open(self._process.pid)
        self._reader = _MarkReader(self._word)

    def setup_line(self) -> bytes:
        """What makes the shell tell that it waits."""
        mark = "\\builtin printf %s \"$PS1\" && \\builtin times && \\builtin printf '\\037'"
        report = f"PS1=$'\\036{self._word}:'$?: PS2=; {{ {mark}; }} > {self._name} 2>&- && PS1= || PS1+=$'\\037'"
        return (
            f"unset HISTFILE; set +o history +H; declare +x PS1 PS2; PROMPT_COMMAND={_quote(report)}; "
            "readonly PROMPT_COMMAND\n"
        ).encode()

    def reset_mode(self) -> None:
        """No echo, no change of line ends; programs may have left the terminal otherwise."""
        mode = termios.tcgetattr(self.master)
        mode[tty.IFLAG] = termios.ICRNL
        mode[tty.OFLAG] = 0
        mode[tty.LFLAG] = termios.ISIG | termios.ICANON | termios.IEXTEN
        termios.tcsetattr(self.master, termios.TCSANOW, mode)

    def read(self, into: Capture) -> Mark | None:
        """Take what the terminal holds; the mark once it has come. Raises BlockingIOError when there is nothing, OSError at its end."""
        if not self._reader.pending:
            data = os.read(self.master, 1 << 16)
            if not data:
                raise OSError("end of the terminal")
            self._reader.add(data)
        return self._reader.next(into)

    def interrupt(self, number: int) -> None:
        """Signal the job in the foreground, which may be the shell itself."""
        if (group := self._foreground()) > 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)

    @property
    def busy_with_job(self) -> bool:
        """Whether a job other than the shell has the foreground."""
        return self._foreground() not in (0, self._process.pid)

    def _foreground(self) -> int:
        """The process group that has the terminal; 0 if none has it any more."""
        try:
            return os.tcgetpgrp(self.master)
        except OSError:
            return 0

    def end(self) -> int:
        """Kill the shell and its foreground job, and forget them; the shell's exit status."""
        if self.busy_with_job:
            self.interrupt(signal.SIGKILL)
        self._process.kill()
        status = self._process.wait()
        os.close(self.pidfd)
        os.close(self.master)
        return status


class _MarkReader:
    """Takes marks and control sequences out of a stream of bytes, whatever pieces it comes in."""

    def __init__(self, word: str) -> None:
        self._start = _START + word.encode() + b":"
        self._buffer = b""
        self.pending = False

    def add(self, data: bytes) -> None:
        self._buffer += data
        self.pending = True

    def next(self, into: Capture) -> Mark | None:
        """Hand on the text before the next mark and return it; None if there is none yet."""
        self.pending = False
        begin = self._buffer.find(self._start)
        if begin < 0:
            self._hand_on(into, self._held_from())
            return None
        end = self._buffer.find(_END, begin + len(self._start))
        if end < 0:
            is_mark = len(self._buffer) - begin < _MARK_BYTES_MAX
            self._hand_on(into, begin if is_mark else begin + len(self._start))
            return None
        whole = self._buffer.rfind(self._start, begin, end)  # a mark that broke off is followed by another
        body = self._buffer[whole + len(self._start) : end].decode("ascii", "replace")
        text, self._buffer = self._buffer[:begin], self._buffer[end + 1 :]
        into.feed(_SEQUENCE.sub(b"", text))
        self.pending = bool(self._buffer)
        return _parse(body)

    def _held_from(self) -> int:
        """Where something begins that may become a mark or a control sequence."""
        held = len(self._buffer)
        last = self._buffer.rfind(_START)
        if last >= 0 and self._start.startswith(self._buffer[last:]):
            held = last
        escape = self._buffer.rfind(b"\x1b", max(0, len(self._buffer) - _SEQUENCE_BYTES_MAX))
        if escape >= 0 and not _SEQUENCE.match(self._buffer, escape):
            held = min(held, escape)
        return held

    def _hand_on(self, into: Capture, until: int) -> None:
        into.feed(_SEQUENCE.sub(b"", self._buffer[:until]))
        self._buffer = self._buffer[until:]


def _parse(body: str) -> Mark:
    """`status:` and, if it is not disabled, what the builtin `times` prints: user and system time of the shell and of its children."""
    status, _, times = body.partition(":")
    cpu_s = sum(int(minutes) * 60 + float(seconds.replace(",", ".")) for minutes, seconds in _TIMES.findall(times))
    return Mark(status=int(status) if status.isdigit() else 1, cpu_s=cpu_s)


def _become_leader() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    children.full_address_space()


def _pts_number(master: int) -> int:
    raw = fcntl.ioctl(master, _TIOCGPTN, struct.pack("I", 0))
    return int(struct.unpack("I", raw)[0])


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
