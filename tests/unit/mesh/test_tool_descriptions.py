"""Tools are described by the functions of their sandbox profiles, whose source is read and never run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.mesh.config import MeshConfig
from rollmesh.mesh.tool_descriptions import rollout_config
from rollmesh.services.rollout.config import ToolConfig
from rollmesh.services.rollout.tools import tool_schema
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.errors import ConfigError


def described(tool: dict[str, object], profile: dict[str, object]) -> ToolConfig:
    values = {"rollout": {"tools": {"mine": {"profile": "own", **tool}}}, "sandbox": {"profiles": {"own": profile}}}
    return rollout_config(config_from_dict(MeshConfig, values)).tools["mine"]


def test_the_demos_calculator_is_described_by_its_docstring_and_signature() -> None:
    function = tool_schema("calculator", rollout_config(MeshConfig()).tools["calculator"])["function"]
    assert function["description"].startswith("Return the value of `text`")
    assert function["parameters"] == {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
    }


def test_a_users_module_is_read_and_not_run(tmp_path: Path) -> None:
    source = "raise SystemExit('run')\ndef look(number: int) -> str:\n    '''Look up a number.'''\n"
    (tmp_path / "mine.py").write_text(source)
    tool = described({"function": "look"}, {"tools": ["mine"], "library_paths": [str(tmp_path)]})
    assert tool.description == "Look up a number."
    assert tool.parameters["properties"] == {"number": {"type": "integer"}}


def test_configured_words_come_first_and_a_prelude_counts() -> None:
    profile: dict[str, object] = {"prelude": "def look(text):\n    '''From the prelude.'''\n"}
    assert described({"function": "look"}, profile).description == "From the prelude."
    assert described({"function": "look", "description": "Mine."}, profile).description == "Mine."


def test_a_tool_for_code_takes_code() -> None:
    function = tool_schema("python", rollout_config(MeshConfig()).tools["python"])["function"]
    assert function["description"] == "Run python code and return its output."
    assert list(function["parameters"]["properties"]) == ["code"]


def test_a_profile_decides_which_tools_may_be_stateless_and_a_tool_may_decline() -> None:
    assert [tool.stateless for tool in rollout_config(MeshConfig()).tools.values()] == [True, None]
    profile: dict[str, object] = {"prelude": "def look(text): pass\ndef keep(text): pass\n", "stateless": ["look"]}
    assert described({"function": "look"}, profile).stateless is True
    assert described({"function": "look", "stateless": False}, profile).stateless is False
    assert described({"function": "keep"}, profile).stateless is False
    with pytest.raises(ConfigError, match=r"`sandbox.profiles.own.stateless` lacks its function 'keep'; add it there"):
        described({"function": "keep", "stateless": True}, profile)
    with pytest.raises(ConfigError, match="must be absent or false without `function`"):
        described({"stateless": True}, profile)
    with pytest.raises(ConfigError, match="must be empty with a repository or egress"):
        described({"function": "look"}, profile | {"egress": "web"})
