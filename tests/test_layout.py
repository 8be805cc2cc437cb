"""The house: PEP 420 portions, one namespace, light imports, and generated code that matches its sources."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PORTIONS = ["protos", "shared", "services", "trainer", "sandbox_runtime"]
LIGHT = [
    "rollmesh.v1.run_pb2_grpc",
    "rollmesh.services.coordinator",
    "rollmesh.services.gateway",
    "rollmesh.mesh",
    "rollmesh.cli.__main__",
]


def test_namespace_has_no_init_and_all_portions() -> None:
    import rollmesh

    assert getattr(rollmesh, "__file__", None) is None
    assert {Path(p).parent.name for p in rollmesh.__path__} == set(PORTIONS)


@pytest.mark.parametrize("portion", PORTIONS)
def test_portion_root_holds_no_module(portion: str) -> None:
    assert not list((ROOT / portion / "rollmesh").glob("*.py"))


@pytest.mark.parametrize("module", LIGHT)
def test_light_module_loads_no_heavy_library(module: str) -> None:
    code = (
        f"import {module}, sys; print([m for m in ('torch', 'transformers', 'vllm', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_every_package_says_what_it_is_for() -> None:
    for portion in PORTIONS:
        for init in (ROOT / portion).rglob("__init__.py"):
            assert init.read_text().startswith('"""'), f"{init} has no docstring"


def test_paths_in_the_documentation_exist() -> None:
    """Every relative link, and every named path below docs, configs and examples."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    missing = []
    for page in pages:
        text = page.read_text()
        links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
        missing += [f"{page.name}: {link}" for link in links if not (page.parent / link).exists()]
        named = re.findall(r"(?<![\w/.-])((?:docs|configs|examples)/[\w./-]*\w)", text)
        missing += [f"{page.name}: {path}" for path in named if not (ROOT / path).exists()]
    assert len(pages) > 20
    assert missing == []


def test_class_names_are_unique() -> None:
    """A class name identifies one class. Only the generated mirrors of events.proto may repeat names of the domain."""
    generated = ROOT / "services/rollmesh/services/coordinator/core/facts.py"
    defined: dict[str, list[str]] = {}
    for portion in set(PORTIONS) - {"protos"}:
        for path in (ROOT / portion).rglob("*.py"):
            for node in ast.parse(path.read_text()).body if path != generated else []:
                if isinstance(node, ast.ClassDef):
                    defined.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert len(defined) > 500
    assert {name: paths for name, paths in defined.items() if len(paths) > 1} == {}
