"""Detection of writable control groups, on trees with the layout of version 1, version 2 and mixed hosts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollmesh.sandbox_runtime import cgroups
from rollmesh.sandbox_runtime.limits import Limits


def v1_host(root: Path) -> tuple[str, str]:
    (root / "memory/own").mkdir(parents=True)
    (root / "pids").mkdir()
    (root / "unified").mkdir()
    (root / "unified/cgroup.subtree_control").write_text("hugetlb\n")
    mounts = (
        f"cgroup {root}/memory cgroup rw,memory 0 0\ncgroup {root}/pids cgroup rw,pids 0 0\n"
        f"cgroup2 {root}/unified cgroup2 rw 0 0\n"
    )
    return mounts, "4:memory:/own\n3:pids:/\n0::/\n"


def test_version_1_controllers_are_found_where_version_2_has_none(tmp_path: Path) -> None:
    found = cgroups.detect(*v1_host(tmp_path))
    assert found is not None
    assert (found.version, found.parents) == (1, {"memory": tmp_path / "memory/own", "pids": tmp_path / "pids"})


def test_version_2_wins_where_controllers_are_delegated(tmp_path: Path) -> None:
    own = tmp_path / "user"
    own.mkdir()
    (own / "cgroup.subtree_control").write_text("cpu memory pids\n")
    found = cgroups.detect(f"cgroup2 {tmp_path} cgroup2 rw 0 0\n", "0::/user\n")
    assert found is not None
    assert (found.version, found.parents) == (2, {"memory": own, "pids": own, "cpu": own})


def test_nothing_is_found_where_nothing_is_mounted() -> None:
    assert cgroups.detect("proc /proc proc rw 0 0\n", "0::/\n") is None


LIMITS = Limits(memory_bytes=1000, disk_bytes=24, processes_max=7)


def entered(group: cgroups.Cgroup) -> None:
    """Provide the files that the kernel creates in a group, which a plain directory lacks, and enter."""
    for path in group.directories.values():
        (path / "tasks").touch()
    for fd in group.enter(LIMITS):
        os.close(fd)


def test_group_writes_limits_once_and_reads_kills(tmp_path: Path) -> None:
    hierarchy = cgroups.detect(*v1_host(tmp_path))
    assert hierarchy is not None
    group = hierarchy.make("run-0")
    memory = tmp_path / "memory/own/rollmesh-sandbox-run-0"
    entered(group)
    assert (memory / "memory.limit_in_bytes").read_text() == "1024"
    assert (tmp_path / "pids/rollmesh-sandbox-run-0/pids.max").read_text() == "7"
    (memory / "memory.limit_in_bytes").write_text("untouched")
    entered(group)
    assert (memory / "memory.limit_in_bytes").read_text() == "untouched"
    (memory / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert group.num_oom_kills() == 3


def test_a_group_that_the_host_deleted_is_created_again() -> None:
    hierarchy = cgroups.detect_here()
    if hierarchy is None:
        pytest.skip("no control group is writable here")
    group = hierarchy.make(f"deleted-{os.getpid()}")
    try:
        for _ in range(2):
            group.remove()
            fds = group.enter(LIMITS)
            assert len(fds) == len(set(group.directories.values()))
            for fd in fds:
                os.close(fd)
    finally:
        group.remove()


def test_a_group_whose_parent_is_gone_is_an_error_and_leaves_no_open_file(tmp_path: Path) -> None:
    hierarchy = cgroups.detect(*v1_host(tmp_path))
    assert hierarchy is not None
    group = hierarchy.make("run-0")
    (tmp_path / "memory/own/rollmesh-sandbox-run-0/tasks").touch()
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError, match="pids/rollmesh-sandbox-run-0/tasks"):
        group.enter(LIMITS)
    assert set(os.listdir("/proc/self/fd")) == before


def test_leftovers_are_known_by_name(tmp_path: Path) -> None:
    hierarchy = cgroups.detect(*v1_host(tmp_path))
    assert hierarchy is not None
    hierarchy.make("old-0")
    hierarchy.make("new-0")
    assert cgroups.remove_all(hierarchy.find("old-")) == 2
    assert [path.name for path in hierarchy.find("")] == ["rollmesh-sandbox-new-0"] * 2
