"""The environment of TRL for `python -m benchmarks race`: a virtual environment in the checkout, with TRL, rollmesh and
the torch of `constraints.txt`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rollmesh.shared.errors import FailedPrecondition

ROOT = Path(__file__).parents[2]
TRL = "trl==1.16.0"
INSTALL_S_MAX = 900.0
_OUTPUT_CHARS = 2000


class NoTrlEnvironment(FailedPrecondition):
    """The environment of TRL cannot be made. The message contains the cause."""

    reason = "NO_TRL_ENVIRONMENT"


def trl_python(root: Path = ROOT) -> Path:
    """Return the interpreter of the environment in `root`, which is made if it is missing or incomplete. Raises
    NoTrlEnvironment."""
    constraints, venv = root / "constraints.txt", root / ".venv-trl"
    if not constraints.is_file():
        raise NoTrlEnvironment(f"{constraints} does not exist; run the race in a checkout of rollmesh")
    python, installed = venv / "bin" / "python", venv / f".installed-{TRL}"
    if not installed.exists():
        _run([sys.executable, "-m", "venv", str(venv)])
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, "-c", str(constraints), "-e", f"{root}[trainer]", TRL])
        installed.touch()
    return python


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S_MAX, check=False)
    except (OSError, subprocess.TimeoutExpired) as err:
        raise NoTrlEnvironment(f"cannot make the environment of TRL: {err}") from err
    if done.returncode:
        output = (done.stdout + done.stderr)[-_OUTPUT_CHARS:]
        raise NoTrlEnvironment(f"`{' '.join(command)}` exited with code {done.returncode}:\n{output}")
