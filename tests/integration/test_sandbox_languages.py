"""Languages of a session in real jails: bash on its terminal, compiled programs, the outcome at each limit, returned
files."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.config import PROFILES, ProfileConfig, SandboxConfig
from rollmesh.services.sandbox.describe import describe
from rollmesh.services.sandbox.engine import RunOutcome, RunResult
from rollmesh.services.sandbox.engines.jail_engine import JailEngine
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.ids import SeededIds
from rollmesh.shared.errors import InvalidInput

UID_BASE = 60900
WALL_S = 40.0
GRACE_S = 30.0
"""A program that is out of time is stopped inside its session. On a busy host this may take longer than the default
grace period."""


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[JailEngine]:
    config = SandboxConfig(uid_base=UID_BASE, warm=("shell",), grace_s=GRACE_S)
    made = JailEngine(config, state_dir=tmp_path_factory.mktemp("state"), ids=SeededIds(os.getpid()))
    await made.start()
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(node: JailEngine) -> AsyncIterator[JailEngine]:
    """Yield a node with one fresh session, `s`."""
    await node.open("s", "shell", PROFILES["shell"].resolved_limits())
    yield node
    await node.end("s")


async def shrink(engine: JailEngine, **limits: Any) -> None:
    """Replace the session by one with lower limits."""
    await engine.end("s")
    await engine.open("s", "shell", replace(PROFILES["shell"].resolved_limits(), **limits))


async def run(engine: JailEngine, language: str, code: str, wall_s: float = WALL_S, **fields: Any) -> RunResult:
    return await engine.run("s", Program(language=language, code=code, **fields), wall_s)


async def bash(engine: JailEngine, code: str, wall_s: float = WALL_S) -> RunResult:
    return await run(engine, "bash", code, wall_s)


# bash -----------------------------------------------------------------------------------------------------------------


async def test_bash_keeps_folder_variables_and_functions(engine: JailEngine) -> None:
    first = await bash(engine, "mkdir -p a/b && cd a/b; x='one two'; greet() { echo \"hello $1\"; }")
    assert (first.outcome, first.stdout, first.exit_status) == (RunOutcome.OK, "", 0), first
    second = await bash(engine, 'pwd; echo "$x"; greet you')
    assert (second.stdout, second.result) == ("/session/a/b\none two\nhello you\n", "")


async def test_bash_returns_the_exit_status_and_keeps_it_for_the_next_command(engine: JailEngine) -> None:
    result = await bash(engine, "echo said; (exit 7)")
    assert (result.outcome, result.exit_status, result.stdout) == (RunOutcome.ERROR, 7, "said\n")
    assert (result.error_type, result.error_message, result.session_alive) == ("ExitStatus", "7", True)
    assert (await bash(engine, "echo $?")).stdout == "7\n"


async def test_bash_has_a_terminal_that_neither_echoes_nor_decorates(engine: JailEngine) -> None:
    result = await bash(engine, "test -t 0 && test -t 1 && tty && stty size; printf '\\033[31mred\\033[0m\\tx\\n'")
    assert result.stdout == "/dev/pts/0\n40 120\nred\tx\n"
    await bash(engine, "stty sane; stty echo")
    assert (await bash(engine, "echo é")).stdout == "é\n"


async def test_bash_takes_quotes_newlines_and_long_code(engine: JailEngine) -> None:
    odd = "cat <<'END'\n'single' \"double\" $x `y` \\ \t !! é\nEND\n"
    assert (await bash(engine, odd)).stdout == "'single' \"double\" $x `y` \\ \t !! é\n"
    long = "echo " + " ".join(f"w{number}" for number in range(4000))
    assert (await bash(engine, long + " | wc -w")).stdout.strip() == "4000"


async def test_bash_syntax_error_is_the_programs_error(engine: JailEngine) -> None:
    result = await bash(engine, "if then")
    assert (result.outcome, result.session_alive) == (RunOutcome.ERROR, True)
    assert "syntax error" in result.stdout


@pytest.mark.parametrize(
    "stubborn", ["sleep 100; echo never", "while true; do :; done", "sh -c 'trap \"\" INT; while :; do :; done'"]
)
async def test_bash_command_out_of_time_is_interrupted_and_the_shell_continues(
    engine: JailEngine, stubborn: str
) -> None:
    await bash(engine, "x=kept")
    result = await bash(engine, stubborn, wall_s=0.3)
    assert (result.outcome, result.session_alive) == (RunOutcome.TIME, True), result
    assert "never" not in result.stdout
    after = await bash(engine, "echo $x")
    assert (after.stdout, after.stderr) == ("kept\n", "")


async def test_bash_is_interrupted_whatever_its_service_ignores(tmp_path: Path) -> None:
    """A service that was started by nohup, or in the background of a script, ignores SIGINT and passes that on."""
    engine = JailEngine(
        SandboxConfig(warm=("shell",), grace_s=GRACE_S), state_dir=tmp_path, ids=SeededIds(os.getpid() + 2)
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        await engine.start()
        await engine.open("s", "shell", PROFILES["shell"].resolved_limits())
        await bash(engine, "true")
        result = await bash(engine, "sleep 100; echo never", wall_s=0.3)
    finally:
        signal.signal(signal.SIGINT, before)
        await engine.close()
    assert (result.outcome, result.session_alive, "never" in result.stdout) == (RunOutcome.TIME, True, False), result


async def test_bash_that_resists_everything_is_replaced(engine: JailEngine) -> None:
    await bash(engine, "true")
    result = await bash(engine, "trap '' INT; while :; do :; done", wall_s=1.0)
    assert (result.outcome, result.session_alive) == (RunOutcome.TIME, True), result
    after = await bash(engine, "echo here")
    assert (after.stdout, after.stderr) == (
        "here\n",
        "[the shell was killed with a command that exceeded its limits; this is a fresh one]\n",
    )


async def test_bash_exit_ends_the_shell_and_the_next_command_says_so(engine: JailEngine) -> None:
    result = await bash(engine, "x=1; echo bye; exit 3")
    assert (result.outcome, result.exit_status, result.stdout) == (RunOutcome.ERROR, 3, "bye\nexit\n")
    assert result.session_alive
    after = await bash(engine, "echo [$x]")
    assert (after.stdout, after.stderr) == ("[]\n", "[the shell ended with status 3; this is a fresh one]\n")
    assert (await bash(engine, "echo quiet")).stderr == ""


@pytest.mark.parametrize(
    "code",
    [
        "enable -n printf times", "enable -n times", "enable -n printf", "printf() { :; }; times() { :; }",
        "alias printf=: times=: builtin=:", "enable -n printf; set -eu",
    ],
)  # fmt: skip
async def test_bash_without_its_builtins_still_ends_each_command(engine: JailEngine, code: str) -> None:
    first = await bash(engine, f"x=kept; {code}")
    assert (first.outcome, first.stdout, first.stderr) == (RunOutcome.OK, "", ""), first
    for _ in range(2):
        result = await bash(engine, "(exit 3)")
        assert (result.outcome, result.exit_status, result.stdout) == (RunOutcome.ERROR, 3, ""), result
        if "set -e" in code:
            return
        assert (await bash(engine, "echo $x")).stdout == "kept\n"


async def test_bash_that_never_reports_its_end_is_replaced(engine: JailEngine) -> None:
    await bash(engine, "true")
    assert (await bash(engine, "builtin() { :; }", wall_s=0.5)).outcome is RunOutcome.TIME
    after = await bash(engine, "echo here")
    assert (after.stdout, "fresh" in after.stderr) == ("here\n", True)


async def test_bash_output_is_cut_and_a_flood_is_stopped(engine: JailEngine) -> None:
    limits = PROFILES["shell"].resolved_limits()
    cut = await bash(engine, f"head -c {limits.output_bytes + 10} /dev/zero | tr '\\0' x")
    assert (len(cut.stdout), cut.truncated, cut.outcome) == (limits.output_bytes, True, RunOutcome.OK)
    flood = await bash(engine, "yes")
    assert (flood.outcome, flood.session_alive) == (RunOutcome.OUTPUT, True)
    assert (await bash(engine, "echo fine")).stdout == "fine\n"


async def test_bash_background_job_prints_later_and_does_not_hold_up(engine: JailEngine) -> None:
    await bash(engine, "mkfifo gate; (read line < gate; echo from behind; touch done) & true")
    result = await bash(engine, "echo go > gate; until [ -e done ]; do sleep 0.01; done; echo front")
    assert "from behind\n" in result.stdout
    assert "front\n" in result.stdout


async def test_bash_counts_cpu_time_of_its_children(engine: JailEngine) -> None:
    busy = await bash(
        engine, "i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done; (i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done)"
    )
    assert 0.02 < busy.cpu_s < WALL_S
    assert (await bash(engine, "true")).cpu_s < busy.cpu_s


async def test_stateful_languages_refuse_input(engine: JailEngine) -> None:
    for language in ("bash", "python"):
        with pytest.raises(InvalidInput, match="does not accept stdin"):
            await run(engine, language, "1", stdin=b"x")


async def test_bash_code_with_a_nul_is_the_programs_error(engine: JailEngine) -> None:
    result = await bash(engine, "echo \0")
    assert (result.outcome, result.session_alive) == (RunOutcome.ERROR, True)
    assert "NUL" in result.error_message


# Programs -------------------------------------------------------------------------------------------------------------

SUM_C = r"""
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char **argv) {
    long total = atol(argv[1]), x;
    while (scanf("%ld", &x) == 1) total += x;
    printf("%ld\n", total);
    fprintf(stderr, "done\n");
    return total == 66 ? 0 : 5;
}
"""
SUM_CPP = r"""
#include <iostream>
#include <string>
int main(int argc, char **argv) {
    long total = std::stol(argv[1]), x;
    while (std::cin >> x) total += x;
    std::cout << total << "\n"; std::cerr << "done\n";
    return total == 66 ? 0 : 5;
}
"""
SUM_JS = r"""
const numbers = require("fs").readFileSync(0, "utf8").split(/\s+/).filter(Boolean).map(Number);
const total = numbers.reduce((a, b) => a + b, Number(process.argv[2]));
console.log(String(total)); console.error("done");
process.exit(total == 66 ? 0 : 5);
"""
SUMS = {"c": SUM_C, "cpp": SUM_CPP, "javascript": SUM_JS}
TOOLS = {"c": "gcc", "cpp": "g++", "javascript": "node"}


def require_tool(language: str) -> None:
    if shutil.which(TOOLS[language]) is None:
        pytest.skip(f"this host has no {TOOLS[language]}")


@pytest.mark.parametrize("language", SUMS)
async def test_program_reads_stdin_and_arguments_and_returns_its_status(engine: JailEngine, language: str) -> None:
    require_tool(language)
    result = await run(engine, language, SUMS[language], stdin=b"22 33\n", arguments=("11",))
    assert (result.outcome, result.stdout, result.stderr, result.exit_status) == (RunOutcome.OK, "66\n", "done\n", 0), (
        result
    )
    result = await run(engine, language, SUMS[language], arguments=("1",))
    assert (result.outcome, result.stdout, result.exit_status) == (RunOutcome.ERROR, "1\n", 5)
    assert (result.error_type, result.error_message) == ("ExitStatus", "5")
    assert 0 < result.cpu_s < WALL_S
    assert (await bash(engine, "ls -A")).stdout == "", "nothing of the program is left"


@pytest.mark.parametrize(("language", "code"), [("c", "int main( {}"), ("cpp", "int main() { return x; }")])
async def test_compile_error_is_the_programs_error_with_the_compilers_text(
    engine: JailEngine, language: str, code: str
) -> None:
    require_tool(language)
    result = await run(engine, language, code)
    assert (result.outcome, result.error_type, result.session_alive) == (RunOutcome.ERROR, "CompileError", True)
    assert result.error_message.startswith("main.c")
    assert "error:" in result.stderr


async def test_limits_of_a_program_are_distinguished(engine: JailEngine) -> None:
    require_tool("cpp")
    loop = await run(engine, "c", "int main() { for (;;) ; }", wall_s=2.0)
    assert (loop.outcome, loop.session_alive) == (RunOutcome.TIME, True)
    crash = await run(engine, "c", "int main() { *(volatile int *)0 = 1; }")
    assert (crash.outcome, crash.exit_status, crash.error_message) == (RunOutcome.ERROR, -11, "ended by SIGSEGV")
    flood = await run(engine, "c", '#include <stdio.h>\nint main() { for (;;) puts("xxxxxxxxxxxxxxxxxxxxxxxx"); }')
    assert (flood.outcome, flood.truncated) == (RunOutcome.OUTPUT, True)
    memory = await run(engine, "cpp", "volatile char *p; int main() { for (;;) p = new char[1 << 24]; }")
    assert (memory.outcome, memory.session_alive) == (RunOutcome.MEMORY, True)


async def test_javascript_out_of_heap_is_the_memory_limit(engine: JailEngine) -> None:
    require_tool("javascript")
    await shrink(engine, memory_bytes=64 << 20)
    result = await run(engine, "javascript", "const a = []; for (;;) a.push(new Array(1000).fill(a.length));")
    assert (result.outcome, result.session_alive) == (RunOutcome.MEMORY, True), result


async def test_children_of_a_program_end_with_it(engine: JailEngine) -> None:
    require_tool("c")
    code = '#include <unistd.h>\n#include <stdio.h>\nint main() { if (!fork()) { for (;;) pause(); } puts("parent"); }'
    result = await run(engine, "c", code, wall_s=30.0)
    assert (result.outcome, result.stdout) == (RunOutcome.OK, "parent\n"), "the child was waited for"


async def test_unknown_language_lists_those_of_the_host(engine: JailEngine) -> None:
    with pytest.raises(InvalidInput, match="language 'cobol' is not available; this host has: python, bash"):
        await run(engine, "cobol", "DISPLAY 'x'.")


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "import os; os.makedirs('out'); open('out/a', 'w').write('1'); os.symlink('/etc/passwd', 'l')"),
        ("bash", "mkdir out; printf 1 > out/a; ln -s /etc/passwd l; mkfifo pipe"),
    ],
)
async def test_files_asked_for_come_back_with_the_result(engine: JailEngine, language: str, code: str) -> None:
    paths = ("out/a", "missing", "l", "pipe", "out")
    result = await run(engine, language, code, return_paths=paths)
    assert (result.outcome, result.files, result.truncated) == (RunOutcome.OK, {"out/a": b"1"}, False), result


async def test_a_file_too_large_comes_back_cut_and_marked(engine: JailEngine) -> None:
    result = await run(engine, "bash", "head -c 5000000 /dev/zero > big", return_paths=("big",))
    assert (len(result.files["big"]), result.truncated) == (4 << 20, True)


async def test_python_reports_cpu_time(engine: JailEngine) -> None:
    result = await run(engine, "python", "x = sum(range(2_000_000))")
    assert 0.005 < result.cpu_s < WALL_S
    assert result.exit_status == 0


# SQL ------------------------------------------------------------------------------------------------------------------

MAKE_DB = """
import sqlite3
db = sqlite3.connect('shop.db')
db.executescript('''
create table item(name text, price real, n int, raw blob);
insert into item values ('pear', 1.5, 2, null), ('é', 2.0, null, x'00ff');
''')
db.close()
"""


async def sql(engine: JailEngine, language: str, query: str, *arguments: str, wall_s: float = WALL_S) -> RunResult:
    return await run(engine, language, query, wall_s, arguments=arguments)


async def test_sqlite_answers_with_a_table(engine: JailEngine) -> None:
    await run(engine, "python", MAKE_DB)
    result = await sql(engine, "sqlite", "select * from item order by price", "shop.db")
    assert result.outcome is RunOutcome.OK, result
    assert json.loads(result.result) == {
        "columns": ["name", "price", "n", "raw"],
        "rows": [["pear", 1.5, 2, None], ["é", 2.0, None, {"hex": "00ff"}]],
    }
    names = await sql(engine, "sqlite", "pragma table_info(item)", "shop.db")
    assert [row[1] for row in json.loads(names.result)["rows"]] == ["name", "price", "n", "raw"]
    assert json.loads((await sql(engine, "sqlite", "select 1 + 1 as x")).result) == {"columns": ["x"], "rows": [[2]]}


@pytest.mark.parametrize(
    "query",
    [
        "insert into item(name) values ('x')",
        "delete from item",
        "drop table item",
        "create temp table t as select 1",
        "attach 'other.db' as other",
        "pragma journal_mode=delete",
        "pragma writable_schema=1",
        "vacuum into 'copy.db'",
        "select load_extension('x')",
        "begin immediate",
        "with x as (select 1) update item set n = 0",
    ],
)
async def test_sqlite_refuses_everything_but_reading(engine: JailEngine, query: str) -> None:
    await run(engine, "python", MAKE_DB)
    result = await sql(engine, "sqlite", query, "shop.db")
    assert (result.outcome, result.session_alive) == (RunOutcome.ERROR, True), result
    assert any(text in result.error_message for text in ("only reading is allowed, not", "no such function"))
    count = await sql(engine, "sqlite", "select count(*), sum(n) from item", "shop.db")
    assert json.loads(count.result)["rows"] == [[2, 2]]
    assert (await bash(engine, "ls")).stdout == "shop.db\n"


@pytest.mark.row(
    "S099",
    missing="The database of the task in the session of the agent, the composite reward, and decoding in a tree.",
)
async def test_sqlite_reports_the_error_and_the_limits(engine: JailEngine) -> None:
    await run(engine, "python", MAKE_DB)
    wrong = await sql(engine, "sqlite", "select nonsense from item", "shop.db")
    assert (wrong.outcome, wrong.error_type) == (RunOutcome.ERROR, "OperationalError")
    assert wrong.error_message == "no such column: nonsense"
    assert (await sql(engine, "sqlite", "select 1", "missing.db")).outcome is RunOutcome.ERROR
    endless = "with recursive n(i) as (select 1 union all select i + 1 from n) select {} from n"
    late = await sql(engine, "sqlite", endless.format("count(*)"), wall_s=0.5)
    assert (late.outcome, late.session_alive) == (RunOutcome.TIME, True)
    many = await sql(engine, "sqlite", endless.format("i"))
    assert (many.outcome, many.truncated) == (RunOutcome.OK, True)
    rows = json.loads(many.result)["rows"]
    assert rows == [[number] for number in range(1, len(rows) + 1)]
    assert 1000 < len(rows) <= 10_000
    for path in ("../etc/x", "/etc/passwd"):
        with pytest.raises(InvalidInput, match="relative"):
            await sql(engine, "sqlite", "select 1", path)


async def test_duckdb_reads_its_file_and_nothing_else(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    profile = replace_profile("sql", library_paths=(str(Path(duckdb.__file__).parents[1]),), preload=("duckdb",))
    engine = JailEngine(
        SandboxConfig(uid_base=UID_BASE, profiles={"sql": profile}), state_dir=tmp_path, ids=SeededIds(os.getpid() + 1)
    )
    await engine.start()
    try:
        await engine.open("s", "sql", profile.resolved_limits())
        make = "import duckdb\nc = duckdb.connect('d.db', config={'threads': 1})\nc.execute(\"create table t as select i, i / 2 h, 'x' s from range(3) r(i)\")\nc.close()"
        made = await run(engine, "python", make)
        assert made.outcome is RunOutcome.OK, made
        result = await sql(engine, "duckdb", "select i, h, s, sum(i) over () total from t order by i", "d.db")
        assert result.outcome is RunOutcome.OK, result
        assert json.loads(result.result)["rows"] == [[0, 0.0, "x", 3], [1, 0.5, "x", 3], [2, 1.0, "x", 3]]
        for query in ("insert into t values (1, 1, 'y')", "attach 'e.db'", "install httpfs", "load httpfs", "copy t to 'out.csv'",
                      "create table u(i int)", "set threads=4", "pragma enable_profiling", "select 1; select 2"):  # fmt: skip
            refused = await sql(engine, "duckdb", query, "d.db")
            assert (refused.outcome, refused.session_alive) == (RunOutcome.ERROR, True), (query, refused)
        await run(engine, "python", "open('x.csv', 'w').write('a\\n1\\n')")
        for query in ("select * from read_csv('x.csv')", "select * from 'x.csv'", "select * from glob('*')"):
            assert (await sql(engine, "duckdb", query)).outcome is RunOutcome.ERROR, query
        assert "nonsense" in (await sql(engine, "duckdb", "select nonsense from t", "d.db")).error_message
    finally:
        await engine.close()


async def test_language_without_its_library_says_what_the_profile_lacks(engine: JailEngine) -> None:
    with pytest.raises(InvalidInput, match="its profile lacks the library duckdb"):
        await sql(engine, "duckdb", "select 1")


def replace_profile(name: str, **changes: Any) -> ProfileConfig:
    return msgspec.structs.replace(PROFILES[name], **changes)


OWN_LANGUAGE = """
from rollmesh.sandbox_runtime.languages.programs import Command

