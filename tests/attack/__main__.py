"""Run every attack against a real sandbox, as root and as an ordinary user. The exit status is 1 if one was not
contained.

    python -m tests.attack                                   # all attacks; results on the terminal
    python -m tests.attack --write docs/sandbox/attacks.md   # also the table in the document; or: make suite NAME=attack
    python -m tests.attack --only keyring fork               # attacks whose name or family contains one of the words
"""  # noqa: W505

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from . import suite, table
from .catalog import FAMILIES
from .table import Report

RATIO_MAX = 2.0
"""Maximum ratio of a neighbor's median call time under attack."""


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description="Attacks on the sandbox.")
    parser.add_argument("--write", type=Path, help="put the score table between the markers of this document")
    parser.add_argument("--only", nargs="+", default=[], help="play only attacks whose family or name has such a word")
    parser.add_argument("--json", type=Path, help="write this run's report there; then no second run as another user")
    parser.add_argument(
        "--no-controls", action="store_true", help="skip the plain processes that show the attacks work"
    )
    return parser.parse_args()


def main() -> int:
    arguments = _parse()
    attacks = suite.chosen(arguments.only)
    own = asyncio.run(suite.play(attacks, controls=not arguments.no_controls, report=_print_now))
    if arguments.json is not None:
        suite.save(own, arguments.json)
        return 0
    reports = [own]
    if suite.can_step_down():
        reports.append(suite.play_as_ordinary_user(arguments.only))
    if arguments.write is not None and not arguments.only:
        table.write(reports, arguments.write)
    return _conclude(reports)


def _print_now(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _conclude(reports: list[Report]) -> int:
    """Print a summary. Return whether all attacks were contained."""
    failed = False
    for report in reports:
        print(f"as {report.user}: {report.num_contained} of {len(report.rows)} attacks contained")
        for row in report.rows:
            if row.faults:
                failed = True
                print(f"  NOT CONTAINED {row.name}: {'; '.join(row.faults)}")
        for name, why in report.controls.items():
            if why:
                failed = True
                print(f"  control of {name} shows nothing: {why}")
        pace = report.pace
        ratio = pace.attacked_p50_ms / pace.quiet_p50_ms
        print(f"  neighbor: p50 {pace.quiet_p50_ms:.2f} -> {pace.attacked_p50_ms:.2f} ms ({ratio:.2f}x), "
              f"p99 {pace.quiet_p99_ms:.2f} -> {pace.attacked_p99_ms:.2f} ms; worst {pace.worst} {pace.worst_p50_ms:.2f} ms")  # fmt: skip
        failed |= ratio > RATIO_MAX
    print(f"{sum(len(family.attacks) for family in FAMILIES)} attacks in {len(FAMILIES)} families are known")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
