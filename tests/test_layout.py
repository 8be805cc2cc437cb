"""The house: PEP 420 portions, one namespace, light imports, and generated code that matches its sources."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PORTIONS = ["protos", "shared", "services", "app", "trainer", "sandbox_runtime"]
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


def test_a_host_imports_a_service_when_it_builds_it() -> None:
    """A mesh of processes starts a dozen hosts, and each import of all services would take half a second of processor
    time."""
    code = (
        "import rollmesh.mesh.host, sys\n"
        "print([m for m in sys.modules if m.startswith('rollmesh.services.') and m.endswith(('.node', '.servicer'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_every_package_of_the_namespace_is_typed() -> None:
    packages = {init.parent for portion in PORTIONS for init in (ROOT / portion / "rollmesh").glob("*/__init__.py")}
    assert [str(package.relative_to(ROOT)) for package in sorted(packages) if not (package / "py.typed").exists()] == []


def test_every_package_says_what_it_is_for() -> None:
    for portion in PORTIONS:
        for init in (ROOT / portion).rglob("__init__.py"):
            assert init.read_text().startswith('"""'), f"{init} has no docstring"


def test_paths_in_the_documentation_exist() -> None:
    """Every relative link, and every named path below docs, configs and examples."""
    pages = [*ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")]
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
    """A class name identifies one class. Only the generated mirrors of the protos may repeat names of the domain."""
    core = ROOT / "services/rollmesh/services/coordinator/core"
    generated = {core / "facts.py", core / "messages.py"}
    defined: dict[str, list[str]] = {}
    for portion in set(PORTIONS) - {"protos"}:
        for path in (ROOT / portion).rglob("*.py"):
            for node in ast.parse(path.read_text()).body if path not in generated else []:
                if isinstance(node, ast.ClassDef):
                    defined.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert len(defined) > 500
    assert {name: paths for name, paths in defined.items() if len(paths) > 1} == {}


def test_collaborators_of_module_docstrings_exist() -> None:
    """A collaborator is a module by the end of its dotted name, a name that such a module defines, or
    `Class.member`."""
    sources = {}
    for path in (path for folder in [*PORTIONS, "tests"] for path in (ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        sources[".".join(parts).removesuffix(".__init__")] = path.read_text(encoding="utf-8")

    def exists(name: str) -> bool:
        if any(f".{module}".endswith(f".{name}") for module in sources):
            return True
        owner, _, member = name.rpartition(".")
        defined = re.compile(rf"^(class|def|async def) {member}\b", re.MULTILINE)
        owners = (source for module, source in sources.items() if f".{module}".endswith(f".{owner}"))
        if any(defined.search(source) for source in owners):
            return True
        pattern = re.compile(rf"^class {owner}\b.*?^    (def )?{member}\b", re.MULTILINE | re.DOTALL)
        return bool(owner) and any(pattern.search(source) for source in sources.values())

    wrong = []
    for module, source in sources.items():
        found = re.search(
            r"Collaborators:(.*?)(\n\n|\Z)", ast.get_docstring(ast.parse(source)) or "", re.DOTALL | re.MULTILINE
        )
        wrong += [
            f"{module}: {name}" for name in re.findall(r"`([\w.]+)`", found[1] if found else "") if not exists(name)
        ]
    assert not wrong
