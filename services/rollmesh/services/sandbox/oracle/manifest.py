"""Manifests: the hidden tests of one task, which an operator writes in JSON. docs/sandbox/judging.md has an example of
each kind.

A manifest is decoded strictly: an unknown field, a wrong type or a duplicate key is an error with its location, because
a test that is silently not run is worse than one that fails.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import msgspec

from rollmesh.sandbox_runtime import result_sets
from rollmesh.services.sandbox.oracle.compare import TextCompare, ValueCompare, strict_json
from rollmesh.services.sandbox.oracle.unit_tests import replaced_name, test_names

NUM_TESTS_MAX = 10_000
PROFILE = "python"
"""Default of `profile`."""
TIME_LIMITS_MAX = 3
"""Default of `time_limits_max`."""
LIMIT_FORM = "be finite and >= 0"
"""Form of each limit of a test."""
TEST = "{test}"
"""Placeholder for a test's name in the command of a repository."""


class ManifestError(ValueError):
    """Error of an unusable manifest: the field (empty for the whole manifest) and the cause."""

    def __init__(self, cause: str, field: str = "") -> None:
        super().__init__(f"{field}: {cause}" if field else cause)
        self.cause = cause
        self.field = field


def is_limit(value: float) -> bool:
    """Return whether a value has `LIMIT_FORM`."""
    return math.isfinite(value) and value >= 0


class LimitsPerTest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one test. 0 means the profile's limit, which is also the maximum."""

    wall_s: float = 0.0
    """Wall seconds of one request to the candidate, and of its loading; for a unit test, of all its requests
    together."""
    cpu_s: float = 0.0
    """CPU seconds of one request to the candidate, and of its loading."""
    memory_bytes: int = 0
    """Bytes of memory of the candidate's session."""
    processes_max: int = 0
    """Processes and threads of the candidate's session."""
    output_bytes: int = 0
    """Bytes of an answer, and of the printed output."""
    disk_bytes: int = 0
    """Bytes of files, including those of the candidate."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not is_limit(value):
                raise ValueError(f"limits.{name} must {LIMIT_FORM}, got {value}")


class Checker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checker for tests with many correct answers. It runs in a separate jail, which never contains code of the
    candidate."""

    source: str
    """Python source with a function `check(given, expected, answer)` that returns a bool or `(accept, message)`."""
    profile: str = "python"
    """Profile of the checker's jail."""
    wall_s: float = 0.0
    """Wall seconds of one check; 0 means the profile's limit."""


