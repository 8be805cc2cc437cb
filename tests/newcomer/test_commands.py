"""Every command in the documentation exists: its options, its settings, the targets of make, and the files that it
names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from rollmesh.app.config import TrainConfig
from rollmesh.cli.__main__ import app
from rollmesh.sft.config import SftConfig
from rollmesh.shared.config.loader import config_from_dict

from ..suites import SUITES
from .commands import MARKS, PAGES, ROOT, Block, blocks, inline, split, unmarked_commands

GENERATED = {"cli.md", "configuration.md"}
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
GROUP: Any = typer.main.get_command(app)
ALL = [block for page in PAGES for block in blocks(page)]
SETTING = re.compile(r"[a-z]\w*(\.\w+)+=\S+|[a-z]\w*\.[A-Z]+=\S+")


def check(words: list[str], folder: Path = ROOT) -> None:
    """Raise if the command does not exist. `folder` is the working directory."""
    program, *arguments = words
    program = Path(program).name
    if program == "rollmesh":
        _check_rollmesh(arguments, folder)
    elif program == "make":
        unknown = [one for one in arguments if "=" not in one and not one.startswith("-") and one not in TARGETS]
        assert not unknown, f"make has no target {unknown[0]}"
        suites = [one.removeprefix("NAME=") for one in arguments if one.startswith("NAME=")]
        assert set(suites) <= {*SUITES, "..."}, f"there is no suite {suites[0]}"
    elif program in ("python", "python3") and arguments and arguments[0].endswith(".py"):
        assert (folder / arguments[0]).is_file(), f"{arguments[0]} is not a file of {folder}"


def _check_rollmesh(arguments: list[str], folder: Path) -> None:
    command, context, rest = GROUP, GROUP.context_class(GROUP, info_name="rollmesh"), arguments
    if arguments[:1] == ["--help"]:
        return
    while hasattr(command, "commands"):
        assert rest, f"{context.command_path} needs a command"
        assert rest[0] in command.commands, f"{context.command_path} has no command {rest[0]!r}"
        name, rest = rest[0], rest[1:]
        command = command.commands[name]
        context = command.context_class(command, info_name=name, parent=context)
        if hasattr(command, "commands") and not rest:
            return
    given = command.make_context(context.info_name, [_number(one) for one in rest], parent=context.parent).params
    overrides = [one for one in rest if SETTING.fullmatch(one)]
    type_ = SftConfig if context.info_name == "sft" else TrainConfig
    if overrides:
        _check_settings(type_, given.get("config"), overrides, folder)


def _number(word: str) -> str:
    """Replace N and ID, which stand for numbers."""
    return re.sub(r"(?<![A-Za-z_<])(?:N|ID)(?![A-Za-z_>])", "1", word)


def _check_settings(type_: type, config: object, overrides: list[str], folder: Path) -> None:
    """Raise ConfigError if the settings cannot be made, on top of the configuration file if it is in the repository."""
    named = folder / str(config or "")
    base = yaml.safe_load(named.read_text()) if named.is_file() else {}
    config_from_dict(type_, base, [_number(one) for one in overrides])


@pytest.mark.parametrize("block", ALL, ids=str)
def test_commands_of_a_block_exist(block: Block) -> None:
    assert block.marks <= MARKS, f"{block}: the marks are {sorted(MARKS)}"
    folder = ROOT
    for words in block.commands():
        if words[0] == "cd":
            folder = ROOT / words[1]
        else:
            check(words, folder)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in GENERATED], ids=lambda page: page.name)
def test_commands_in_the_text_exist(page: Path) -> None:
    for command in inline(page):
        for words in split(command):
            try:
                check([word for word in words if word not in ("...", "…")])
            except typer.Exit:
                pass
            except Exception as err:
                if "Missing" in str(err) or "requires an argument" in str(err):  # named without its arguments
                    continue
                raise AssertionError(f"`{command}`: {err}") from err


def test_every_block_with_commands_is_marked_as_shell() -> None:
    """So that a command cannot escape the checks."""
    unmarked = [
        f"{page.name}: {line}" for page in PAGES if page.name not in GENERATED for line in unmarked_commands(page)
    ]
    assert unmarked == []


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        ("rollmesh trian mine.yaml", "has no command 'trian'"),
        ("rollmesh status runs/mine --wach", "No such option"),
        ("rollmesh train mine.yaml run.max_stalness=1", "max_stal"),
        ("rollmesh train mine.yaml run.max_staleness=-1", "max_staleness"),
        ("make tset", "has no target tset"),
        ("make suite NAME=choas", "no suite choas"),
        ("python examples/missing.py", "is not a file"),
    ],
)
def test_a_wrong_command_is_found(command: str, cause: str) -> None:
    (words,) = split(command)
    with pytest.raises(Exception, match=cause):
        check(words)
