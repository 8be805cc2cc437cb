"""The suites beside `make test`, one row each: runs that take minutes, change the host, or need more packages.

`make suite` prints the table, and `make suite NAME=chaos ROUNDS=4` runs a suite. A script is executed by bash in the
root of the repository. It reads the interpreter and the variables of the Makefile (ROUNDS, SEED and so on) from the
environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
VARIABLES = {
    "PYTHON": ".venv/bin/python", "ROUNDS": "40", "SEED": "0", "PARALLEL": "1",
    "PROCESSES": "false", "ETA": "1", "UPDATES": "3", "NUM": "0",
}  # fmt: skip
"""Variables of the scripts with their defaults. ROUNDS, SEED and PARALLEL are for chaos; SEED also for tamper, contract
and recipes; PROCESSES, ETA, UPDATES and NUM for recipes."""
_PIP = "$PYTHON -m pip install --quiet --disable-pip-version-check"
_CLIENTS = ".tools/clients/node_modules"
_NPM_CLIENTS = (
    # The package openai needs Node 22 or newer, which the package node installs.
    f"test -d {_CLIENTS}/openai || {{ mkdir -p .tools/clients && "
    "npm install --silent --no-audit --no-fund --prefix .tools/clients openai@7.57.0 node@26; }\n"
    f"export ROLLMESH_NPM_CLIENTS=$PWD/{_CLIENTS}\n"
)


@dataclass(frozen=True, slots=True)
class Suite:
    """What a suite shows, and the script that runs it."""

    help: str
    script: str


def _slow(paths: str, *, timeout_s: int = 120, options: str = "") -> str:
    """Run the tests of `paths` that are marked slow. `timeout_s` is the timeout of one test, in seconds."""
    return f"$PYTHON -m pytest -q -m slow --timeout {timeout_s} {options} {paths}"


def _all(paths: str, *, timeout_s: int, options: str = "") -> str:
    return _slow(paths, timeout_s=timeout_s, options=options).replace("-m slow", '-m "slow or not slow"')


SUITES = {
    "attack": Suite(
        "run every attack on the sandbox, as root and as an ordinary user; write docs/sandbox/attacks.md",
        "$PYTHON -m tests.attack --write docs/sandbox/attacks.md",
    ),
    "chaos": Suite(
        "kill and pause every process of a demo run at random for ROUNDS rounds; print a table of the results",
        "$PYTHON -m tests.chaos --rounds $ROUNDS --seed $SEED --parallel $PARALLEL",
    ),
    "chaos-cluster": Suite(
        "chaos with the streams on three NATS servers, of which one at a time is killed, stopped or cut off",
        "$PYTHON -m tests.chaos --cluster --faults 6 --limit-s 400 --rounds $ROUNDS --seed $SEED --parallel $PARALLEL",
    ),
    "chaos-programs": Suite(
        "chaos with 64 programs at once as agents, over four workers, with kills of programs too",
        "$PYTHON -m tests.chaos --programs --faults 8 --limit-s 600 --rounds $ROUNDS --seed $SEED --parallel $PARALLEL",
    ),
    "chaos-replay": Suite(
        "chaos with a replay log, of which half of each batch is",
        "$PYTHON -m tests.chaos --replay --rounds $ROUNDS --seed $SEED --parallel $PARALLEL",
    ),
    "client-curves": Suite(
        "clients for 40 updates and three seeds; print held-out success",
        _NPM_CLIENTS + "$PYTHON -m tests.clients",
    ),
    "clients": Suite(  # with .venv-vllm (make setup-vllm) also on a real vLLM
        "train agents with the public Python and npm packages `openai`, streaming on and off, for a few updates",
        _NPM_CLIENTS
        + 'test ! -x .venv-vllm/bin/python || export ROLLMESH_VLLM_PYTHON="$PWD/.venv-vllm/bin/python"\n'
        + _slow("tests/clients", timeout_s=900),
    ),
    "contract": Suite(
        "compare 500 random sequences of valid and invalid calls with an independent model of RunService",
        "$PYTHON -m tests.contract --sequences 500 --seed $SEED",
    ),
    "contract-kills": Suite(
        "run contract for 20 minutes while services are killed",
        "$PYTHON -m tests.contract --minutes 20 --seed $SEED",
    ),
    "deploy": Suite(
        "run the command lines of the Kubernetes manifests and of the Slurm script as processes of this host",
        _slow("tests/deploy", timeout_s=900, options='-k "not images"'),
    ),
    "floors": Suite(
        "test the wheel with the lowest version of every dependency (except the trainer's) in a separate environment",
        _slow("tests/floors", timeout_s=1200, options="-s"),
    ),
    "garbage": Suite(
        "send malformed, oversized and unfinished requests to every server of a mesh, and measure its memory",
        _slow("tests/garbage/test_garbage.py tests/garbage/test_connections.py", timeout_s=1800, options="-s"),
    ),
    "hosts": Suite(
        "run a mesh over hosts (network namespaces, as root) that are cut off, lossy, slow and with wrong clocks",
        "command -v faketime >/dev/null || apt-get install -y --no-install-recommends faketime\n"
        + _slow("tests/hosts", timeout_s=900, options="-s"),
    ),
    "images": Suite(
        "execute the pip steps of the Containerfiles in clean virtual environments",
        _slow("tests/deploy/test_images.py", timeout_s=1800, options="-s"),
    ),
    "leaks": Suite(
        "run 10,000 sandbox sessions with kills of the service, and check that no resource is left",
        _slow("tests/integration/test_sandbox_leaks.py", timeout_s=7200, options="-s"),
    ),
    "many-runs": Suite(
        "measure the time from publication to batch over 20 and 100 consecutive runs on one mesh",
        _slow("tests/garbage/test_many_runs.py", timeout_s=1800, options="-s"),
    ),
    "models": Suite(
        "test tiny models of every architecture in trainer and engine; print the table of docs/models.md",
        _all("tests/models", timeout_s=600) + "\n$PYTHON -m tests.models",
    ),
    "monitoring": Suite(
        "read a mesh with a real Prometheus: alert rules are evaluated, and every panel of a dashboard has data",
        "test -x .tools/prometheus/usr/bin/prometheus || (mkdir -p .tools/prometheus && cd .tools/prometheus && "
        "apt-get download -q prometheus && dpkg-deb -x prometheus_*.deb . && rm prometheus_*.deb) || "
        "echo 'prometheus cannot be installed; its tests are skipped'\n" + _all("tests/monitoring", timeout_s=1200),
    ),
    "newcomer": Suite(
        "execute the files and commands of README and docs/ with small ChatML and Llama 3 models made by transformers",
        "make docs\n" + _slow("tests/newcomer", timeout_s=900),
    ),
    "optional": Suite(
        "test what needs the optional packages wandb, mlflow and torchao, in .venv",
        f"{_PIP} -c constraints.txt wandb mlflow-skinny sqlalchemy alembic torchao\n"
        + _slow("tests/unit/cli/test_run_loggers.py tests/unit/trainer/test_optim.py"),
    ),
    "page": Suite(
        "test the live page in headless Chromium, and make the pictures of docs/live_page.md",
        f"{_PIP} -c constraints.txt playwright\n"
        'command -v chromium >/dev/null || test -n "${ROLLMESH_CHROMIUM:-}" || '
        "apt-get install -y --no-install-recommends chromium\n"
        "node --test tests/page\n"
        "export ROLLMESH_PICTURES=$PWD/docs/pictures\n" + _slow("tests/page", timeout_s=300),
    ),
    "peers": Suite(
        "compare losses, gradients and advantages of recipes with TRL itself, in its environment .venv-trl",
        _slow("tests/peers", timeout_s=2400, options="-s"),
    ),
    "recipes": Suite(
        "train with every recipe for UPDATES updates, audit it, and repeat the last one bit for bit; kill and resume one; "
        "resume every recipe from a checkpoint bit for bit; "
        "PROCESSES=true separates services, ETA bounds the staleness, NUM draws so many recipes with SEED",
        "export ROLLMESH_PROCESSES=$PROCESSES ROLLMESH_ETA=$ETA ROLLMESH_UPDATES=$UPDATES ROLLMESH_NUM=$NUM "
        "ROLLMESH_SEED=$SEED\n"
        + _all(
            "tests/integration/test_recipe_runs.py tests/integration/test_exact_resume.py",
            timeout_s=300,
            options="-s",
        ),
    ),
    "scale": Suite(
        "measure that each service has its own bottleneck, which only more nodes of that service move",
        _slow("tests/scale", options="-s"),
    ),
    "sim": Suite(
        "run long seeded simulations of the coordinator core",
        "export ROLLMESH_SEEDS=$(seq -s, 0 199)\n$PYTHON -m pytest -q tests/sim",
    ),
    "soak": Suite(
        "run every slow test: the full demo per seed, 10,000 samples with kills, and what the other suites have",
        _slow("", timeout_s=1800),
    ),
    "tamper": Suite(
        "tamper with copies of real ledgers 500 times, and check that the audit finds every change",
        "$PYTHON -m tests.tamper --num 500 --seed $SEED",
    ),
    "upgrade": Suite(
        "upgrade every service of a run from an earlier release to the present code, without losing a sample",
        _all("tests/upgrade", timeout_s=1500, options="-s"),
    ),
    "verdicts": Suite(
        "judge correct and wrong candidates, as root and as an ordinary user, and in plain python",
        _all("tests/verdicts", timeout_s=900)
        + "\n"
        + _slow("tests/integration/test_sandbox_unprivileged.py", timeout_s=900, options="-k verdicts"),
    ),
    "vllm": Suite(
        "test the vLLM engine with a real vLLM: the conformance suite, and tests that need it",
        "make setup-vllm\nPYTHON=.venv-vllm/bin/python\n"
        + _all(
            "tests/conformance/test_engine.py tests/vllm",
            timeout_s=600,
            options="-k vllm -o asyncio_default_test_loop_scope=session -o asyncio_default_fixture_loop_scope=session",
        ),
    ),
}


def main(arguments: Sequence[str]) -> int:
    """Run the suite that `arguments` name, or print the table. Returns the exit code."""
    if not arguments:
        width = max(map(len, SUITES))
        print("make suite NAME=...\n")
        print("\n".join(f"  {name:{width}}  {suite.help}" for name, suite in SUITES.items()))
        return 0
    if arguments[0] not in SUITES:
        print(f"NAME must be a suite, got {arguments[0]!r}; `make suite` prints them", file=sys.stderr)
        return 2
    environment = {**VARIABLES, **os.environ}
    script = "set -euo pipefail\n" + SUITES[arguments[0]].script
    return subprocess.run(["bash", "-c", script], check=False, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
