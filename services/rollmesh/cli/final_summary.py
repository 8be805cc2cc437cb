"""The last words of a run on the terminal: what came of it and where it lies."""

from __future__ import annotations

from pathlib import Path

from rollmesh.cli.summary import Summary


def closing_words(summary: Summary) -> str:
    """A few lines, with the commands that go on from here."""
    folder = _shown(summary.folder)
    lines = [_result(summary)]
    if summary.ended:
        lines.append(f"  ended by    {summary.ended}")
    if summary.checkpoint is not None:
        lines.append(f"  checkpoint  {_shown(summary.checkpoint)}")
    lines.append(f"  report      {_shown(summary.report)}")
    if summary.outcome != "finished":
        lines.append(f"  go on       rollmesh train {folder}")
    lines.append(f"  prove it    rollmesh audit {folder}")
    return "\n".join(lines) + "\n"


def _result(summary: Summary) -> str:
    words = (
        f"{summary.run}, seed {summary.seed}: {summary.outcome} after {summary.updates} updates, {summary.wall_s:.0f} s"
    )
    before, after = summary.heldout_success_before, summary.heldout_success_after
    if before is not None and after is not None:
        words += f"; held-out success {before:.3f} -> {after:.3f}"
    return words


def _shown(path: str) -> str:
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path
