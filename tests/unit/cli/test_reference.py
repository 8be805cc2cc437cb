"""The generated pages are current, and the JSON schema fits the configurations that are shipped."""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from rollmesh.app.config import TrainConfig
from rollmesh.cli.__main__ import app
from rollmesh.shared.config.config_schema import field_docs, json_schema
from rollmesh.trainer.recipe import recipe_names
from tools import reference
from tools.curve_figure import curves, draw
from tools.proto_reference import proto_pages
from tools.reference import commands

ROOT = Path(__file__).parents[3]
configuration, methods = functools.cache(reference.configuration), functools.cache(reference.methods)
"""Each takes seconds."""
REMEDY = "run: python -m tools.reference docs"


def test_the_reference_pages_are_current() -> None:
    assert (ROOT / "docs/reference/configuration.md").read_text() == configuration(), REMEDY
    assert (ROOT / "docs/reference/cli.md").read_text() == commands(), REMEDY
    guide = (ROOT / "docs/_parts/methods_guide.md").read_text()
    assert (ROOT / "docs/reference/methods.md").read_text() == methods(guide), REMEDY


def test_the_pages_of_the_protocol_are_current() -> None:
    pages = proto_pages(ROOT / "protos")
    for name, page in pages.items():
        assert (ROOT / f"docs/reference/protos/{name}.md").read_text() == page, REMEDY
    assert {path.stem for path in (ROOT / "docs/reference/protos").iterdir()} == pages.keys()
    assert "UNKNOWN_ORACLE: the oracle reference does not resolve" in pages["reward"]
    assert "[Sample](types.md#sample)" in pages["reward"]


def test_the_guide_and_the_catalog_name_the_same_recipes() -> None:
    guide = (ROOT / "docs/_parts/methods_guide.md").read_text()
    situations = guide.partition("## Which method")[2].partition("\n## ")[0].splitlines()
    table = [line.split("|") for line in situations if line.startswith("| ") and "`" in line]
    found = Counter(situation for _, situation, *_ in table)
    assert [situation for situation, num in found.items() if num > 1] == [], "a situation has several rows"
    named = re.findall(r"`(\w+)`", " ".join(recipes for _, _, recipes, *_ in table))
    assert named
    assert set(named) <= set(recipe_names())
    page = methods(guide)
    assert sorted(re.findall(r"^#### (\w+)$", page, re.MULTILINE)) == recipe_names()
    section = page.partition("#### mc_grpo\n")[2].partition("\n#### ")[0]
    assert "- Needs: log-probs; `run.group_size` odd and >= 3\n- Sets: `run.group_size: 5`\n" in section


def test_the_page_states_type_default_range_unit_and_change_rule() -> None:
    page = configuration()
    assert "- **`run.batch_groups`** (integer, default `16`, in [1, 65536]): Groups (tasks) per update." in page
    assert "- **`run.episode_lease_s`** (number, default `30.0`, in [0.01, 86400], s, live)" in page
    assert '- **`learner.normalization`** (`token` or `sequence_mean` or `constant`, default `"token"`)' in page
    assert '- **`inference.directory`** (string, default `"inference"`, not empty, live)' in page


def test_the_page_describes_every_option_of_every_built_in_extension() -> None:
    page = configuration()
    assert set(re.findall(r"^### Options of \S+(?: \S+)* `(\w+)`", page, re.MULTILINE)) >= {
        "torch",
        "gdpo",
        "policy_gradient",
        "jsonl",
        "corpus",
    }
    assert re.findall(r"^- \*\*`.*\):$(?!\n  )", page, re.MULTILINE) == [], "options without a description"


def test_the_commands_include_subcommands() -> None:
    page = commands()
    assert "rollmesh dead replay [OPTIONS] {run}" in page
    assert "\n\n\n" not in page


def test_the_table_of_the_readme_and_the_figure_have_the_curves_of_the_demo(tmp_path: Path) -> None:
    found = curves((ROOT / "docs/demo.md").read_text())
    assert sorted(found) == [0, 1, 2]
    assert curves((ROOT / "README.md").read_text()) == found
    draw(found, tmp_path / "curve.svg")
    stored = (ROOT / "docs/pictures/demo_curve.svg").read_text()
    lines = re.compile(r'<path d="(M [^"]+)" clip-path')
    assert lines.findall(stored) == lines.findall((tmp_path / "curve.svg").read_text()), (
        "run: python -m tools.curve_figure docs"
    )
    assert "@font-face" not in stored


def test_every_setting_is_described() -> None:
    def undescribed(type_: type[msgspec.Struct], prefix: str = "") -> list[str]:
        docs = field_docs(type_)
        found = [f"{prefix}{name}" for name in type_.__struct_fields__ if not docs.get(name)]
        for field in msgspec.structs.fields(type_):
            if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
                found += undescribed(field.type, f"{prefix}{field.name}.")
        return found

    assert undescribed(TrainConfig) == []


CONFIGS = [path for path in sorted(ROOT.glob("configs/**/*.yaml")) if "recipes" not in path.parts]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_schema_knows_every_key_of_a_shipped_configuration(path: Path) -> None:
    schema = json_schema(TrainConfig)
    tree = yaml.safe_load(path.read_text())
    assert tree
    assert unknown_keys(schema, schema, tree) == []


def test_check_prints_the_schema() -> None:
    done = CliRunner().invoke(app, ["check", "--schema"])
    assert done.exit_code == 0, done.output
    schema = msgspec.json.decode(done.stdout)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["$defs"]["RunConfig"]["properties"]["batch_groups"]["maximum"] == 65536
    assert unknown_keys(schema, schema, {"run": {"batch_group": 1}, "rollout": {"agent": "single_turn"}}) == [
        "run.batch_group"
    ]


def unknown_keys(schema: dict[str, Any], node: dict[str, Any], tree: Any, path: str = "") -> list[str]:
    """Keys of `tree` that no alternative of the schema at this place allows."""
    if not isinstance(tree, dict):
        return []
    options = [node]
    while any("$ref" in one or "anyOf" in one for one in options):
        below = [
            one.get("anyOf", [schema["$defs"][one["$ref"].rpartition("/")[2]]] if "$ref" in one else [one])
            for one in options
        ]
        options = [one for group in below for one in group]
    options = [one for one in options if one.get("type") == "object"]
    found: list[str] = []
    for key, value in tree.items():
        properties = [one.get("properties", {}) for one in options]
        rest = [one.get("additionalProperties", True) for one in options]
        fits = [known.get(key, other) for known, other in zip(properties, rest, strict=True)]
        if True in fits:
            continue
        results: list[list[str]] = [unknown_keys(schema, one, value, f"{path}{key}.") for one in fits if one]
        results.sort(key=len)
        found += results[0] if results else [f"{path}{key}"]
    return found
