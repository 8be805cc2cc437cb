"""No regular expression of a service, of the trainer or of the sandbox runtime needs more than linear time on text of
others."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from msgspec import structs

from rollmesh.services.reward.scorers.extract import ANSWER_TAG

from .backtracking import weakness

ROOT = Path(__file__).parent.parent
FOLDERS = ("services/rollmesh", "app/rollmesh", "shared/rollmesh", "sandbox_runtime/rollmesh", "trainer/rollmesh")
TOOLS = ("app/rollmesh/testing/", "app/rollmesh/app/", "app/rollmesh/cli/")
"""Programs that read text of the operator only."""
WHOLE = {"fullmatch", "match"}
SEARCHES = {"search", "findall", "finditer", "sub", "subn", "split"}

OPERATOR = "text of the operator's configuration"
LIMITED: dict[tuple[str, str], str] = {
    ("services/rollmesh/services/inference/engines/attached/vllm_server.py", r"^vllm:kv_cache_usage_perc\{[^}]*\} (\S+)$"):
        "vLLM writes the text, which has each metric once",
    ("services/rollmesh/services/reward/math_text.py", r"(?<![\d.])\d{1,3}(?: \d{3})+(?![\d.])"):
        "two groups always match without the last one, and one group has at most six digits",
    ("services/rollmesh/services/reward/scorers/extract.py", r"<answer>(.*?)</answer>"):
        "the text ends with the last end tag, so that each start finds an end",
    ("services/rollmesh/services/reward/scorers/tests.py", r"```[\w+-]*[ \t]*\n(.*?)```"):
        "each start but the last one finds the next one as its end",
    ("shared/rollmesh/shared/config/loader.py", r"^`?(?P<name>\w+)(?P<below>[^\s`]*)`? (?P<what>.*)$"): OPERATOR,
    ("shared/rollmesh/shared/config/loader.py", r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"): OPERATOR,
    ("shared/rollmesh/shared/config/loader.py", r"\.([^.\[]+)|\[([^\]]*)\]"): OPERATOR,
    ("shared/rollmesh/shared/config/extras.py", r"""([\w.-]+).*;.*\bextra == ['"](\w+)['"]"""): "metadata of the package",
    ("sandbox_runtime/rollmesh/sandbox_runtime/languages/terminal.py", r"(\d+)m([\d.,]+)s"): "a mark has at most 200 bytes",
    ("trainer/rollmesh/trainer/estimators/dsdr.py", r"(?<![\w.])[\w.]+(?:\s?[-+*/^=<>]\s?\(*[\w.]+\)*)+"):
        "a start with one operator always matches, and a word has one start",
    ("services/rollmesh/services/data/checkable.py", r"[A-Za-z]{3}|[A-Z][A-Za-z]|[A-Za-z][A-Z]|[A-Za-z](?:\d|\s*\.)|[+\-*/^_=<>|]\s*[*/^_=<>]|[+\-*/^_=<>,({\[]\s*$|^\s*[*/^_=<>,)}\]!]|([_^])(?:\w|\{[^{}]*\})\s*\1|[,.]\s*[,.]|[({\[]\s*[)}\]]"):
        "the text has at most 200 characters",
    ("shared/rollmesh/shared/domain/option_order.py", r"^\s*\(?[A-J][).:]\s+(?=\S)"):
        "the text has at most 200 characters",
}  # fmt: skip
"""Patterns that the analysis rejects -> why their work is bounded."""
CONFIGURED = {
    "app/rollmesh/demo/families/maze.py": 2,  # words of moves, and a key of fixed length
    "app/rollmesh/demo/families/sql.py": 3,  # constants in a list, and words in one-line questions of the demo
    "services/rollmesh/services/data/synthesized_source.py": 1,  # of the operator, on data of the operator
    "services/rollmesh/services/data/task_fields.py": 2,  # of the operator, on data of the operator
    "services/rollmesh/services/reward/scorer_run.py": 1,  # an escaped answer
    "services/rollmesh/services/data/trajectory_source.py": 2,  # of the operator, on prompts of the operator's samples
    "services/rollmesh/services/reward/oracles.py": 2,  # of the operator, on data of the operator
    "services/rollmesh/services/reward/regex_worker.py": 1,  # of the operator, in a process with a limit of CPU time
    "services/rollmesh/services/reward/scorers/extract.py": 1,  # of the operator, on at most 16,384 characters
    "services/rollmesh/services/rollout/agents/given.py": 1,  # escaped tags
    "services/rollmesh/services/rollout/agents/tree_rollouts.py": 3,  # of the operator, on results of tools
    "services/rollmesh/services/rollout/conversation.py": 1,  # escaped tags
    "services/rollmesh/services/rollout/tokenizer.py": 1,  # escaped tags
    "shared/rollmesh/shared/bus/run_streams.py": 1,  # names of streams
    "shared/rollmesh/shared/config/settings.py": 1,  # of settings, on values of the operator
}
"""File -> number of its patterns that are not constants."""


