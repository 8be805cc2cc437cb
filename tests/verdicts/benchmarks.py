"""Hidden tests in the forms of public benchmarks, for right and wrong solutions; plain Python gives the reference.

humaneval  check(candidate), called with the function
mbpp       `from solution import *` and asserts at module level
lcb        programs that read and print, and methods of `Solution` without imports
unittest   unittest cases, and test functions and classes as for pytest
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .problems import PROBLEMS, Problem
from .stories import STORIES

STYLES = ("humaneval", "mbpp", "lcb", "unittest")
_TYPING = "from typing import *\nimport collections, functools, itertools, math\n"


@dataclass(frozen=True, slots=True)
class Form:
    """A candidate and its hidden tests; `right` says whether a person accepts it."""

    name: str
    style: str
    source: str
    manifest: dict[str, Any]
    right: bool
    plain: str
    """Program that runs the same tests beside `solution.py` in plain Python, and passes with status 0."""


def forms() -> tuple[Form, ...]:
    """Return the corpus."""
    return (*_of_problems(), *_of_stories())


def _of_problems() -> Iterator[Form]:
    for index, problem in enumerate(PROBLEMS):
        for right, sources in ((True, problem.right), (False, problem.wrong)):
            for number, source in enumerate(sources):
                turn = index + number
                for style, (solution, manifest, plain) in _written(problem, source, turn).items():
                    name = f"{problem.name}, {'right' if right else 'wrong'} {number + 1}, {style}"
                    yield Form(name, style, solution, manifest, right, plain)


def _of_stories() -> Iterator[Form]:
    for story in STORIES:
        for right, sources in ((True, story.right), (False, story.wrong)):
            for number, source in enumerate(sources):
                name = f"{story.name}, {'right' if right else 'wrong'} {number + 1}, {story.style}"
                yield Form(
                    name, story.style, source, {"kind": "unit", "source": story.hidden}, right, _run_unit(story.hidden)
                )


def _written(problem: Problem, source: str, turn: int) -> dict[str, tuple[str, dict[str, Any], str]]:
    """Return the solution, the manifest and the plain program in each style."""
    asserts = [f"assert f(*{arguments!r}) == {expected!r}" for arguments, expected in problem.calls]
    check = "def check(candidate):\n" + textwrap.indent("\n".join(asserts).replace("f(*", "candidate(*"), "    ")
    humaneval = f"from solution import f\nMETADATA = {{'author': 'x'}}\n\n{check}\n\ncheck(f)\n"
    if turn % 2:
        humaneval = f"import solution\n\n{check}\n\ndef test_check():\n    check(solution.f)\n"
    mbpp = "from solution import *\n" + "\n".join(asserts)
    if turn % 2:
        mbpp = "import math\nfrom solution import *\n\ndef test_all():\n" + textwrap.indent("\n".join(asserts), "    ")
    written = {
        style: (source, {"kind": "unit", "source": hidden}, _run_unit(hidden))
        for style, hidden in (("humaneval", humaneval), ("mbpp", mbpp), ("unittest", _cases(problem, turn)))
    }
    return {**written, "lcb": _method(problem, source) if turn % 2 else _program(problem, source, turn)}


def _cases(problem: Problem, turn: int) -> str:
    """Write the calls as a unittest case, a class with setup, or functions."""
    if turn % 3 == 0:
        lines = [
            f"        with self.subTest({n}): self.assertEqual(self.f(*{a!r}), {e!r})"
            for n, (a, e) in enumerate(problem.calls)
        ]
        return "\n".join(
            [
                "import unittest",
                "import solution",
                "class TestF(unittest.TestCase):",
                "    def setUp(self): self.f = solution.f",
                "    def test_f(self):",
                *lines,
            ]
        )
    lines = [
        f"    got = f(*{a!r})\n    assert got == {e!r}, got\n    assert type(got) is type({e!r})"
        if not isinstance(e, dict)
        else f"    assert dict(f(*{a!r})) == {e!r}"
        for a, e in problem.calls
    ]
    if turn % 3 == 1:
        return "\n".join(["from solution import f", "def test_f():", *lines])
    return "\n".join(
        [
            "from solution import f",
            "class TestF:",
            "    def setup_method(self): self.calls = 0",
            "    def test_f(self):",
            textwrap.indent("\n".join(lines), "    "),
        ]
    )


def _method(problem: Problem, source: str) -> tuple[str, dict[str, Any], str]:
    """Write the solution as a method with annotations whose names it does not import."""
    arity = len(problem.calls[0][0])
    names = ", ".join(f"a{n}" for n in range(arity))
    annotated = ", ".join(f"a{n}: Optional[List[Any]]" for n in range(arity))
    solution = f"{source}\nclass Solution:\n    def solve(self, {annotated}) -> Any:\n        return f({names})\n"
    tests = [{"arguments": arguments, "expected": expected} for arguments, expected in problem.calls]
    manifest = {"kind": "function", "function": "Solution.solve", "prelude": _TYPING, "tests": tests}
    plain = (
        f"import json\ncode = {_TYPING!r} + open('solution.py').read()\nspace = {{'__name__': 'solution'}}\nexec(code, space)\n"
        f"for test in json.loads({json.dumps(tests)!r}):\n"
        "    got = json.loads(json.dumps(space['Solution']().solve(*test['arguments'])))\n"
        "    assert got == test['expected'] and isinstance(got, bool) == isinstance(test['expected'], bool)"
    )
    return solution, manifest, plain


_READERS = (
    "import sys, json\nargs = json.loads(sys.stdin.read())",
    "import json\nargs = json.loads(input())",
    "import json\nargs = json.load(open(0))",
    "import sys, json\nargs = [json.loads(line) for line in sys.stdin][0]",
    "import sys, json\ninput = sys.stdin.readline\nargs = json.loads(input().strip())",
    "import sys, json\nargs = json.loads(sys.stdin.buffer.read().decode())",
)
_WRITERS = (
    "print(json.dumps(f(*args)))",
    "import sys\nsys.stdout.write(json.dumps(f(*args)))",
    "def main():\n    print(json.dumps(f(*args)), flush=True)\nif __name__ == '__main__':\n    main()",
    "import sys\nprint(json.dumps(f(*args)) + ' ', file=sys.stdout)\nsys.exit(0)",
    "import sys, threading\nsys.setrecursionlimit(10 ** 5)\nt = threading.Thread(target=lambda: print(json.dumps(f(*args))))\nt.start()\nt.join()",
)


def _program(problem: Problem, source: str, turn: int) -> tuple[str, dict[str, Any], str]:
    """Write the solution as a program, with one of the usual ways to read and print."""
    solution = f"{_READERS[turn // 2 % len(_READERS)]}\n{source}\n{_WRITERS[turn // 2 % len(_WRITERS)]}\n"
    tests = [{"stdin": f"{json.dumps(a)}\n", "stdout": f"{json.dumps(e)}\n"} for a, e in problem.calls]
    plain = (
        f"import subprocess, sys\nfor test in {tests!r}:\n"
        "    done = subprocess.run([sys.executable, 'solution.py'], input=test['stdin'], capture_output=True, text=True)\n"
        "    assert done.returncode == 0 and done.stdout.split() == test['stdout'].split()"
    )
    return solution, {"kind": "stdio", "tests": tests}, plain


def _run_unit(hidden: str) -> str:
    """Return a program that runs hidden tests as their frameworks do."""
    return hidden + textwrap.dedent("""

        import unittest as _unittest
        for _name, _found in list(globals().items()):
            if isinstance(_found, type) and issubclass(_found, _unittest.TestCase):
                _result = _unittest.TestResult()
                _unittest.defaultTestLoader.loadTestsFromTestCase(_found).run(_result)
                assert _result.wasSuccessful() and _result.testsRun, _result
            elif isinstance(_found, type) and _name.startswith("Test"):
                for _method in [_each for _each in dir(_found) if _each.startswith("test")]:
                    _instance = _found()
                    getattr(_instance, "setup_method", lambda: None)()
                    getattr(_instance, _method)()
            elif callable(_found) and _name.startswith("test"):
                _found()
        """)
