"""Manifests: the hidden tests of one task, as an operator writes them in JSON. docs/sandbox.md has an example of each kind.

A manifest is read strictly: an unknown field, a wrong type or a key given twice is an error that names the place, since a test
that silently isn't run is worse than one that fails.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any, Literal, Protocol

import msgspec

from rollmesh.services.sandbox.oracle.compare import TextCompare, ValueCompare, strict_json
from rollmesh.services.sandbox.oracle.unit_tests import test_names

NUM_TESTS_MAX = 10_000
TEST = "{test}"
"""Stands for a test's name in the command of a repository."""


class ManifestError(ValueError):
    """A manifest that cannot be used: the field (empty if it is the whole) and the cause."""

    def __init__(self, cause: str, field: str = "") -> None:
        super().__init__(f"{field}: {cause}" if field else cause)
        self.cause = cause
        self.field = field


class LimitsPerTest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one test; 0 means the profile's, which are also the most."""

    wall_s: float = 0.0
    """Wall seconds of one question to the candidate, and of its loading; of a unit test, of all its questions together."""
    cpu_s: float = 0.0
    """CPU seconds of the same."""
    memory_bytes: int = 0
    """Bytes of memory of the candidate's session."""
    processes_max: int = 0
    """Processes and threads of the candidate's session."""
    output_bytes: int = 0
    """Bytes of an answer, and of what is printed."""
    disk_bytes: int = 0
    """Bytes of files, the candidate's own included."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"limits.{name} must be finite and >= 0, got {value}")


class Checker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Decides where many answers are right. Runs in a jail of its own, which no candidate's code ever enters."""

    source: str
    """Python with a function `check(given, expected, answer)` that returns whether to accept; or `(accept, message)`."""
    profile: str = "python"
    """Profile of its jail."""
    wall_s: float = 0.0
    """Wall seconds of one check; 0 means the profile's."""


