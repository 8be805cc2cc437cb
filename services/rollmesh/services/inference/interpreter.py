"""The Python interpreter of an inference node's process. vLLM and a trainer pin different versions of torch, so they
cannot share one.

`inference.python` names it. If it is empty, the node runs with this interpreter, except that the engine `vllm` falls
back to the environment of `make setup-vllm` in the working directory if this interpreter has no vLLM.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from rollmesh.services.inference.config import InferenceConfig
from rollmesh.shared.domain.protocol import PROTOCOL, ProtocolMismatch, ProtocolVersion, check_protocol
from rollmesh.shared.errors import ConfigError

KEY = "inference.python"
VLLM = "vllm"
"""Name of the engine and of the module that it needs."""
VLLM_PYTHON = Path(".venv-vllm/bin/python")
"""Interpreter of the environment that `make setup-vllm` creates."""
_PROBE_S_MAX = 60.0
_PROBE = """
import importlib.util, sys
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name.partition(".")[0]) is None]
print("missing:" + ",".join(missing))
try:
    from rollmesh.shared.domain.protocol import PROTOCOL
    print("protocol:" + str(PROTOCOL))
except ImportError:  # no rollmesh, or a release that reports none
    print("protocol:")
"""


def interpreter_of(config: InferenceConfig, base_dir: Path) -> str:
    """Return the absolute path of the interpreter. Raises ConfigError if it is not an executable file, or if no
    interpreter with vLLM is known."""
    if config.python:
        path = Path(os.path.abspath(base_dir / Path(config.python).expanduser()))  # a link into an environment stays
        if not os.access(path, os.X_OK) or path.is_dir():
            raise ConfigError(
                f"`{KEY}`: {path} is not an executable file; name the interpreter of an environment with rollmesh and "
                "the engine, for example .venv-vllm/bin/python",
                key=KEY,
            )
        if is_this(str(path)) and config.engine.name == VLLM and importlib.util.find_spec(VLLM) is None:
            raise no_vllm(str(path))
        return str(path)
    if config.engine.name != VLLM or importlib.util.find_spec(VLLM) is not None:
        return sys.executable
    if not VLLM_PYTHON.exists():
        raise no_vllm(sys.executable)
    return os.path.abspath(VLLM_PYTHON)


def no_vllm(python: str) -> ConfigError:
    """Return the error for an interpreter without vLLM."""
    return ConfigError(
        f"`{KEY}`: the engine vllm needs an interpreter with vLLM, and {python} has none; run `make setup-vllm` (on a "
        "host with a GPU: "
        f"install vllm and rollmesh into an environment), then set {KEY} to its interpreter, for example {VLLM_PYTHON}",
        key=KEY,
    )


def is_this(python: str) -> bool:
    """Return whether an interpreter belongs to the environment of this process."""
    if python == sys.executable:
        return True
    try:
        return os.path.samefile(Path(python).parent.parent, sys.prefix)
    except OSError:
        return False


def check_interpreter(python: str, config: InferenceConfig) -> None:
    """Raise ConfigError if an interpreter does not run, lacks rollmesh or the library of the engine, or has a release
    of rollmesh that does not work with this one. Blocks for a moment."""
    modules = ["rollmesh", *([VLLM] if config.engine.name == VLLM else [])]
    try:
        done = subprocess.run(
            [python, "-c", _PROBE, *modules], capture_output=True, text=True, timeout=_PROBE_S_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        raise ConfigError(f"`{KEY}`: {python} does not run: {err}; name a Python interpreter", key=KEY) from err
    found, _, protocol = done.stdout.strip().rpartition("missing:")[2].partition("\nprotocol:")
    if done.returncode or "missing:" not in done.stdout:
        why = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"`{KEY}`: {python} is not a Python interpreter that works: {why}", key=KEY)
    missing = found.strip()
    if "rollmesh" in missing:
        raise ConfigError(f"`{KEY}`: {python} has no rollmesh; install it into that environment", key=KEY)
    if missing:
        raise no_vllm(python)
    try:
        check_protocol(ProtocolVersion.parse(protocol), PROTOCOL, node_name=f"rollmesh of {python}")
    except ProtocolMismatch as err:
        raise ConfigError(f"`{KEY}`: {err}", key=KEY) from err
