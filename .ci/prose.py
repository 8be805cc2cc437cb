"""Report expressions and identifiers that do not belong in plain technical English, and Markdown lines that are too
long.

    python .ci/prose.py [PATH...]      # default: every tracked .py, .md, .proto and .yaml file
    python .ci/prose.py --count        # only the number of lines per rule
    python .ci/prose.py --sentences    # also sentences of more than 40 words in Markdown

Each finding is `FILE:LINE: EXPRESSION -> WORDS TO USE`. The exit code is 1 if there is a finding.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

COLUMNS_MAX = 140
WORDS_MAX = 40
RULES = (
    (r"\b(is|are|was|were|be|been|gets?) told\b(?! apart)", "is notified, reported, logged"),
    (r"(?<![Tt]here )\b(is|are|was|were|be) (no|none)\b(?! (longer|more)\b)", "is not a, does not exist"),
    (r"\bof (its|their|one's|his|your|our) own\b", "its own, separate, custom"),
    (r"(?i)\b(nobody|somebody|whoever)\b", "no client, another process, the caller"),
    (r"\bin good order\b", "cleanly"),
    (r"\bfor people\b", "informational"),
    (r"\bin the making\b", "being created"),
    (r"\bput up with\b", "allow"),
    (r"\bin vain\b", "without effect"),
    (r"\blast words\b", "last log lines"),
    (r"\bat the latest\b", "no later than"),
    (r"\bfor (good|ever)\b", "permanently"),
    (r"\b(mends?|mended)\b", "fix"),
    (r"\b(anew|once more)\b", "again"),
    (r"\bgiven up\b", "dropped, cancelled, removed"),
    (r"\bsees? to (it|that)\b", "ensures that"),
    (r"\brather \w+ than \w+", "X, not Y"),
    (r"\b(pass(es|ed)?) (it|them) by\b", "skips, ignores"),
    (r"\bst(an|oo)ds? still\b", "is stalled, is stopped"),
    (r"\bgo(es)? on (with|after|from|at|by|again)\b", "resumes, continues"),
    (r'"""(Of|Who|Whom|Whose|Those|Whoever)\b', "start with a noun phrase, a sentence or an imperative"),
    (r"^[ \t]*// [A-Z][a-z]+\.$", "meaning, unit, writer, absence"),
    (
        r"\b(behaviour|colour|favour|neighbour|judgement|catalogue|centre|learnt|spelt)\w*",
        "American spelling: behavior, color, favor, neighbor, judgment, catalog, center, learned, spelled",
    ),
    (
        r"\b(final|initial|normal|optim|serial|recogn|summar|token|random|synchron)is(e|es|ed|er|ers|ing|ation)\b",
        "American spelling: -ize",
    ),
    (r"must be (positive|at least|above)|must not be negative", "must be >= N, must be > N, must be in [A, B]"),
)
IDENTIFIERS = {
    "told": "reported, logged",
    "heard": "received",
    "hopeless": "fatal",
    "bury": "dead_letter",
    "buried": "dead_lettered",
    "obey": "execute",
    "deaths": "crashes",
    "unanswered": "timed_out",
    "nobody": "no_process",
    "somebody": "another_process",
    "whoever": "any_caller",
    "anew": "again",
    "behaviour": "behavior",
    "colour": "color",
    "favour": "favor",
    "neighbour": "neighbor",
    "judgement": "judgment",
    "catalogue": "catalog",
    "centre": "center",
    "learnt": "learned",
    "spelt": "spelled",
}
"""Words of identifiers that are defined in a Python file, and the words to use."""
ALLOWED: tuple[tuple[str, str, str], ...] = (
    (r"\.ci/prose\.py", r".", "the rules themselves"),
    (r"sandbox_runtime/.*/(mounts|contain|probe)\.py", r"nobody:x:65534|NOBODY", "the Unix user"),
    (r"tests/.*\.py", r"""["']nobody["']""", "the Unix user, or a name that does not exist"),
)
"""Exceptions: (expression for the file, expression for the line, reason)."""


_PATTERNS = [(re.compile(rule, re.MULTILINE), words) for rule, words in RULES]
_ALLOWED = [(re.compile(file), re.compile(line)) for file, line, _ in ALLOWED]
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")


def tracked_files(paths: list[str]) -> list[str]:
    found = subprocess.run(["git", "ls-files", "-z", "--", *paths], capture_output=True, text=True, check=True).stdout
    files = (name for name in found.split("\0") if name.endswith((".py", ".md", ".proto", ".yaml")))
    return [name for name in files if "_pb2" not in name and Path(name).is_file() and not Path(name).is_symlink()]


def is_doc(name: str) -> bool:
    return name.endswith(".md")


def is_allowed(name: str, line: str) -> bool:
    return any(file.fullmatch(name) and text.search(line) for file, text in _ALLOWED)


def identifiers(text: str) -> Iterator[tuple[int, str]]:
    """(line number, name) of every name that a Python file defines."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield node.lineno, name


def findings(name: str) -> Iterator[tuple[int, str, str]]:
    """(line number, expression, words to use)."""
    text = Path(name).read_text(encoding="utf-8")
    lines = text.split("\n")
    for number, identifier in identifiers(text) if name.endswith(".py") else ():
        for word in _WORD.findall(identifier):
            if word.lower() in IDENTIFIERS and not is_allowed(name, lines[number - 1]):
                yield number, identifier, IDENTIFIERS[word.lower()]
    for pattern, words in _PATTERNS:
        for match in pattern.finditer(text):
            number = text.count("\n", 0, match.start()) + 1
            if not is_allowed(name, lines[number - 1]):
                yield number, match[0].strip(), words
    for number, line in enumerate(lines if is_doc(name) else (), start=1):
        can_wrap = not line.startswith("|") and " " in line.strip()  # unlike a row of a table, or one long name
        if len(line) > COLUMNS_MAX and can_wrap and not is_allowed(name, line):
            yield number, f"{len(line)} columns", f"wrap at {COLUMNS_MAX}"


def long_sentences(name: str) -> Iterator[tuple[int, str, str]]:
    """Sentences of prose with more than WORDS_MAX words. Code blocks, tables and headings are skipped."""
    number, fenced, block = 0, False, ""
    begin = 1
    for number, line in enumerate([*Path(name).read_text(encoding="utf-8").splitlines(), ""], start=1):
        fenced ^= line.startswith("```")
        is_text = line.strip() and not fenced and not line.startswith(("|", "#", "```"))
        if not is_text or re.match(r"\s*([-*]|\d+\.) ", line):
            for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`*])", block):
                if len(sentence.split()) > WORDS_MAX:
                    yield begin, f"{len(sentence.split())} words: {' '.join(sentence.split()[:6])} ...", "split it"
            block, begin = "", number
        block += f"{line}\n" if is_text else ""


def main(arguments: list[str]) -> int:
    counts: Counter[str] = Counter()
    for name in tracked_files([word for word in arguments if not word.startswith("--")]):
        found = [*findings(name), *(long_sentences(name) if "--sentences" in arguments and is_doc(name) else ())]
        for number, expression, words in found:
            counts[words] += 1
            if "--count" not in arguments:
                print(f"{name}:{number}: {expression} -> {words}")
    if "--count" in arguments:
        for words, count in counts.most_common():
            print(f"{count:>5}  {words}")
    print(f"{counts.total()} findings", file=sys.stderr)
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