class _Test(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = ""
    """In the verdict; empty means its number, from 1. The caller sees it: let it say nothing of the answer."""
    weight: float = 1.0
    """Its part of the accepted share."""


class StdioTest(_Test, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of the program."""

    stdin: str = ""
    """Standard input."""
    stdout: str
    """Expected standard output."""


class FunctionTest(_Test, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One call of the function."""

    arguments: list[Any] | dict[str, Any]
    """JSON values: a list by position, an object by name."""
    expected: Any
    """JSON value. Tuples arrive as lists, keys of dictionaries as strings."""


class _Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """What all kinds share."""

    profile: str = "python"
    """Profile of the candidate's jail: what it may import."""
    limits: LimitsPerTest = LimitsPerTest()
    """Of each test."""
    isolate: bool = True
    """A fresh session for each test, so that nothing passes from one to the next. False is quicker where loading is slow: what an
    earlier input did to the candidate's state then shows in later tests."""
    stop_at_first_failure: bool = False
    """Leave out the tests behind the first that is not accepted."""
    time_limits_max: int = 3
    """After so many tests out of time the rest count as out of time without being run: they would only cost."""

    def _check(self, tests: tuple[Any, ...]) -> None:
        if not 1 <= len(tests) <= NUM_TESTS_MAX:
            raise ValueError(f"tests must hold 1 to {NUM_TESTS_MAX} tests, got {len(tests)}")
        for number, test in enumerate(tests):
            if not (math.isfinite(test.weight) and test.weight > 0):
                raise ValueError(f"tests[{number}].weight must be finite and > 0, got {test.weight}")
        names = [name_of(test, number) for number, test in enumerate(tests)]
        if twice := [name for name, times in Counter(names).items() if times > 1]:
            raise ValueError(f"tests must have names that differ, got {twice[0]!r} twice")
        if self.time_limits_max < 1:
            raise ValueError(f"time_limits_max must be >= 1, got {self.time_limits_max}")


class StdioManifest(_Manifest, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="stdio"):
    """A program: standard input in, standard output compared."""

    language: Literal["python", "c", "cpp", "javascript"] = "python"
    """Of the candidate's file."""
    entry: str = "solution.py"
    """The candidate's file that is run."""
    tests: tuple[StdioTest, ...]
    """In the order in which they run."""
    compare: TextCompare = "exact"
    """`exact`: the same lines, white space at their ends and empty lines at the end apart; otherwise the same tokens are PE.
    `tokens`: the same words in any white space. `numbers`: the same, numerals within `tolerance`. `checker`. White space is that of ASCII."""
    tolerance: float = 1e-6
    """Of `numbers`: relative, and absolute below 1. Two integers must be equal; 0 compares decimal fractions exactly, too."""
    checker: Checker | None = None
    """Of `checker`; it gets the texts of stdin, expected and given stdout."""

    def __post_init__(self) -> None:
        self._check(self.tests)
        check_comparing(self.compare, self.tolerance, self.checker)


class FunctionManifest(_Manifest, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="function"):
    """A function: JSON arguments in, its JSON result compared."""

    language: Literal["python"] = "python"
    """Of the candidate's file."""
    entry: str = "solution.py"
    """The candidate's file."""
    function: str
    """Name in it; `Class.method` is called on a fresh instance."""
    tests: tuple[FunctionTest, ...]
    """In the order in which they run."""
    compare: ValueCompare = "equal"
    """`equal`: the same JSON value, where 1 equals 1.0 and true is no number. `numbers`: the same, numbers within `tolerance`.
    `checker`."""
    tolerance: float = 1e-6
    """Of `numbers`: relative, and absolute below 1. Two integers must be equal."""
    checker: Checker | None = None
    """Of `checker`; it gets the values of arguments, expected and result."""

    def __post_init__(self) -> None:
        self._check(self.tests)
        check_comparing(self.compare, self.tolerance, self.checker)
        if not all(part.isidentifier() for part in self.function.split(".")):
            raise ValueError(f"function must be a name or dotted names, got {self.function!r}")


class UnitTest(_Test, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One test of the source; its name is `test_x` or `TestX.test_y`."""


class UnitManifest(_Manifest, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="unit"):
    """Test functions and unittest cases that import the candidate's module. They run in a jail of their own, where the module is a
    proxy: arguments and results pass as values, exceptions by the name of their builtin type."""

    entry: str = "solution.py"
    """The candidate's file."""
    module: str = "solution"
    """Name under which the tests import it."""
    source: str
    """The tests: functions `test_x`, classes `TestX` and unittest cases with methods `test_x`."""
    oracle_profile: str = "python"
    """Profile of the tests' jail: what they may import."""
    tests: tuple[UnitTest, ...] = ()
    """Those to run; empty means all in the source."""
    objects: bool = True
    """Whether results may be objects of the candidate's classes. False suits tests of functions: such a result is then WA, and none of its
    methods can answer an assertion (`got.startswith("Paris")`)."""
    questions_max: int = 10_000
    """Uses of the candidate by one test. An item of a generator is one."""

    def __post_init__(self) -> None:
        try:
            known = test_names(self.source)
        except SyntaxError as error:
            raise ValueError(f"source is no Python: {error.msg}, line {error.lineno}") from None
        if not self.tests:
            msgspec.structs.force_setattr(self, "tests", tuple(UnitTest(name=name) for name in known))
        self._check(self.tests)
        if unknown := [test.name for test in self.tests if test.name not in known]:
            raise ValueError(f"tests names {unknown[0]!r}, which the source has not; it has {', '.join(known)}")
        if not self.module.isidentifier():
            raise ValueError(f"module must be a name, got {self.module!r}")
        if self.questions_max < 1:
            raise ValueError(f"questions_max must be >= 1, got {self.questions_max}")


class SqlTest(_Test, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query on one database."""

    setup: str
    """Statements that make the database; the candidate's session gets them too."""
    rows: list[list[Any]] | None = None
    """Expected rows; absent means those of `gold`."""


class SqlManifest(_Manifest, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="sql"):
    """One sqlite query, read-only, on a database for each test. More databases tell apart queries that agree on one by chance."""

    entry: str = "query.sql"
    """The candidate's file."""
    gold: str = ""
    """Reference query, run in a session of its own."""
    ordered: bool = False
    """Whether the order of rows counts."""
    tolerance: float = 1e-6
    """Of numbers: relative, and absolute below 1. Two integers must be equal."""
    tests: tuple[SqlTest, ...]
    """In the order in which they run."""

    def __post_init__(self) -> None:
        self._check(self.tests)
        check_comparing("rows", self.tolerance, None)
        if not self.gold and any(test.rows is None for test in self.tests):
            raise ValueError("gold must be given, or rows in each test")


class RepositoryTest(_Test, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One test of the repository, by the name that its runner knows it by."""


class RepositoryManifest(_Manifest, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="repository"):
    """A patch to the repository of a profile: applied to its tree, then the repository's own tests, each a process with exit status 0 or not.
    They run beside the candidate's code, so a pass is evidence and no proof: see `repositories`."""

    profile: str
    """One that has a repository."""
    entry: str = "solution.patch"
    """The candidate's file: a unified diff with a/ and b/ prefixes. An empty one leaves the tree as it is, which shows what a patch must mend."""
    command: tuple[str, ...] = ("python3", "-B", "-m", "unittest", TEST)
    """Runs one test in the repository's directory; `{test}` stands for its name."""
    files: dict[str, str] = {}
    """Hidden test files by path in the repository, written after the patch over whatever lies there."""
    tests: tuple[RepositoryTest, ...]
    """In the order in which they run."""

    def __post_init__(self) -> None:
        self._check(self.tests)
        for path in self.files:
            if path.startswith("/") or not {"", ".", ".."}.isdisjoint(path.split("/")):
                raise ValueError(f"files must have relative paths, got {path!r}")
        if unnamed := [number for number, test in enumerate(self.tests) if not test.name]:
            raise ValueError(f"tests[{unnamed[0]}].name must be given")
        if not any(TEST in part for part in self.command):
            raise ValueError(f"command must have {TEST} in it, got {list(self.command)}")


Manifest = StdioManifest | FunctionManifest | UnitManifest | SqlManifest | RepositoryManifest


class Named(Protocol):
    """What verdicts need of a test of any kind."""

    @property
    def name(self) -> str: ...


def name_of(test: Named, index: int) -> str:
    """Its name, or its number from 1."""
    return test.name or str(index + 1)


def require_room(manifest: Manifest, output_bytes: int) -> None:
    """ManifestError if an expected output is longer than what is kept of a candidate's, which therefore could never pass. One byte is
    left for the end of the last line."""
    if not isinstance(manifest, StdioManifest | FunctionManifest) or manifest.checker is not None:
        return
    tests: tuple[StdioTest | FunctionTest, ...] = manifest.tests
    for number, test in enumerate(tests):
        field, text = (
            ("stdout", test.stdout) if isinstance(test, StdioTest) else ("expected", json.dumps(test.expected))
        )
        if (length := len(text.encode("utf-8", "replace"))) >= output_bytes:
            raise ManifestError(
                f"must be shorter than `output_bytes` ({output_bytes}), got {length} bytes; "
                f"raise `output_bytes` in the limits of the manifest and of profile {manifest.profile!r}",
                f"tests[{number}].{field}",
            )


def check_comparing(how: str, tolerance: float, checker: Checker | None) -> None:
    """ValueError unless the fields about comparing fit together."""
    if (how == "checker") != (checker is not None):
        raise ValueError("checker must be given if and only if compare is `checker`")
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"tolerance must be finite and >= 0, got {tolerance}")


def parse_manifest(text: str | bytes) -> Manifest:
    """The manifest that a JSON text holds. ManifestError."""
    try:
        value = strict_json(text)
    except UnicodeDecodeError as error:
        raise ManifestError(f"is not UTF-8: {error.reason}") from None
    except ValueError as error:
        raise ManifestError(f"is not JSON: {error}") from None
    return manifest_of(value)


def manifest_of(value: object) -> Manifest:
    """The manifest that plain values describe. ManifestError."""
    try:
        manifest: Manifest = msgspec.convert(value, Manifest, strict=True)
        return manifest
    except msgspec.ValidationError as error:
        cause, _, field = str(error).partition(" - at `$")
        raise ManifestError(cause, field.removesuffix("`").removeprefix(".")) from None
