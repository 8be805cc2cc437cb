"""A run from Python leaves the same folder as the command; the test executes the snippet of README."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from rollmesh.cli.__main__ import app

from .test_cli import save_user_folder

README = Path(__file__).parents[2] / "README.md"


def test_readmes_snippet_leaves_a_folder_that_audit_and_show_read_and_returns_the_summary(tmp_path: Path) -> None:
    mine = save_user_folder(tmp_path)
    snippet = re.search(r"## From Python\n.*?```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert snippet is not None
    done = subprocess.run(
        [sys.executable, "-c", snippet[1]],
        cwd=mine,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((mine / "runs" / "mine" / "summary.json").read_text())
    assert (summary["outcome"], summary["updates"]) == ("finished", 4)
    said = done.stdout.splitlines()
    assert said[0] == f"finished 4 {summary['heldout_success_after']}"
    assert said[1] == summary["checkpoint"]
    audit = CliRunner().invoke(app, ["audit", str(mine / "runs" / "mine"), "--json"])
    assert audit.exit_code == 0, audit.output
    assert json.loads(audit.stdout)["holds"]
    shown = CliRunner().invoke(app, ["show", str(mine / "runs" / "mine"), "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)
    _says_what_is_there_instead(mine / "runs" / "mine")


def _says_what_is_there_instead(run: Path) -> None:
    """Check the errors for an unknown run and for a run that is not running."""
    unknown = CliRunner().invoke(app, ["audit", str(run), "--run-name", "other"])
    assert unknown.exit_code != 0
    assert "the ledger of run 'other' does not exist; --run-name takes one of: cli" in unknown.output
    rests = CliRunner().invoke(app, ["status", str(run)])
    assert rests.exit_code == 1
    assert f"the run in {run} is not running" in rests.output
    assert "ipv4" not in rests.output
