"""Base classes of extensions: every built-in has its base, misspelled members are named, and a class without the base
gets its defaults."""

from __future__ import annotations

import ast
import importlib
import itertools
import logging
from pathlib import Path

import pytest
import torch

from rollmesh.services.learner.engine import find_engine
from rollmesh.services.reward.config import ScorerConfig, build_scorer
from rollmesh.services.reward.scorer import SCORERS, Scorer
from rollmesh.shared.config.plugin import Requirement, _is_method, members, overrides
from rollmesh.shared.config.registry import Extension, Registry
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.features import FEATURES, Feature, FeatureRequest
from rollmesh.trainer.losses.base import LOSSES, LossTerm

ROOT = Path(__file__).parents[3]
NAMES = [
    "app.loggers.run_loggers:LOGGERS",
    "services.data.selector:SELECTORS",
    "services.data.source:SOURCES",
    "services.inference.engine:INFERENCE_ENGINES",
    "services.learner.engine:TRAINERS",
    "services.reward.finalizer:FINALIZERS",
    "services.reward.oracles:ORACLES",
    "services.reward.scorer:SCORERS",
    "services.rollout.agent:AGENTS",
    "services.rollout.tool_calls.choice:TOOL_CALL_PARSERS",
    "services.sandbox.engine:ENGINES",
    "services.sandbox.egress.retrieval.backend:BACKENDS",
    "services.sandbox.languages:LANGUAGES",
    "trainer.estimators.base:ESTIMATORS",
    "trainer.features:FEATURES",
    "trainer.losses.base:LOSSES",
    "trainer.update_rules.base:UPDATE_RULES",
]
numbers = itertools.count()


def _registry(name: str) -> Registry:
    module, _, attribute = name.partition(":")
    found: Registry = getattr(importlib.import_module(f"rollmesh.{module}"), attribute)
    return found


def _written(folder: Path, text: str) -> str:
    """Write a file of a user, and return the name of its class `Mine`."""
    file = folder / f"mine_{next(numbers)}.py"
    file.write_text(text)
    return f"{file}:Mine"


def test_all_kinds_are_covered() -> None:
    defined = [
        path
        for portion in ("services", "trainer", "shared", "app")
        for path in (ROOT / portion).rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "Registry"
    ]
    assert len(defined) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_built_in_inherits_from_its_base_and_members_have_a_line(name: str) -> None:
    registry = _registry(name)
    for built_in in registry.names:
        if built_in != "vllm":  # it imports a library that is not installed here
            assert issubclass(registry.find(built_in), registry.base)
    undocumented = [key for key, value in members(registry.base).items() if _is_method(value) and not value.__doc__]
    assert undocumented == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("inherits", [True, False])