class _Test(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = ""
    """Name in the verdict; if empty, the number of the test, from 1. The caller sees it, so it must not reveal the
    answer."""
    weight: float = 1.0
    """Weight of the test in the accepted share."""


class StdioTest(_Test, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of the program."""

    stdin: str = ""
    """Standard input."""
    stdout: str
    """Expected standard output."""


class FunctionTest(_Test, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One call of the function."""

    arguments: list[Any] | dict[str, Any]
    """Arguments as JSON values: a list by position or an object by name."""
    expected: Any
    """Expected result as a JSON value. Tuples become lists, and keys of dictionaries become strings."""


class _Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """Fields of all kinds of manifests."""

    profile: str = PROFILE
    """Profile of the candidate's jail, which determines what it can import."""
    limits: LimitsPerTest = LimitsPerTest()
    """Limits of each test."""
    isolate: bool = True
    """Whether each test gets a fresh session, so that no state passes between tests. False is faster if loading is
    slow, but state from an earlier test then affects later tests."""
    stop_at_first_failure: bool = False
    """Whether to skip the tests after the first one that is not accepted."""
    time_limits_max: int = TIME_LIMITS_MAX
    """Number of tests out of time after which the remaining tests count as out of time without being run."""

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


class _CodeManifest(_Manifest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of the kinds whose candidate is a file of code."""

    prelude: str = ""
    """Source that is put in front of the candidate's file, such as `from typing import *`, after its `from __future__`
    imports. Data sets whose solutions omit their imports need it."""


class StdioManifest(_CodeManifest, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="stdio"):
    """A program: standard input is given, standard output is compared."""

    language: Literal["python", "c", "cpp", "javascript"] = "python"
    """Language of the candidate's file."""
    entry: str = "solution.py"
    """The candidate's file that is run."""
    tests: tuple[StdioTest, ...]
    """In the order in which they run."""
    compare: TextCompare = "exact"
    """`exact`: equal lines, ignoring trailing white space and empty lines at the end; equal tokens otherwise give PE.
    `lines`: equal words in each line, with numerals by value (7 = 7.0), without blank lines at both ends, as
    LiveCodeBench compares. `tokens`: equal words, whatever the white space. `numbers`: the same, with numerals within
    `tolerance`. `checker`: the checker decides. White space means ASCII white space."""
    tolerance: float = 1e-6
    """Tolerance of `numbers`: relative, and absolute below 1. Two integers must be equal. 0 also compares decimal
    fractions exactly."""
    checker: Checker | None = None
    """Checker for `compare` = `checker`. It gets the texts of stdin, expected stdout and actual stdout."""

    def __post_init__(self) -> None:
        self._check(self.tests)
        check_comparing(self.compare, self.tolerance, self.checker)


class FunctionManifest(_CodeManifest, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="function"):
    """A function: JSON arguments are given, its JSON result is compared."""

    language: Literal["python"] = "python"
    """Language of the candidate's file."""
    entry: str = "solution.py"
    """The candidate's file."""
    function: str
    """Name of the function in the file; `Class.method` is called on a fresh instance."""
    tests: tuple[FunctionTest, ...]
    """In the order in which they run."""
    compare: ValueCompare = "equal"
    """`equal`: the same JSON value, where 1 equals 1.0 and true is not a number. `numbers`: the same, with numbers
    within `tolerance`. `checker`: the checker decides."""
    tolerance: float = 1e-6
    """Tolerance of `numbers`: relative, and absolute below 1. Two integers must be equal."""
    checker: Checker | None = None
    """Checker for `compare` = `checker`. It gets the values of the arguments, the expected result and the actual
    result."""

    def __post_init__(self) -> None:
        self._check(self.tests)
        check_comparing(self.compare, self.tolerance, self.checker)
        if not all(part.isidentifier() for part in self.function.split(".")):
            raise ValueError(f"function must be a name or dotted names, got {self.function!r}")


class UnitTest(_Test, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One test of the source, named `test_x` or `TestX.test_y`."""


class UnitManifest(_CodeManifest, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="unit"):
    """Test functions and unittest cases that import the candidate's module. They run in a separate jail, where the
    module is a proxy: arguments and results pass as values, exceptions by the name of their builtin type."""

    entry: str = "solution.py"
    """The candidate's file."""
    module: str = "solution"
    """Name under which the tests import it."""
    source: str
    """Source of the tests: functions `test_x`, classes `TestX` and unittest cases with methods `test_x`."""
    oracle_profile: str = "python"
    """Profile of the tests' jail, which determines what they can import."""
    tests: tuple[UnitTest, ...] = ()
    """Tests to run; if empty, all tests in the source."""
    objects: bool = True
    """Whether results may be objects of the candidate's classes. With False such a result gives WA, so that none of its
    methods can decide an assertion (`got.startswith("Paris")`). False suits tests of functions."""
    requests_max: int = 10_000
    """Maximum number of requests to the candidate by one test. Each item of a generator is one request."""

    def __post_init__(self) -> None:
        try:
            known = test_names(self.source)
        except SyntaxError as error:
            raise ValueError(f"source is not valid Python: {error.msg}, line {error.lineno}") from None
        if target := replaced_name(self.source, self.module):
            raise ValueError(
                f"source: patch({target!r}) cannot work, because the candidate runs in another process; pass the value "
                "as an argument"
            )
        if not self.tests:
            msgspec.structs.force_setattr(self, "tests", tuple(UnitTest(name=name) for name in known))
        self._check(self.tests)
        if unknown := [test.name for test in self.tests if test.name not in known]:
            raise ValueError(f"tests names {unknown[0]!r}, which the source lacks or skips; it has {', '.join(known)}")
        if not self.module.isidentifier():
            raise ValueError(f"module must be a name, got {self.module!r}")
        if self.requests_max < 1:
            raise ValueError(f"requests_max must be >= 1, got {self.requests_max}")


class SqlTest(_Test, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Runs the query on one database."""

    setup: str
    """Statements that create the database. The candidate's session gets them too."""
    rows: list[list[Any]] | None = None
    """Expected rows; if absent, the rows of `gold`."""


class SqlManifest(_Manifest, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="sql"):
    """One read-only sqlite query, run on one database per test. Several databases distinguish queries that give equal
    rows on one of them."""

    entry: str = "query.sql"
    """The candidate's file."""
    gold: str = ""
    """Reference query, run in a separate session."""
    ordered: bool = False
    """Whether the order of rows counts."""
    columns: result_sets.Columns = "ordered"
    """Whether the order of columns counts: `ordered`, or `any` to accept permuted columns, as Spider does."""
    duplicates: bool = True
    """Whether the number of equal rows counts. False compares the distinct rows, as BIRD does."""
    tolerance: float = 1e-6
    """Tolerance of numbers: relative, and absolute below 1. Two integers must be equal."""
    tests: tuple[SqlTest, ...]
    """In the order in which they run."""

    def __post_init__(self) -> None:
        self._check(self.tests)
        check_comparing("rows", self.tolerance, None)
        if not self.gold and any(test.rows is None for test in self.tests):
            raise ValueError("gold must be given, or rows in each test")


class RepositoryTest(_Test, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One test of the repository, by the name that its test runner uses."""


class RepositoryManifest(_Manifest, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="repository"):
    """A patch to the repository of a profile. It is applied to the repository's tree, and then the repository's own
    tests run, each as a process that passes with exit status 0. They run in the same process as the candidate's code,
    so a pass is evidence and not proof: see `repositories`."""

    profile: str
    """A profile with a repository."""
    entry: str = "solution.patch"
    """The candidate's file: a unified diff with a/ and b/ prefixes. An empty one leaves the tree unchanged, which shows
    the failures that a patch must fix."""
    command: tuple[str, ...] = ("python3", "-B", "-m", "unittest", TEST)
    """Command that runs one test in the repository's directory; `{test}` is replaced by its name."""
    files: dict[str, str] = {}
    """Hidden test files by path in the repository, written after the patch over existing files."""
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
    """The part of a test that verdicts need."""

    @property
    def name(self) -> str: ...


def with_prelude(manifest: Manifest, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the candidate's files, with the manifest's prelude in front of its entry."""
    prelude = getattr(manifest, "prelude", "").encode()
    if not prelude or manifest.entry not in files:
        return dict(files)
    lines = files[manifest.entry].splitlines(keepends=True)
    first = max((number for number, line in enumerate(lines, 1) if line.startswith(b"from __future__ ")), default=0)
    return {**files, manifest.entry: b"".join([*lines[:first], prelude, b"\n", *lines[first:]])}


def name_of(test: Named, index: int) -> str:
    """Return the name of a test, or its number from 1."""
    return test.name or str(index + 1)


def require_room(manifest: Manifest, output_bytes: int) -> None:
    """Raise ManifestError if an expected output is longer than the retained output of a candidate, because no candidate
    could pass. One byte is reserved for the end of the last line."""
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
    """Raise ValueError unless the fields about comparison are consistent."""
    if (how == "checker") != (checker is not None):
        raise ValueError("checker must be given if and only if compare is `checker`")
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"tolerance must be finite and >= 0, got {tolerance}")


def parse_manifest(text: str | bytes) -> Manifest:
    """Decode a manifest from JSON. Raises ManifestError."""
    try:
        value = strict_json(text)
    except UnicodeDecodeError as error:
        raise ManifestError(f"is not UTF-8: {error.reason}") from None
    except ValueError as error:
        raise ManifestError(f"is not JSON: {error}") from None
    return manifest_of(value)


def manifest_of(value: object) -> Manifest:
    """Decode a manifest from plain values. Raises ManifestError."""
    try:
        manifest: Manifest = msgspec.convert(value, Manifest, strict=True)
        return manifest
    except msgspec.ValidationError as error:
        cause, _, field = str(error).partition(" - at `$")
        raise ManifestError(cause, field.removesuffix("`").removeprefix(".")) from None
