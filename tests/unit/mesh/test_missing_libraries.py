"""A library that is missing is an error with the command that installs it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollmesh.shared.config.extras import install_hint, libraries_needed
from rollmesh.shared.config.objects import load_object
from rollmesh.shared.errors import ConfigError


@pytest.mark.parametrize(
    ("module", "extra"),
    [("torch", "trainer"), ("torch.nn", "trainer"), ("tokenizers", "rollout"), ("prometheus_client", "telemetry")],
)
def test_each_library_of_an_extra_has_its_command(module: str, extra: str) -> None:
    assert install_hint(module) == f"pip install 'rollmesh[{extra}]'"


def test_a_part_that_needs_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with (
        pytest.raises(
            ConfigError, match=r"^rollout-0 needs the library `tokenizers`.*pip install 'rollmesh\[rollout\]'$"
        ),
        libraries_needed("rollout-0"),
    ):
        import tokenizers  # noqa: F401


def test_other_libraries_keep_their_error() -> None:
    with pytest.raises(ModuleNotFoundError), libraries_needed("rollout-0"):
        import no_such_library  # type: ignore[import-not-found]  # noqa: F401


def test_an_engine_that_needs_it_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "heavy_engine.py").write_text("import torch\nclass Engine: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"torch.*pip install 'rollmesh\[trainer\]'"):
        load_object("heavy_engine:Engine")
