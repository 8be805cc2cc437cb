"""The loader names the key, the place and the remedy, whatever is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from rollmesh.shared.config.config_schema import json_schema
from rollmesh.shared.config.loader import config_from_dict, load_config, to_yaml
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.config.settings import PositiveInt, Settings
from rollmesh.shared.errors import ConfigError


class Optimizer(Settings):
    lr: float = 1e-3
    """Learning rate."""
    betas: list[float] = msgspec.field(default_factory=lambda: [0.9, 0.95])


class Local(Settings, tag_field="kind", tag="local"):
    threads: int = 1


class Remote(Settings, tag_field="kind", tag="remote"):
    url: str


class Rollout(Settings):
    removed = {"batch": "turns are not batched"}
    listed = {"stop": "stops"}
    stops: tuple[str, ...] = ("end",)
    turns_max: PositiveInt = 4
    """Turns of one episode."""
    optimizer: Optimizer = Optimizer()
    engines: dict[str, Local | Remote] = {}


class Config(Settings):
    rollout: Rollout = Rollout()
    seed: int = 0
    name: str | None = None


class Layered(Settings):
    listed = {"stop": "stops", "part": "parts"}
    parts: tuple[Extension, ...] = (Extension("plain"),)
    kind: str = ""
    stops: tuple[str, ...] = ()
    size: int = 0

    @staticmethod
    def underlay(tree: dict[str, Any], base_dir: Path | None) -> Path | None:
        return (base_dir or Path()) / f"{tree['kind']}.yaml"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    return path


def error_of(path: Path | None, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(Config, path, overrides)
    return caught.value


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "seed: 3\nrollout:\n  turns_max: 7\n")
    config = load_config(Config, path, ["rollout.turns_max=9", "rollout.optimizer.lr=3e-4"])
    assert (config.seed, config.rollout.turns_max, config.rollout.optimizer.lr) == (3, 9, 3e-4)
    assert config.rollout.optimizer.betas == [0.9, 0.95]


def test_an_override_can_index_a_list(tmp_path: Path) -> None:
    path = write(tmp_path, "rollout: {optimizer: {betas: [0.5, 0.6]}}")
    assert load_config(Config, path, ["rollout.optimizer.betas.1=0.99"]).rollout.optimizer.betas == [0.5, 0.99]
    assert "a list of 2 items" in str(error_of(path, "rollout.optimizer.betas.2=0.99"))


def test_exponents_without_a_dot_are_numbers(tmp_path: Path) -> None:
    assert load_config(Config, write(tmp_path, "rollout: {optimizer: {lr: 1e-4}}")).rollout.optimizer.lr == 1e-4


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    assert load_config(Config, write(tmp_path, "# nothing\n")) == Config()


def test_an_unknown_key_is_named_with_its_line_and_the_nearest_known_one(tmp_path: Path) -> None:
    err = error_of(write(tmp_path, "seed: 1\nrollout:\n  turn_max: 3\n"))
    assert str(err) == f"{tmp_path}/x.yaml:3: `rollout.turn_max`: unknown key; did you mean `turns_max`?"
    assert err.violations[0].field == "rollout.turn_max"


def test_an_unknown_key_without_a_neighbor_lists_the_known_ones(tmp_path: Path) -> None:
    assert "known keys: rollout, seed, name" in str(error_of(write(tmp_path, "zzzzz: 1\n")))


def test_a_setting_of_the_release_before_has_no_effect_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, "rollout:\n  turns_max: 3\n  batch: 9\n")
    assert load_config(Config, path) == Config(rollout=Rollout(turns_max=3))
    what = "`rollout.batch`: no effect, because turns are not batched; delete the key"
    assert [record.message for record in caplog.records] == [f"{path}:3: {what}"]
    assert "`rollout.batches`: unknown key" in str(error_of(path, "rollout.batches=1"))


def test_a_setting_of_the_release_before_that_is_now_a_list_is_read_and_says_what_to_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, "rollout:\n  turns_max: 3\n  stop: now\n")
    assert load_config(Config, path) == Config(rollout=Rollout(turns_max=3, stops=("now",)))
    what = "`rollout.stop` is now the list `stops`: write `stops: [...]`"
    assert load_config(Config, path, ["rollout.stop=later"]).rollout.stops == ("later",)
    override = "override `rollout.stop=later`"
    assert [record.message for record in caplog.records] == [f"{path}:3: {what}", f"{override}: {what}"]
    assert "`rollout.stop`: unknown key; did you mean `stops`?" in str(error_of(path, "rollout.stops=[b]"))


def test_a_list_above_another_file_replaces_that_of_the_file(tmp_path: Path) -> None:
    """The value of the release before is above the list of a recipe, as its list would be."""
    path = write(tmp_path, "kind: below\nstop: now\n")
    (tmp_path / "below.yaml").write_text("stops: [from, below]\nsize: 3\n")
    assert load_config(Layered, path) == Layered(kind="below", stops=("now",), size=3)
    (tmp_path / "below.yaml").write_text("stop: old\n")
    assert load_config(Layered, write(tmp_path, "kind: below\n")) == Layered(kind="below", stops=("old",))


@pytest.mark.parametrize(
    ("text", "overrides", "below", "parts"),
    [
        ("part: {options: {a: 1}}", [], "", [("plain", {"a": 1})]),
        ("", ["part.options.a=1"], "", [("plain", {"a": 1})]),
        ("part: other", ["part.options.a=1"], "", [("other", {"a": 1})]),
        ("part: {options: {a: 1}}", [], "parts: [fast]", [("fast", {"a": 1})]),
        ("part: {options: {a: 1}}", ["part.options.b=3"], "parts: [{name: fast, options: {a: 2, c: 4}}]",
         [("fast", {"a": 1, "b": 3, "c": 4})]),
        ("part: {name: other}", [], "parts: [{name: fast, options: {a: 2}}]", [("other", {})]),
        ("", ["part.options.b=3"], "part: {name: fast, options: {a: 2}}", [("fast", {"a": 2, "b": 3})]),
    ],
)  # fmt: skip
def test_some_keys_of_a_setting_that_is_now_a_list_change_its_only_item(
    tmp_path: Path, text: str, overrides: list[str], below: str, parts: list[tuple[str, dict[str, int]]]
) -> None:
    (tmp_path / "below.yaml").write_text(below)
    config = load_config(Layered, write(tmp_path, f"kind: below\n{text}\n"), overrides)
    assert [(part.name, part.options) for part in config.parts] == parts


def test_a_wrong_key_of_a_setting_that_is_now_a_list_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "below.yaml").write_text("parts: [one, two]\n")
    for text, overrides, where in (
        ("part:\n  name: x\n  option: {}\n", (), f"{tmp_path}/x.yaml:4"),
        ("part: x\n", ["part.option={}"], "override `part.option={}`"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(Layered, write(tmp_path, f"kind: below\n{text}"), overrides)
        assert str(caught.value).startswith(f"{where}: `parts[0].option`: unknown key; did you mean `options`?")


def test_a_wrong_type_says_what_was_expected_and_found(tmp_path: Path) -> None:
    err = error_of(write(tmp_path, "rollout:\n  turns_max: many\n"))
    assert str(err).startswith(f"{tmp_path}/x.yaml:2: `rollout.turns_max`: Expected `int`, got `str`")
    assert "'many'" in str(err)


def test_a_range_error_names_the_field_it_is_about() -> None:
    err = error_of(None, "rollout.turns_max=0")
    assert str(err) == "override `rollout.turns_max=0`: `rollout.turns_max` must be >= 1, got 0"


def test_keys_inside_a_tagged_union_are_named(tmp_path: Path) -> None:
    err = error_of(write(tmp_path, "rollout:\n  engines:\n    a: {kind: local}\n    b: {kind: local, thread: 2}\n"))
    assert str(err) == f"{tmp_path}/x.yaml:4: `rollout.engines.b.thread`: unknown key; did you mean `threads`?"


def test_a_missing_required_key_is_named(tmp_path: Path) -> None:
    err = error_of(write(tmp_path, "rollout: {engines: {a: {kind: remote}}}"))
    assert "`rollout.engines.a.url`: required, but not given" in str(err)


def test_a_wrong_value_of_a_required_key_is_one_mistake(tmp_path: Path) -> None:
    err = error_of(write(tmp_path, "rollout: {engines: {a: {kind: remote, url: 3}}}"))
    assert "`rollout.engines.a.url`" in str(err)
    assert "required" not in str(err)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1, 2\n", ":2: not valid YAML"),
        ("seed: 1\nseed: 2\n", ":2: not valid YAML: key `seed` is given twice"),
        ("- 1\n- 2\n", "expected a mapping of keys at the top, found a list"),
        ("rollout: 3\n", ":1: `rollout`: Expected `object`, got `int` (found 3)"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in str(error_of(write(tmp_path, text)))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert str(error_of(tmp_path / "no.yaml")).startswith(
        f"{tmp_path}/no.yaml: cannot read the configuration file: No such"
    )


@pytest.mark.parametrize("override", ["seed", "=3", "seed.x=1", "seed=[", "..=1"])
def test_a_malformed_override_is_quoted(tmp_path: Path, override: str) -> None:
    assert f"override `{override}`" in str(error_of(write(tmp_path, "seed: 1"), override))


def test_the_resolved_config_reads_back_equal(tmp_path: Path) -> None:
    config = config_from_dict(
        Config, {"rollout": {"engines": {"a": {"kind": "remote", "url": "http://ü"}}}}, ["name=x"]
    )
    assert load_config(Config, write(tmp_path, to_yaml(config))) == config


def test_the_schema_carries_the_field_docstrings() -> None:
    schema = json_schema(Config)
    assert schema["$ref"] == "#/$defs/Config"
    assert schema["$defs"]["Rollout"]["properties"]["turns_max"]["description"] == "Turns of one episode."
    assert schema["$defs"]["Optimizer"]["additionalProperties"] is False


class Choices(Settings):
    """A choice and a list."""

    beyond: Literal["drop", "mask"] = "drop"
    agents: list[str] = []


def test_a_wrong_choice_names_the_choices_and_text_for_a_list_shows_a_list() -> None:
    with pytest.raises(ConfigError, match=r"`beyond` must be one of drop, mask, got 'x'"):
        config_from_dict(Choices, {"beyond": "x"})
    with pytest.raises(ConfigError, match=r"`agents`: expected a list, for example \[one\], got 'one'"):
        config_from_dict(Choices, {"agents": "one"})
