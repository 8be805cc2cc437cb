"""The trace of one episode, from the span files of a run, as a tree with times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from rollmesh.mesh.joined_nodes import read_joined_folders
from rollmesh.shared.errors import NotFound
from rollmesh.shared.telemetry.span_file import FOLDER, SpanRecord, read_spans
from rollmesh.shared.telemetry.tracing import EPISODE

COMMIT = "commit"
_HIDDEN = ("rpc.", "rollmesh.episode", "rollmesh.run", "rollmesh.lease")
"""Prefixes of attributes that the head of the tree or the name of the span already shows."""


def load_trace(run_dir: Path, episode: str = "") -> list[SpanRecord]:
    """Return the spans of the last attempt of an episode, root first. Default: the newest trained episode, else the
    newest one.

    `episode` may also be a trace id, as in logs. Raises NotFound.
    """
    roots: dict[str, SpanRecord] = {}
    committed: set[str] = set()
    for span in _spans(run_dir):
        if EPISODE in span.attributes and not span.parent:
            roots[span.trace] = span
        elif span.name == COMMIT:
            committed.add(span.trace)
    wanted = [r for r in roots.values() if not episode or episode in (r.trace, r.attributes[EPISODE])]
    if not wanted:
        raise _not_found(run_dir, episode, bool(roots))
    chosen = max(wanted, key=lambda root: (not episode and root.trace in committed, root.start_unix_ns))
    spans = [span for span in _spans(run_dir) if span.trace == chosen.trace]
    return sorted(spans, key=lambda span: (span.span != chosen.span, span.start_unix_ns))


def _spans(run_dir: Path) -> Iterator[SpanRecord]:
    """Yield the spans of the processes of the run, and of joined nodes whose folders this host can read."""
    yield from read_spans(run_dir / FOLDER)
    for joined in read_joined_folders(run_dir):
        yield from read_spans(Path(joined.folder))


def to_json(spans: Sequence[SpanRecord]) -> str:
    """Return the spans as a JSON array."""
    return msgspec.json.format(msgspec.json.encode(list(spans)), indent=2).decode()


def to_text(spans: Sequence[SpanRecord]) -> str:
    """Return a tree with start (relative to the root), duration, name and process of each span."""
    root = spans[0]
    head = f"episode {root.attributes[EPISODE]} of run {root.attributes.get('rollmesh.run', '?')}, trace {root.trace}"
    rows = list(_rows(root, spans, "", ""))
    known = {span.span for span in spans}
    for stray in spans[1:]:
        if stray.parent not in known:  # the process of its parent was killed, or has not written it yet
            rows += _rows(stray, spans, "? ", "  ")
    width = max(len(name) for name, _ in rows)
    lines = [f"{'began, ms':>10} {'took, ms':>10}  span"]
    for name, span in rows:
        began_ms, took_ms = (span.start_unix_ns - root.start_unix_ns) / 1e6, span.duration_ns / 1e6
        lines.append(f"{began_ms:10.1f} {took_ms:10.1f}  {name:<{width}}  {_about(span)}".rstrip())
    return "\n".join([head, *lines])


def _rows(span: SpanRecord, spans: Sequence[SpanRecord], first: str, further: str) -> Iterator[tuple[str, SpanRecord]]:
    yield first + span.name, span
    children = [child for child in spans if child.parent == span.span]
    for child in children:
        last = child is children[-1]
        yield from _rows(child, spans, further + ("└─ " if last else "├─ "), further + ("   " if last else "│  "))


def _about(span: SpanRecord) -> str:
    where = f"{span.service}@{span.process}" if span.process else span.service
    known = [
        f"{name.removeprefix('rollmesh.')}={f'{value:.3g}' if isinstance(value, float) else value}"
        for name, value in span.attributes.items()
        if not name.startswith(_HIDDEN)
    ]
    failed = [f"FAILED {span.error}"] if span.error else []
    return "  ".join([where, *known, *failed])


def _not_found(run_dir: Path, episode: str, any_episode: bool) -> NotFound:
    if any_episode:
        unread = [one for one in read_joined_folders(run_dir) if not Path(one.folder).is_dir()]
        elsewhere = "".join(
            f"; or {one.node} ran it, whose spans are on host {one.host} in {one.folder}: copy them into "
            f"{run_dir / FOLDER}"
            for one in unread
        )
        return NotFound(
            f"{run_dir / FOLDER} holds no trace of episode {episode!r}: it was not sampled (telemetry.sample_ratio), "
            "its spans "
            f"are not written yet, or the file has been replaced since (telemetry.trace_file_bytes_max){elsewhere}"
        )
    return NotFound(
        f"{run_dir / FOLDER} holds no traces; run with telemetry.traces=file (an OTLP collector keeps its own)"
    )