class OldC:
    def command(self):
        return Command(source="main.c", build=("gcc", "-std=c89", "-o", "{folder}/p", "main.c"), run=("{folder}/p",))
"""


async def test_languages_of_the_operator_run_in_the_jail_under_its_limits(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN_LANGUAGE)
    sed = Extension("command", {"source": "main.sed", "run": ["sed", "-f", "{folder}/main.sed"]})
    config = SandboxConfig(uid_base=UID_BASE, languages={"sed": sed, "c89": Extension(f"{tmp_path}/mine.py:OldC")})
    engine = JailEngine(config, state_dir=tmp_path / "state", ids=SeededIds(os.getpid() + 3))
    await engine.start()
    try:
        await engine.open("s", "shell", PROFILES["shell"].resolved_limits())
        edited = await run(engine, "sed", "s/a/b/g", stdin=b"a cat\n")
        assert (edited.outcome, edited.stdout) == (RunOutcome.OK, "b cbt\n")
        endless = await run(engine, "sed", ": a\nb a", 0.5, stdin=b"x\n")
        assert (endless.outcome, endless.session_alive) == (RunOutcome.TIME, True)
        built = await run(engine, "c89", 'int printf(const char *, ...); int main(void) { return printf("hi") - 2; }')
        assert (built.outcome, built.stdout) == (RunOutcome.OK, "hi")
        broken = await run(engine, "c89", "int main(void) { nonsense }")
        assert (broken.outcome, broken.error_type) == (RunOutcome.ERROR, "CompileError")
        assert not (await run(engine, "python", "import os; os.listdir('.')")).stdout
        with pytest.raises(InvalidInput, match=r"language 'ada' is not available.*sed, c89"):
            await run(engine, "ada", "")
    finally:
        await engine.close()
    assert "sed" in describe(config).languages
    declared, without = (describe(each).profiles[0].digest for each in (config, SandboxConfig()))
    assert declared != without
