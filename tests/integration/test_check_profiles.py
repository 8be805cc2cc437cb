"""`rollmesh check` starts each profile once: what is wrong with its code and with the functions that tools name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from rollmesh.app.checks.profile_checks import check_profiles
from rollmesh.services.rollout.config import ToolConfig
from rollmesh.services.sandbox.config import PROFILES, ProfileConfig, SandboxConfig
from rollmesh.shared.config.registry import Extension

PRELUDE = """
def stock(name: str) -> str:
    raise SystemExit("a check calls no function")
def sell(name, number):
    return name
def flexible(*names):
    return names
fig = 3
"""


def found(prelude: str = PRELUDE, function: str = "stock", **profile: object) -> list[str]:
    profiles = {**PROFILES, "market": ProfileConfig(prelude=prelude, **profile)}  # type: ignore[arg-type]
    tools = {"look": ToolConfig(profile="market", function=function)}
    return [str(mistake) for mistake in check_profiles(SandboxConfig(profiles=profiles), tools)]


@pytest.mark.parametrize("function", ["stock", "flexible", "print"])
def test_a_profile_that_starts_and_a_function_of_one_text_are_right(function: str) -> None:
    assert found(function=function) == []


@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        ({"function": "stok"}, r"`rollout.tools.look.function` must be a function of the profile `market` that takes one text, got 'stok': name 'stok' is not defined"),
        ({"function": "sell"}, r"`rollout.tools.look.function` .*got 'sell': missing a required argument: 'number'"),
        ({"function": "fig"}, r"`rollout.tools.look.function` .*got 'fig': 3 is not a callable object"),
        ({"function": "stock('x')"}, r"`rollout.tools.look.function` .*it is not the name of a function"),
        ({"prelude": "def stock(name:\n"}, r"`sandbox.profiles.market`: the profile does not start: .*SyntaxError: '\(' was never closed"),
        ({"prelude": "import no_such_module\n" + PRELUDE}, r"`sandbox.profiles.market`: .*ModuleNotFoundError: No module named 'no_such_module'"),
        ({"prelude": "PRICES['fig']"}, r"`sandbox.profiles.market`: .*NameError: name 'PRICES' is not defined"),
        ({"tools": ("no_such_tools",)}, r"`sandbox.profiles.market`: .*ModuleNotFoundError: No module named 'no_such_tools'"),
        ({"preload": ("no_such_preload",)}, r"`sandbox.profiles.market`: .*ModuleNotFoundError: No module named 'no_such_preload'"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_profile_or_a_tool_is_reported_before_a_run(mistake: dict[str, object], expected: str) -> None:
    (message,) = found(**mistake)  # type: ignore[arg-type]
    assert re.search(expected, message), message
    assert message.count("\n") == 0, message


def test_profiles_that_the_user_did_not_change_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("rollmesh.app.checks.profile_checks.make_engine")
    assert check_profiles(SandboxConfig(), {}) == []
    assert check_profiles(replace(SandboxConfig(), engine=Extension("fake")), {"x": ToolConfig(profile="calc")}) == []


def test_a_host_that_cannot_start_the_sandbox_is_reported(tmp_path: Path) -> None:
    config = SandboxConfig(python=str(tmp_path / "gone"), profiles={"market": ProfileConfig(prelude=PRELUDE)})
    (mistake,) = check_profiles(config, {})
    assert re.match(r"`sandbox.engine`: this host cannot run it: .*gone", str(mistake))
