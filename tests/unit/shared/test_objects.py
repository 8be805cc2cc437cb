"""Users' own classes load by name, or say why they do not."""

from __future__ import annotations

import collections
import importlib.util
from pathlib import Path

import msgspec
import pytest

from rollmesh.shared.config.loader import config_from_dict, load_config
from rollmesh.shared.config.moved import MOVED, moved_hint
from rollmesh.shared.config.objects import load_object
from rollmesh.shared.config.plugin import Plugin
from rollmesh.shared.config.registry import Extension, Registry
from rollmesh.shared.errors import ConfigError


def test_module_and_dotted_names_resolve() -> None:
    assert load_object("collections:OrderedDict") is collections.OrderedDict
    assert load_object("collections.OrderedDict") is collections.OrderedDict
    assert load_object("collections:OrderedDict.fromkeys") == collections.OrderedDict.fromkeys


def test_a_file_is_relative_to_its_config_and_runs_once(tmp_path: Path) -> None:
    (tmp_path / "my_agent.py").write_text("import dataclasses\n@dataclasses.dataclass\nclass Agent:\n    x: int = 1\n")
    agent = load_object("my_agent.py:Agent", tmp_path)
    assert agent().x == 1
    assert load_object(f"{tmp_path}/my_agent.py:Agent") is agent


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nonsense", "expected package.module:Name or file.py:Name"),
        ("agent.py", "expected package.module:Name or file.py:Name"),
        ("no_such_package.x:Y", "there is no module `no_such_package`"),
        ("collections:Nope", "has no `Nope`"),
        ("missing.py:Agent", "there is no file"),
        ("good.py:Agnt", "it defines: Agent"),
        ("bad.py:Agent", "ZeroDivisionError"),
    ],
)
def test_what_does_not_load_says_why(tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / "bad.py").write_text("1 / 0\n")
    (tmp_path / "good.py").write_text("class Agent: ...\n")
    with pytest.raises(ConfigError, match=expected):
        load_object(name, tmp_path)


