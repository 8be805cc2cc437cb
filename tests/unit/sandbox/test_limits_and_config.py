"""Limits and configuration reject impossible values and name field and value."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.egress.retrieval.backend import BACKENDS
from rollmesh.services.sandbox.engine import ENGINES
from rollmesh.services.sandbox.languages import declared_commands
from rollmesh.shared.config.loader import config_from_dict, to_yaml
from rollmesh.shared.config.registry import Registry
from rollmesh.shared.errors import ConfigError


@pytest.mark.parametrize("field", [field for field in Limits().as_dict() if field != "address_space_bytes"])
def test_limits_must_exceed_zero(field: str) -> None:
    with pytest.raises(ValueError, match=rf"limits\.{field} must be > 0, got 0"):
        Limits(**{field: 0})


def test_address_space_is_not_below_memory() -> None:
    assert Limits(memory_bytes=100, address_space_bytes=0)
    with pytest.raises(ValueError, match=r"limits\.address_space_bytes 99 must be >= limits\.memory_bytes 100"):
        Limits(memory_bytes=100, address_space_bytes=99)


def test_flood_limit_is_not_below_what_is_kept() -> None:
    with pytest.raises(ValueError, match=r"limits\.flood_bytes 5 must be >= limits\.output_bytes 6"):
        Limits(flood_bytes=5, output_bytes=6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sessions_max": 0}, "`sessions_max` must be >= 1, got 0"),
        ({"ttl_s": 10.0, "ttl_s_max": 5.0}, "`ttl_s` must be <= ttl_s_max = 5.0, got 10.0"),
        ({"warm": ["nope"]}, "`warm` must name profiles (python, calc, shell, sql), got 'nope'"),
        ({"profiles": {"p": {"limits": {"memroy_bytes": 1}}}}, "got 'memroy_bytes'"),
        ({"profiles": {"p": {"limits": {"call_s": -1}}}}, "`profiles.p.limits.call_s` must be > 0, got -1"),
        ({"profiles": {"p": {"library_paths": ["lib"]}}}, "`profiles.p.library_paths[0]` must match ^/, got 'lib'"),
        ({"profiles": {"p": {"library_lock": "lock"}}}, "`profiles.p.library_lock` must match ^(/|$), got 'lock'"),
    ],
)
def test_config_names_what_is_wrong(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config_from_dict(SandboxConfig, values)
    assert message in str(raised.value)


def test_config_survives_yaml() -> None:
    import yaml

    config = SandboxConfig(warm=("calc",))
    assert config_from_dict(SandboxConfig, yaml.safe_load(to_yaml(config))) == config


@pytest.mark.parametrize(
    ("languages", "message"),
    [
        ({"c": "command"}, "'c' is a language of the sandbox; choose another name"),
        ({"awk": "comand"}, "no sandbox language `comand`; .*did you mean `command`"),
        (
            {"awk": {"name": "command", "options": {"source": "a/b", "run": ["awk"]}}},
            "source` must match",
        ),
        ({"awk": {"name": "command", "options": {"source": "b", "run": []}}}, "run` must not be empty"),
        ({"awk": {"name": "command", "options": {"sorce": "b"}}}, "sorce.*did you mean `source`"),
    ],
)
def test_a_wrong_language_is_named(languages: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        declared_commands(config_from_dict(SandboxConfig, {"languages": languages}).languages)


@pytest.mark.parametrize("kind", [ENGINES, BACKENDS], ids=["engine", "backend"])
def test_built_in_engines_and_backends_exist(kind: Registry) -> None:
    assert all(callable(kind.find(name)) for name in kind.names)
