"""Snapshot, fork and restore in real jails: what is saved, what is reported as lost, and that hostile snapshots affect
no other session."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollmesh.sandbox_runtime.program import Program
from rollmesh.sandbox_runtime.records import LENGTH, RECORD_BYTES
from rollmesh.services.sandbox.branches import Branches
from rollmesh.services.sandbox.config import ProfileConfig, SandboxConfig, SnapshotsConfig
from rollmesh.services.sandbox.engine import RunOutcome
from rollmesh.services.sandbox.engines.jail_engine import JailEngine
from rollmesh.services.sandbox.sessions import SessionEnd, Sessions
from rollmesh.services.sandbox.snapshots import SessionSnapshot, Snapshots
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.domain.ids import RandomIds
from rollmesh.shared.errors import InvalidInput, Overloaded, SandboxFailed, SessionNotSaved, UnknownSnapshot

PRELUDE = "LIMIT = 3\nseen = []\ndef check(x):\n    return x < LIMIT\nclass Point:\n    x = 0\n"
MANY = 300
CONFIG = SandboxConfig(
    profiles={
        "python": ProfileConfig(preload=("random",), prelude=PRELUDE),
        "forked": ProfileConfig(preload=("cloudpickle",)),
        "small": ProfileConfig(limits={"call_s": 2.0, "disk_bytes": 1 << 20, "inodes_max": 100}),
    },
    grace_s=2.0,
)


class World:
    """The components of a node without the server."""

    def __init__(self, state_dir: Path, snapshots: SnapshotsConfig | None = None) -> None:
        clock, ids = ManualClock(), RandomIds()
        self.clock = clock
        self.state_dir = state_dir
        self.engine = JailEngine(CONFIG, state_dir=state_dir, ids=ids)
        self.sessions = Sessions(self.engine, CONFIG, clock)
        self.snapshots = Snapshots(state_dir / "snapshots", snapshots or SnapshotsConfig(), clock=clock, ids=ids)
        self.branches = Branches(self.engine, self.sessions, self.snapshots)
        self._num_forks = 0

    async def open(self, session_id: str = "s", profile: str = "python", tenant: str = "") -> None:
        await self.sessions.open(session_id, profile=profile, limits={}, ttl_s=0, owner="test", tenant=tenant)

    async def run(self, code: str, session_id: str = "s") -> str:
        result = await self.sessions.run(session_id, Program(code=code), 0)
        assert result.outcome is RunOutcome.OK, result
        return result.result

    async def error(self, code: str, session_id: str = "s") -> str:
        result = await self.sessions.run(session_id, Program(code=code), 0)
        assert result.outcome is RunOutcome.ERROR, result
        return f"{result.error_type}: {result.error_message}\n{result.traceback}"

    async def snapshot(self, session_id: str = "s") -> SessionSnapshot:
        return await self.branches.snapshot(session_id, ttl_s=0)

    async def fork(self, snapshot: SessionSnapshot) -> str:
        self._num_forks += 1
        session_id = f"fork-{self._num_forks}"
        await self.branches.fork(session_id, snapshot.snapshot_id, ttl_s=0, owner="test")
        return session_id

    async def forked(self, code: str) -> tuple[str, SessionSnapshot]:
        """Return a fork of a session that ran `code`."""
        await self.open()
        await self.run(code)
        snapshot = await self.snapshot()
        return await self.fork(snapshot), snapshot

    def forged(self, tree: bytes, state: bytes, profile: str = "python") -> SessionSnapshot:
        """Return a snapshot that a session may have forged."""
        data = section(tree) + section(state)
        snapshot = self.snapshots._reserve(profile, self.engine.limits(profile), "", 0)
        snapshot.path.write_bytes(data)
        snapshot.num_bytes, snapshot.sha256 = len(data), hashlib.sha256(data).hexdigest()
        return snapshot


def section(data: bytes) -> bytes:
    records = [data[start : start + RECORD_BYTES] for start in range(0, len(data), RECORD_BYTES)]
    if not records or len(records[-1]) == RECORD_BYTES:
        records.append(b"")
    return b"".join(LENGTH.pack(len(record)) + record for record in records)


def existing(*paths: str | Path) -> list[str]:
    return [str(path) for path in paths if os.path.lexists(path)]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    await made.engine.start()
    await made.snapshots.start()
    yield made
    await made.snapshots.close()
    await made.engine.close()


# Python state ---------------------------------------------------------------------------------------------------------


async def test_functions_and_classes_keep_living_in_the_namespace(world: World) -> None:
    fork, snapshot = await world.forked(
        "import math as m\nfactor = 2\ndef double(x):\n    return helper(x) * factor\ndef helper(x): return m.floor(x)\n"
        "class A:\n    def __init__(self): self.n = factor\n    def twice(self): return double(self.n)\n"
        "class B(A):\n    def twice(self): return super().twice() + 1\n"
        "a, b = A(), B()\nfn = lambda: factor\nmake = (lambda k: (lambda: k + factor))(5)"
    )
    assert snapshot.lost == ()
    code = "factor = 10\ndouble(3.5), a.twice(), b.twice(), fn(), make(), isinstance(b, A), type(a) is A, m.pi > 3"
    assert await world.run(code, fork) == "(30, 20, 21, 10, 15, True, True, True)"
    assert await world.run("double(3.5)") == "6"


async def test_what_saves_is_imported_by_the_first_save_or_ahead_where_a_profile_says_so(world: World) -> None:
    loaded = "import sys\n'cloudpickle' in sys.modules"
    for session_id, profile in (("late", "python"), ("ahead", "forked")):
        await world.open(session_id, profile)
        assert await world.run(loaded, session_id) == str(profile == "forked")
        assert await world.run("def f(): return 7", session_id) == ""
        fork = await world.fork(await world.snapshot(session_id))
        assert await world.run("f()", fork) == "7"


async def test_shared_values_stay_shared_and_deleted_names_deleted(world: World) -> None:
    fork, _ = await world.forked("a = []\nb = {'a': a}\na.append(a)\ndel check")
    assert await world.run("b['a'] is a and a[0] is a", fork) == "True"
    assert "NameError" in await world.error("check(1)", fork)


async def test_what_the_profile_provides_is_the_forks_own_unless_changed(world: World) -> None:
    fork, snapshot = await world.forked("seen.append(1)\nf = check\nLIMIT = 7\np = Point()")
    assert snapshot.num_bytes < 50_000
    assert await world.run("seen, f is check, f(2), LIMIT, type(p) is Point", fork) == "([1], True, True, 7, True)"


async def test_names_that_cannot_be_saved_are_reported_and_undefined(world: World) -> None:
    fork, snapshot = await world.forked(
        "import threading\ng = (i for i in range(3))\nlock = threading.Lock()\nfile = open('x', 'w')\nkept = 1\n"
        "def uses(): return lock"
    )
    assert set(snapshot.lost) == {"g", "lock", "file"}
    assert await world.run("kept", fork) == "1"
    assert "name 'lock' is not defined" in await world.error("uses()", fork)
    assert await world.run("next(g)") == "0", "the parent goes on"


async def test_tracebacks_in_a_fork_show_the_source_of_before(world: World) -> None:
    fork, _ = await world.forked("def broken():\n    return 1 / 0  # here")
    assert "return 1 / 0  # here" in await world.error("broken()", fork)


async def test_random_state_directory_path_and_environment_are_saved(world: World) -> None:
    fork, _ = await world.forked(
        "import random, os, sys\nos.mkdir('work')\nos.chdir('work')\nopen('mine.py', 'w').write('y = 5')\n"
        "sys.path.insert(0, '/session/work')\nimport mine\nos.environ['A'] = 'b'\nrandom.seed(1)"
    )
    code = "random.random(), os.getcwd(), mine.y, os.environ['A']"
    assert await world.run(code, fork) == await world.run(code)


async def test_object_that_does_not_load_refuses_the_fork_by_name(world: World) -> None:
    await world.open()
    await world.run("class Odd:\n    def __setstate__(self, s): raise ValueError('no')\nodd = Odd(); odd.x = 1")
    snapshot = await world.snapshot()
    with pytest.raises(InvalidInput, match="cannot load the name 'odd': ValueError: no"):
        await world.fork(snapshot)
    assert world.sessions.counts().ended[SessionEnd.REJECTED] == 1


async def test_running_shell_is_reported_as_lost(world: World) -> None:
    await world.open()
    shell = await world.sessions.run("s", Program(code="cd /usr; X=1", language="bash"), 0)
    assert shell.outcome is RunOutcome.OK, shell
    assert (await world.snapshot()).lost == ("<bash>",)


# Files ----------------------------------------------------------------------------------------------------------------


async def test_files_directories_links_and_modes_are_saved(world: World) -> None:
    fork, snapshot = await world.forked(
        "import os\nos.makedirs('d/e')\nopen('d/e/run.sh', 'w').write('x' * 1000000)\nos.chmod('d/e/run.sh', 0o750)\n"
        "os.symlink('e/run.sh', 'd/link')\nos.symlink('/usr/bin', 'outside')\nos.chmod('d', 0o500)\nos.mkfifo('pipe')"
    )
    assert snapshot.lost == ("<file pipe>",)
    code = "os.stat('d/link').st_size, oct(os.stat('d/e/run.sh').st_mode), oct(os.stat('d').st_mode), os.readlink('outside')"
    assert await world.run("import os\n" + code, fork) == await world.run(code)
    assert not await world.run("os.path.lexists('pipe') or None", fork)


async def test_fork_counts_against_the_same_bounds(world: World) -> None:
    await world.open("s", "small")
    await world.run("open('a', 'wb').write(bytes(900000))")
    fork = await world.fork(await world.snapshot())
    assert "No space left" in await world.error("f = open('b', 'wb'); f.write(bytes(300000)); f.close()", fork)


# Leases, quotas, ends -------------------------------------------------------------------------------------------------


async def test_restore_undoes_and_keeps_the_lease(world: World) -> None:
    await world.open()
    await world.run("x = 1\nopen('a', 'w').write('1')")
    snapshot = await world.snapshot()
    await world.run("x = 2\nopen('a', 'w').write('2')\nopen('b', 'w').write('2')")
    await world.branches.restore("s", snapshot.snapshot_id)
    assert await world.run("import os\nx, open('a').read(), os.listdir('.')") == "(1, '1', ['a'])"
    counts = world.sessions.counts()
    assert (counts.created, counts.live) == (1, 1)


async def test_restore_to_another_profile_is_refused_before_anything_is_lost(world: World) -> None:
    await world.open("small", "small")
    snapshot = await world.snapshot("small")
    await world.open()
    await world.run("x = 1")
    with pytest.raises(InvalidInput, match="profile"):
        await world.branches.restore("s", snapshot.snapshot_id)
    assert await world.run("x") == "1"


async def test_snapshot_expires_unused_and_is_renewed_by_use(world: World) -> None:
    await world.open()
    snapshot = await world.branches.snapshot("s", ttl_s=10)
    world.clock.advance(9)
    await world.fork(snapshot)
    world.clock.advance(9)
    assert await world.snapshots.sweep() == 0
    world.clock.advance(1)
    assert await world.snapshots.sweep() == 1
    assert not snapshot.path.exists()
    with pytest.raises(UnknownSnapshot):
        await world.fork(snapshot)


async def test_quotas_are_per_tenant_and_a_full_one_refuses(tmp_path: Path) -> None:
    world = World(
        tmp_path, SnapshotsConfig(tenant_snapshots_max=2, tenant_bytes_max=300_000, snapshot_bytes_max=200_000)
    )
    await world.engine.start()
    await world.snapshots.start()
    try:
        await world.open("a", tenant="one")
        await world.run("open('f', 'wb').write(bytes(180000))", "a")
        first = await world.snapshot("a")
        with pytest.raises(Overloaded, match="bytes"):
            await world.snapshot("a")
        await world.run("open('f', 'wb').write(bytes(220000))", "a")
        await world.branches.drop(first.snapshot_id)
        with pytest.raises(InvalidInput, match="exceed .*snapshot_bytes_max .200000 bytes"):
            await world.snapshot("a")
        await world.run("open('f', 'wb').write(b'')", "a")
        for _ in range(2):
            await world.snapshot("a")
        with pytest.raises(Overloaded, match="number"):
            await world.snapshot("a")
        await world.open("b", tenant="two")
        await world.snapshot("b")
        assert world.snapshots.num_kept == 3
        assert len(os.listdir(tmp_path / "snapshots")) == 3
    finally:
        await world.engine.close()
    later = World(tmp_path)
    await later.snapshots.start()
    assert os.listdir(tmp_path / "snapshots") == []


async def test_snapshot_changed_on_disk_is_refused(world: World) -> None:
    await world.open()
    snapshot = await world.snapshot()
    data = bytearray(snapshot.path.read_bytes())
    data[600] ^= 1
    snapshot.path.write_bytes(data)
    with pytest.raises(SandboxFailed, match="changed on disk"):
        await world.fork(snapshot)
    assert world.sessions.counts().live == 1


# Hostile --------------------------------------------------------------------------------------------------------------


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as made:
        for info, content in members:
            info.size = len(content)
            made.addfile(info, io.BytesIO(content))
    return out.getvalue()


def entry(
    name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, 0o644
    return info, content


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"id > {self.target}; id > /session/ran",)


async def test_pickle_that_runs_commands_runs_them_in_the_jail_only(world: World, tmp_path: Path) -> None:
    target = tmp_path / "owned"
    with pytest.raises(InvalidInput, match="does not load"):
        await world.fork(world.forged(archive(), pickle.dumps(Evil(target))))
    assert existing(target, "/session") == []


@pytest.mark.parametrize(
    "members",
    [
        [entry("../../../../tmp/rollmesh-escaped", b"x")],
        [entry("/tmp/rollmesh-escaped", b"x")],
        [entry("d", kind=tarfile.SYMTYPE, link="/tmp"), entry("d/../../tmp/rollmesh-escaped", b"x")],
        [entry("d", kind=tarfile.SYMTYPE, link="/usr"), entry("d/rollmesh-escaped", b"x")],
        [entry("big", bytes(2 << 20))],
        [entry(f"f{number}") for number in range(MANY)],
        [entry("a", b"x"), entry("a", b"y")],
    ],
    ids=["dots", "absolute", "dots through a link", "through a link", "too many bytes", "too many files", "twice"],
)
async def test_hostile_archive_is_refused_and_touches_nothing(
    world: World, members: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    with pytest.raises(InvalidInput, match="does not load"):
        await world.fork(world.forged(archive(*members), b"", "small"))
    assert existing("/tmp/rollmesh-escaped", "/usr/rollmesh-escaped") == []
    assert world.sessions.counts().live == 0
    await world.open("s", "small")


async def test_endless_load_is_killed_in_time(world: World) -> None:
    await world.open("s", "small")
    await world.run("class Slow:\n    def __setstate__(self, s):\n        while True: pass\nslow = Slow(); slow.x = 1")
    snapshot = await world.snapshot()
    with pytest.raises(InvalidInput, match="does not load"):
        await world.fork(snapshot)
    assert await world.run("1") == "1"


FORGERS = {
    "flood": "while True: os.write(3, struct.pack('<I', 1 << 18) + bytes(1 << 18))",
    "tiny records": "os.write(3, struct.pack('<I', 1) + b'x'); os.write(3, (struct.pack('<I', 1) + b'x') * 3)",
    "huge length": "os.write(3, struct.pack('<I', 0xFFFFFFF0))",
    "end": "os._exit(0)",
    "abort and junk": "os.write(3, struct.pack('<I', 0xFFFFFFFF) + b'junkjunkjunk')",
}


@pytest.mark.parametrize("forger", FORGERS)
async def test_session_that_forges_its_snapshot_is_ended(world: World, forger: str) -> None:
    await world.open("s", "small")
    await world.run(
        "import os, struct\nclass Forger:\n    def __reduce__(self):\n        "
        + FORGERS[forger]
        + "\n        os._exit(0)\n"
        "forger = Forger()"
    )
    with pytest.raises(SessionNotSaved, match="the session ended while it was saved"):
        await world.snapshot()
    assert world.snapshots.num_kept == 0
    assert os.listdir(world.state_dir / "snapshots") == []
    await world.open("s", "small")


async def test_child_forked_while_pickling_does_not_answer_for_the_session(world: World) -> None:
    await world.open("s", "small")
    await world.run(
        "import os\nclass F:\n    def __reduce__(self):\n        os.fork()\n        return str, ('x',)\nf = F()"
    )
    await world.snapshot()
    assert await world.run("1 + 1") == "2"