def test_an_old_path_of_rollmesh_is_an_error_with_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a configuration, in a file that it names, and in a module that it names."""
    old, new = "rollmesh.services.inference.engines.torch_engine", "rollmesh.services.inference.engines.torch.engine"
    for file in ("my_file.py", "my_module.py"):
        (tmp_path / file).write_text(f"from {old} import TorchEngine\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in (f"{old}:TorchEngine", "my_file.py:Engine", "my_module:Engine"):
        with pytest.raises(ConfigError, match=f"{old} is now {new}"):
            load_object(name, tmp_path)
    for file in ("my_file_2.py", "my_module_2.py"):
        (tmp_path / file).write_text("from rollmesh.shared import settings\n")
    for name in ("my_file_2.py:Engine", "my_module_2:Engine"):
        with pytest.raises(ConfigError, match="rollmesh.shared.settings is now rollmesh.shared.config.settings"):
            load_object(name, tmp_path)
    (tmp_path / "other.py").write_text("from rollmesh.shared import something\n")
    with pytest.raises(ConfigError, match="cannot import name 'something' from 'rollmesh.shared'") as caught:
        load_object("other.py:Engine", tmp_path)
    assert "is now" not in str(caught.value)


def test_the_table_of_moved_modules_names_modules_that_exist() -> None:
    assert [new for new in MOVED.values() if importlib.util.find_spec(new) is None] == []
    assert [old for old in MOVED if _exists(old)] == []
    assert moved_hint("rollmesh.shared.config.objects") == moved_hint("") == moved_hint(None) == ""


def test_a_row_of_a_package_is_for_the_modules_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOVED, "rollmesh.old", "rollmesh.new")
    monkeypatch.setitem(MOVED, "rollmesh.old.part", "rollmesh.other")
    assert moved_hint("rollmesh.old.x") == "rollmesh.old.x is now rollmesh.new.x"
    assert moved_hint("rollmesh.old.part.x") == "rollmesh.old.part.x is now rollmesh.other.x"
    assert moved_hint("rollmesh.older") == ""


def test_what_a_users_file_or_constructor_raises_is_reported_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "breaks.py").write_text("def helper():\n    raise KeyError('mine')\nhelper()\n")
    with pytest.raises(ConfigError, match=r"(?s)KeyError: 'mine'.*breaks.py\", line 2, in helper"):
        load_object("breaks.py:Name", tmp_path)
    (tmp_path / "made.py").write_text("class Made:\n    def __init__(self):\n        open('/no/such/file')\n")
    with pytest.raises(ConfigError, match=r"(?s)thing `made.py:Made`: .*FileNotFoundError.*made.py\", line 3"):
        Registry("thing", {}, Plugin).make("made.py:Made", tmp_path)


def test_an_unknown_name_is_an_error_with_the_nearest_known_one() -> None:
    registry = Registry("thing", {"grpo": "a:b", "gdpo": "a:c"}, Plugin)
    expected = r"there is no thing `grop`; known: grpo, gdpo, or your own as file.py:Name; did you mean `grpo`\?"
    with pytest.raises(ConfigError, match=expected):
        registry.find("grop")
    with pytest.raises(ConfigError, match="file.py:Name$"):
        registry.find("entirely-different")


def test_a_bare_string_names_an_extension_and_a_mapping_without_name_keeps_the_default(tmp_path: Path) -> None:
    class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        one: Extension = Extension("first")
        many: tuple[Extension, ...] = ()

    (tmp_path / "c.yaml").write_text("one: other.py:Other\nmany: [a, {name: b, options: {x: 1}}]\n")
    assert load_config(Config, tmp_path / "c.yaml") == Config(
        one=Extension("other.py:Other"), many=(Extension("a"), Extension("b", {"x": 1}))
    )
    changed = load_config(Config, tmp_path / "c.yaml", ["one.options.y=2", "many.0=z"])
    assert changed == Config(one=Extension("other.py:Other", {"y": 2}), many=(Extension("z"), Extension("b", {"x": 1})))
    assert load_config(Config, None, ["one.options.y=2"]).one == Extension("first", {"y": 2})
    with pytest.raises(ConfigError, match=r"`many\[0\].name`: required"):
        config_from_dict(Config, {"many": [{"options": {}}]})
    with pytest.raises(ConfigError, match=r"`one.option`: unknown key; did you mean `options`"):
        config_from_dict(Config, {"one": {"option": {}}})


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    part: Extension


class MadeOptions(msgspec.Struct, frozen=True, kw_only=True):
    parts: tuple[Entry, ...]
    text: str


class Made(Plugin):
    Options = MadeOptions

    def __init__(self, *, options: MadeOptions) -> None:
        self.options = options


def test_files_of_nested_extensions_are_absolute_and_other_texts_stay(tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    mine, file = "mine.py:Mine", f"{tmp_path}/mine.py:Mine"
    texts = ["mine.py", "mine.py:Mine or other", "mine.py::Mine", "other.py:Mine", "calc", 1, None]
    nested = {"many": [mine, {"name": mine, "options": {"x": mine}}], "texts": texts}
    located = {"many": [file, {"name": file, "options": {"x": file}}], "texts": texts}
    assert Extension("other.py:Other", nested).located(tmp_path) == Extension(f"{tmp_path}/other.py:Other", located)
    assert (same := Extension("calc", {"texts": texts})).located(tmp_path) is same
    registry = Registry("thing", {"made": f"{__name__}:Made"}, Plugin)
    options = {"parts": [{"part": {"name": mine, "options": nested}}], "text": mine}
    made = registry.make(Extension("made", options), tmp_path)
    assert made.options == MadeOptions(parts=(Entry(part=Extension(file, located)),), text=mine)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of its package
        return False
