"""The commands in the code blocks of README.md, ARCHITECTURE.md, benchmarks/README.md and docs/.

A block of the language `sh` is executed by the suite newcomer. A mark after the language says that it is only parsed,
and why:

    sh         executed in the folder of tests/newcomer/test_documentation.py
    sh mesh    needs a running mesh, or one with a symptom
    sh gpu     needs a GPU
    sh cluster needs a cluster or several hosts
    sh long    takes minutes, changes the host, or needs files that the reader has; other tests execute what it does
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
MARKS = {"mesh", "gpu", "cluster", "long"}
SHELLS = {"sh", "bash", "shell", "console"}
_BLOCK = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`((?:rollmesh|make) [^`]+)`")
_COMMAND = re.compile(r"^\s*(?:\.venv/bin/)?(?:rollmesh [a-z]|make [a-z]|pip install|torchrun ).*", re.MULTILINE)
_BREAKS = {"|", "||", "&&", "&", ";"}
_BEFORE = re.compile(r"\w+=\S*|exec|nohup|time|\\")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of shell commands."""

    page: Path
    line: int
    marks: frozenset[str]
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether its commands are executed."""
        return not self.marks

    def commands(self) -> Iterator[list[str]]:
        """Yield the words of each command, without comments and assignments before it."""
        for line in self.text.replace("\\\n", " ").splitlines():
            yield from split(line)


def blocks(page: Path) -> list[Block]:
    """Return the blocks of shell commands of a page."""
    text, found = page.read_text(), []
    for match in _BLOCK.finditer(text):
        language, *marks = match.group(2).split() or [""]
        if language in SHELLS:
            line = text[: match.start()].count("\n") + 1
            indent = len(match.group(1))
            body = "\n".join(one[indent:] for one in match.group(3).splitlines())
            found.append(Block(page, line, frozenset(marks), body))
    return found


def split(line: str) -> Iterator[list[str]]:
    """Yield the commands of a line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    try:
        found = list(lexer)
    except ValueError:  # a string over several lines
        return
    words: list[str] = []
    for word in [*found, ";"]:
        if word in _BREAKS:
            if words:
                yield words
            words = []
        elif words or not _BEFORE.fullmatch(word):
            words.append(word)


def inline(page: Path) -> list[str]:
    """Return the commands of rollmesh and make in the text of a page, without those in code blocks."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return [" ".join(command.split()) for command in _INLINE.findall(text)]


def unmarked_commands(page: Path) -> list[str]:
    """Return commands in blocks without a language, and in indented blocks."""
    text = page.read_text()
    found = [
        line
        for block in _BLOCK.finditer(text)
        if not block.group(2).strip()
        for line in _COMMAND.findall(block.group(3))
    ]
    return found + re.findall(r"^    (?:rollmesh|make) [a-z]+ .*$", _BLOCK.sub("", text), re.MULTILINE)