@dataclass(frozen=True)
class Use:
    path: str
    pattern: str | None
    """None if it is not a constant."""
    flags: int
    search: bool


def uses(path: Path) -> Iterator[Use]:
    """Yield the regular expressions of a file and whether any use of them may match at every position."""
    source = path.read_text()
    if "\nimport re\n" not in source:
        return
    tree = ast.parse(source)
    name = str(path.relative_to(ROOT))
    constants: dict[str, str] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and (text := resolved(statement.value, constants)) is not None:
            constants[ast.unparse(statement.targets[0])] = text
    methods: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in WHOLE | SEARCHES | {"pattern"}:
            owner = ast.unparse(node.value).rpartition(".")[2]
            methods.setdefault(owner, set()).add(node.attr)
    assigned = {
        node.value: ast.unparse(node.targets[0]).rpartition(".")[2]
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
    }
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if ast.unparse(node.func.value) != "re" or node.func.attr not in {"compile", *WHOLE, *SEARCHES}:
            continue
        how = methods.get(assigned.get(node, ""), set()) if node.func.attr == "compile" else {node.func.attr}
        flags = re.NOFLAG
        for part in [*node.args, *(keyword.value for keyword in node.keywords)]:
            for flag in re.findall(r"\bre\.([A-Z]+)", ast.unparse(part)):
                flags |= re.RegexFlag[flag]
        yield Use(name, resolved(node.args[0], constants), flags, search=not how or not how <= WHOLE)


def resolved(node: ast.expr, constants: dict[str, str]) -> str | None:
    """Return the text of an expression that is constant but for escaped literals, or None."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Constant(value=bytes(data)):
            return data.decode("latin-1")
        case ast.Name(id=name):
            return constants.get(name)
        case ast.Attribute(value=ast.Name(id=name), attr="pattern"):
            return constants.get(name)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr="compile"), args=[pattern, *_]):
            return resolved(pattern, constants)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr="escape")):
            return "literal"
        case ast.JoinedStr(values=values):
            parts = [
                resolved(part.value if isinstance(part, ast.FormattedValue) else part, constants) for part in values
            ]
            return None if None in parts else "".join(part or "" for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            both = resolved(left, constants), resolved(right, constants)
            return None if both[0] is None or both[1] is None else both[0] + both[1]
    return None


def defaults() -> Iterator[Use]:
    """Yield the default patterns of the built-in scorers, which search the text of the model."""
    for name in ("exact", "math", "tests", "format", "turn_success", "squad", "choice", "regex", "ngram"):
        module = importlib.import_module(f"rollmesh.services.reward.scorers.{name}")
        (options,) = [
            value
            for key, value in vars(module).items()
            if key.endswith("Options") and key not in ("AnswerOptions", "ComparedOptions")
        ]
        pattern = next(value for key, value in structs.asdict(options()).items() if key.endswith("pattern"))
        source = "extract" if pattern == ANSWER_TAG else name
        yield Use(f"services/rollmesh/services/reward/scorers/{source}.py", pattern, re.DOTALL, search=name != "format")


@cache
def all_uses() -> list[Use]:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    sources = [path for path in files if not str(path.relative_to(ROOT)).startswith(TOOLS)]
    return [*(use for path in sources for use in uses(path)), *defaults()]


def test_patterns_need_linear_time() -> None:
    found = {
        (use.path, use.pattern): why
        for use in all_uses()
        if use.pattern is not None and (why := weakness(use.pattern, use.flags, search=use.search))
    }
    assert {key: why for key, why in found.items() if key not in LIMITED} == {}
    assert {key for key in LIMITED if key not in found} == set(), "patterns that LIMITED need not list"


def test_patterns_that_are_not_constants_are_known() -> None:
    counts: dict[str, int] = {}
    for use in all_uses():
        if use.pattern is None:
            counts[use.path] = counts.get(use.path, 0) + 1
    assert counts == CONFIGURED


@pytest.mark.parametrize(
    ("pattern", "search", "why"),
    [
        (r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", False, "quadratic"),
        (r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?", False, ""),
        (r"(a+)+b", False, "exponential"),
        (r"(a|a)*b", False, "exponential"),
        (r"(a*)*b", False, "exponential"),
        (r"(a|ab)(c|bcd)*x*x*d", False, "quadratic"),
        (r"\d+x", True, "quadratic"),
        (r"\d+x", False, ""),
        (r"\d+", True, ""),
        (r"(?<!\d)\d+x", True, ""),
        (r"(?<!\d)(?:\d+ )+x", True, "quadratic"),
        (r"(?<![\w.])[\w.]+(?:[+-][\w.]+)+=", True, "quadratic"),
        (r"<answer>(.*?)</answer>", True, "quadratic"),
        (r".{0,100}x", True, "quadratic"),
        (r".{0,20}x", True, ""),
        (r"(?:[^']|'')*'", False, ""),
    ],
)
def test_the_analysis_finds_patterns_that_backtrack(pattern: str, search: bool, why: str) -> None:
    assert weakness(pattern, re.DOTALL, search=search).partition(" ")[0] == why
