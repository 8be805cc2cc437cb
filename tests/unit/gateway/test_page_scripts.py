"""The scripts of the page: syntax, pure functions, and nothing that needs a network or interprets text as markup."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FILES = {
    entry.name: entry.read_text(encoding="utf-8")
    for entry in resources.files("rollmesh.services.gateway.page").joinpath("static").iterdir()
}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}


def test_every_file_is_small_and_the_page_is_whole() -> None:
    assert "main.js" in SCRIPTS
    assert sum(map(len, FILES.values())) < 100_000
    for name, text in SCRIPTS.items():
        for imported in re.findall(r'from "\./([^"]+)"', text):
            assert imported in SCRIPTS, f"{name} imports {imported}"
    for used in re.findall(r"/static/([a-z.]+)", FILES["index.html"]):
        assert used in FILES


@pytest.mark.parametrize("name", FILES)
def test_no_file_uses_the_network_or_interprets_text(name: str) -> None:
    text = FILES[name].replace("http://www.w3.org", "")
    assert not re.search(r"https?://|//[a-z]+\.[a-z]+/", text)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|\.style\b|style=", text
    )


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_pure_functions_of_the_page() -> None:
    command = ["node", "--test", "tests/page/scales.test.mjs"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_every_script_is_valid(tmp_path: Path) -> None:
    for name, text in SCRIPTS.items():
        (tmp_path / name).with_suffix(".mjs").write_text(text, encoding="utf-8")
    names = sorted(str(path) for path in tmp_path.iterdir())
    check = 'for f in "$@"; do node --check "$f" || exit 1; done'
    found = subprocess.run(["sh", "-c", check, "sh", *names], capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 0, found.stderr
