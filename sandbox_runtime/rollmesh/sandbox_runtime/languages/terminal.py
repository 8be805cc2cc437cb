"""A shell on a pseudo-terminal, and its output without echo, translation and control sequences.

When the shell waits for the next line, it prints a mark on its terminal: a random word, which programs do not print by
accident, with the status of the last command and the CPU time used so far. A terminal preserves the order of writes, so
everything before the mark is output of the command. Builtins of the shell print the mark. If a program has disabled one
of them, the prompt prints it without the times.
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
    rb"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colors, cursor
    rb"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC: titles, links
    rb"|\x1b[PX^_][^\x1b]*\x1b\\"
    rb"|\x1b[ -/]*[0-Z\\^-~]"
)
_SEQUENCE_BYTES_MAX = 256
"""Maximum bytes of a control sequence; a longer one is passed through as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The mark of a shell that waits for the next line."""

    status: int
    cpu_s: float


class Shell:
    """A running bash as leader of its terminal session. Callers poll `master` and `pidfd`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        import subprocess  # imported late, as in `children`

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
        """Return the line that makes the shell print marks."""
        mark = "\\builtin printf %s \"$PS1\" && \\builtin times && \\builtin printf '\\037'"
        report = f"PS1=$'\\036{self._word}:'$?: PS2=; {{ {mark}; }} > {self._name} 2>&- && PS1= || PS1+=$'\\037'"
        return (
            f"unset HISTFILE; set +o history +H; declare +x PS1 PS2; PROMPT_COMMAND={_quote(report)}; "
            "readonly PROMPT_COMMAND\n"
        ).encode()

    def reset_mode(self) -> None:
        """Disable echo and line-end translation, because programs may have changed the terminal mode."""
        mode = termios.tcgetattr(self.master)
        mode[tty.IFLAG] = termios.ICRNL
        mode[tty.OFLAG] = 0
        mode[tty.LFLAG] = termios.ISIG | termios.ICANON | termios.IEXTEN
        termios.tcsetattr(self.master, termios.TCSANOW, mode)

    def read(self, into: Capture) -> Mark | None:
        """Read the terminal's output into `into`. Return the mark once it has arrived. Raises BlockingIOError if
        nothing is available and OSError at the end."""
        if not self._reader.pending:
            data = os.read(self.master, 1 << 16)
            if not data:
                raise OSError("end of the terminal")
            self._reader.add(data)
        return self._reader.next(into)

    def interrupt(self, number: int) -> None:
        """Signal the foreground job, which may be the shell itself."""
        if (group := self._foreground()) > 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)

    @property
    def busy_with_job(self) -> bool:
        """Whether a job other than the shell has the foreground."""
        return self._foreground() not in (0, self._process.pid)

    def _foreground(self) -> int:
        """Return the process group that has the terminal; 0 if none has it."""
        try:
            return os.tcgetpgrp(self.master)
        except OSError:
            return 0

    def end(self) -> int:
        """Kill the shell and its foreground job. Return the shell's exit status."""
        if self.busy_with_job:
            self.interrupt(signal.SIGKILL)
        self._process.kill()
        status = self._process.wait()
        os.close(self.pidfd)
        os.close(self.master)
        return status


class _MarkReader:
    """Removes marks and control sequences from a stream of bytes, in pieces of any size."""

    def __init__(self, word: str) -> None:
        self._start = _START + word.encode() + b":"
        self._buffer = b""
        self.pending = False

    def add(self, data: bytes) -> None:
        self._buffer += data
        self.pending = True

    def next(self, into: Capture) -> Mark | None:
        """Pass on the text before the next mark and return the mark; None if it has not arrived."""
        self.pending = False
        begin = self._buffer.find(self._start)
        if begin < 0:
            self._pass_on(into, self._held_from())
            return None
        end = self._buffer.find(_END, begin + len(self._start))
        if end < 0:
            is_mark = len(self._buffer) - begin < _MARK_BYTES_MAX
            self._pass_on(into, begin if is_mark else begin + len(self._start))
            return None
        whole = self._buffer.rfind(self._start, begin, end)  # an incomplete mark is followed by another
        body = self._buffer[whole + len(self._start) : end].decode("ascii", "replace")
        text, self._buffer = self._buffer[:begin], self._buffer[end + 1 :]
        into.feed(_SEQUENCE.sub(b"", text))
        self.pending = bool(self._buffer)
        return _parse(body)

    def _held_from(self) -> int:
        """Return the position of a possible start of a mark or a control sequence."""
        held = len(self._buffer)
        last = self._buffer.rfind(_START)
        if last >= 0 and self._start.startswith(self._buffer[last:]):
            held = last
        escape = self._buffer.rfind(b"\x1b", max(0, len(self._buffer) - _SEQUENCE_BYTES_MAX))
        if escape >= 0 and not _SEQUENCE.match(self._buffer, escape):
            held = min(held, escape)
        return held

    def _pass_on(self, into: Capture, until: int) -> None:
        into.feed(_SEQUENCE.sub(b"", self._buffer[:until]))
        self._buffer = self._buffer[until:]


def _parse(body: str) -> Mark:
    """Parse `status:` and, unless disabled, the output of the builtin `times`: user and system time of the shell and of
    its children."""
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