def test_a_misspelled_member_of_each_kind_is_named(
    name: str, inherits: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry = _registry(name)
    planted = {f"{key}_": value for key, value in members(registry.base).items() if key != "__call__"}
    body = [f"    def {key}(self): ..." if _is_method(value) else f"    {key} = ()" for key, value in planted.items()]
    if any(isinstance(value, classmethod) for value in members(registry.base).values()):
        body.append("    @classmethod\n    def open(cls, config, options): ...")
    base = registry.base
    head = f"from {base.__module__} import {base.__name__} as Base\nclass Mine{'(Base)' if inherits else ''}:\n"
    own = "    count = 0\n    def help_with_something(self): ...\n"
    registry.find(_written(tmp_path, head + own + "\n".join(body)))
    said = [record.getMessage() for record in caplog.records]
    for key in planted:
        assert any(f"{base.__name__} has no member `{key}`; did you mean `{key[:-1]}`?" in line for line in said), said
    assert len(said) == len(planted) + (not inherits)
    assert inherits or f"class Mine does not inherit from {base.__module__}.{base.__name__};" in said[0]


def test_spellings_that_users_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = """
from rollmesh.trainer.estimators import GroupEstimator
class Mine(GroupEstimator):
    needs_behaviour = False
    closed = False
    def __init__(self, *, weights):
        super().__init__(weights=weights)
        self.group_sizes = 3
        self.stated = True
    def of_group(self, group):
        return {}
    def load_states(self, state): ...
    def observed(self): ...
"""
    _registry("trainer.estimators.base:ESTIMATORS").make(_written(tmp_path, text), weights={})
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "Estimator has no member `needs_behaviour`; did you mean `needs_behavior`?" in said
    assert "`load_states`; did you mean `load_state`?" in said
    assert "`group_sizes`; did you mean `group_size`?" in said
    assert len(caplog.records) == 3


def test_a_module_of_a_user_may_have_a_name_that_begins_like_a_library(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "abc_features.py").write_text(
        "class Mine:\n    reads_hiden = True\n    def __call__(self, inputs): ..."
    )
    monkeypatch.syspath_prepend(tmp_path)
    FEATURES.make("abc_features:Mine")
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "Feature has no member `reads_hiden`; did you mean `reads_hidden`?" in said


WITHOUT_BASE = {
    "class": "class Mine:\n    {}",
    "slots": "import dataclasses\n@dataclasses.dataclass(frozen=True, slots=True)\nclass Mine:\n    number: int = 1\n    {}",
    "struct": "import msgspec\nclass Mine(msgspec.Struct, frozen=True):\n    number: int = 1\n    {}",
    "module": "import torch\nclass Mine(torch.nn.Module):\n    {}",
    "wrapper": "class Inner:\n    by_token = True\n    {}\nclass Mine:\n    inner = Inner()\n    {}\n    def __getattr__(self, name): return "
    "getattr(self.inner, name)",
    "function": "class Made:\n    {}\ndef Mine(): return Made()",
    "lambda": "def Mine(): return lambda inputs: inputs.logprobs",
}


@pytest.mark.parametrize("form", WITHOUT_BASE)
def test_a_feature_without_base_class_gets_its_defaults(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    call = "def __call__(self, inputs): return inputs.logprobs"
    name = _written(tmp_path, WITHOUT_BASE[form].replace("{}", call))
    made = FEATURES.make(name)
    assert (made.reads_hidden, made.reads_router, made.options) == (False, False, None)
    assert made.by_token is (form == "wrapper")
    assert not overrides(made, Feature.sequences_of)
    made.use_tokenizer(None)
    request = FeatureRequest(made)
    assert not request.reads_others
    assert request.key == FeatureRequest(made).key
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "does not inherit from rollmesh.trainer.features.Feature; this release sets the defaults" in said[0]


def test_a_torch_module_with_the_base_is_a_term(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = """
import torch
from rollmesh.trainer.losses import LossTerm
class Mine(torch.nn.Module, LossTerm):
    needs = ("entropy",)
    def forward(self, inputs): return inputs, {}
"""
    made = LOSSES.make(_written(tmp_path, text))
    assert made.needs == ("entropy",)
    assert made.needs_behavior
    assert made(torch.ones(1))[1] == {}
    assert not overrides(made, LossTerm.state)
    assert caplog.records == []


async def test_a_scorer_without_base_class_works_as_before(tmp_path: Path) -> None:
    text = """
class Mine:
    rewards = ("other",)
    def use_timeout(self, timeout_s): self.limit = timeout_s
    async def score(self, item): return 1.0
"""
    configured = build_scorer(ScorerConfig(name=_written(tmp_path, text), reward="mine", timeout_s=7.0), None)
    assert configured.reward_names == ("mine", "other")
    assert configured.label == "Mine@1"
    assert (configured.timeout_s, configured.columns) == (None, ())
    assert not overrides(configured.scorer, Scorer.use_policy)
    await configured.scorer.close()


@pytest.mark.parametrize("base", ["", "(Base)"])
def test_a_missing_member_is_named(base: str, tmp_path: Path) -> None:
    for registry, expected in (
        (SCORERS, r"scorer `.*:Mine` must have a method `async def score\(self, item\)`"),
        (LOSSES, r"loss term `.*:Mine` must have a method `def __call__\(self, inputs\)`"),
        (_registry("services.inference.engine:INFERENCE_ENGINES"), "must have an attribute `capabilities`"),
    ):
        head = f"from {registry.base.__module__} import {registry.base.__name__} as Base\n"
        with pytest.raises(ConfigError, match=expected):
            registry.make(_written(tmp_path, f"{head}class Mine{base}: ..."))
    head = "from rollmesh.services.learner.engine import TrainerEngine as Base\n"
    name = _written(tmp_path, f"{head}class Mine{base}: ...")
    with pytest.raises(ConfigError, match=r"trainer `.*` must have a class method `open\(config, options\)`"):
        find_engine(Extension(name))


def test_a_wrapper_with_the_base_reads_required_members_from_another_object(tmp_path: Path) -> None:
    text = """
from rollmesh.services.reward.scorer import Scorer
class Mine(Scorer):
    def __init__(self): self.inner = Inner()
    def __getattr__(self, name): return getattr(self.inner, name)
class Inner:
    async def score(self, item): return 1.0
"""
    assert build_scorer(ScorerConfig(name=_written(tmp_path, text)), None).reward_names == ("Mine",)


def test_each_class_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    name = _written(tmp_path, "class Mine:\n    column = ()\n    async def score(self, item): return 1.0\n")
    for _ in range(3):
        SCORERS.make(name)
    assert len(caplog.records) == 2


def test_optional_members_are_read_directly() -> None:
    """No `getattr`, `hasattr`, `vars` or runtime protocol asks whether an extension has a member."""
    of_kinds = [members(_registry(name).base) for name in NAMES]
    optional = {key for found in of_kinds for key, value in found.items() if not isinstance(value, Requirement)}
    found = []
    for path in [file for portion in ("services", "trainer", "app") for file in (ROOT / portion).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name(id="getattr" | "hasattr" as asks), args=[_, ast.Constant(value=key), *_]):
                    found += [f"{path.name}:{node.lineno} {asks} {key}"] if key in optional else []
                case ast.Call(func=ast.Name(id="vars")) if path.name != "sharding.py":  # of modules of torch
                    found.append(f"{path.name}:{node.lineno} vars")
                case ast.Name(id="runtime_checkable"):
                    found.append(f"{path.name}:{node.lineno} runtime_checkable")
    assert found == []
