"""Plugin of pytest (`-p tests.slowest_files`): print the ten test files that take the most processor time.

The time of a test includes the processes that it started and waited for, so it does not depend on other load of the
host.
"""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Generator

import pytest

NUM_FILES = 10
_cpu_s: defaultdict[str, float] = defaultdict(float)
_wall_s: defaultdict[str, float] = defaultdict(float)
_before_s = 0.0


def used_s() -> float:
    """Processor time of this process and of its children that have ended, in seconds."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def pytest_runtest_logstart() -> None:
    """Start to count: the setup of a test begins here, and collection is not part of it."""
    global _before_s
    _before_s = used_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the time since the last report. xdist sends the attribute to the process that prints."""
    global _before_s
    report = yield
    now_s = used_s()
    report.__dict__["cpu_s"] = now_s - _before_s
    _before_s = now_s
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add a report to its file."""
    file = report.nodeid.split("::")[0]
    _cpu_s[file] += getattr(report, "cpu_s", 0.0)
    _wall_s[file] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the files."""
    terminalreporter.section(f"slowest files of {sum(_cpu_s.values()):.0f} s of processor time")
    for file, cpu_s in sorted(_cpu_s.items(), key=lambda item: -item[1])[:NUM_FILES]:
        terminalreporter.write_line(f"{cpu_s:7.1f} s of processor time, {_wall_s[file]:7.1f} s in all: {file}")
