"""List and replay the dead letters of a run through its RunService.

The gateway of a running run serves the calls. For a run that is not running, a coordinator is started for the call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from rollmesh.app.config import load_train_config
from rollmesh.app.mesh_client import MeshAddress
from rollmesh.app.run_folder import RunFolder
from rollmesh.mesh.mesh import Mesh
from rollmesh.mesh.run_layout import RunLayout, open_layout
from rollmesh.mesh.run_lock import RunFolderBusy, owned
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import events_pb2, run_pb2, run_pb2_grpc

CALL_S = 30.0
PAGE = 1000
NONE = "no dead letters"


async def list_dead(root: Path) -> list[run_pb2.ListedLetter]:
    """Return every dead letter, oldest first. Raises MeshError."""
    found: list[run_pb2.ListedLetter] = []
    async with _run_service(root) as (stub, run):
        while True:
            after = found[-1].letter.dead_id if found else 0
            with typed_errors():
                request = run_pb2.ListDeadRequest(run=run, after=after, num_max=PAGE)
                page = (await stub.ListDead(request, timeout=CALL_S)).letters
            found.extend(page)
            if not page:
                return found


async def replay_dead(root: Path, dead_ids: Sequence[int]) -> list[int]:
    """Requeue letters, all if none is named, and return the ids of the requeued ones. Raises MeshError."""
    async with _run_service(root) as (stub, run):
        with typed_errors():
            request = run_pb2.ReplayDeadRequest(run=run, dead_ids=dead_ids)
            return list((await stub.ReplayDead(request, timeout=CALL_S)).dead_ids)


def as_text(letters: Sequence[run_pb2.ListedLetter]) -> str:
    """Return a line per letter."""
    return "\n".join(map(_line, letters)) or NONE


def by_cause(letters: Sequence[run_pb2.ListedLetter]) -> str:
    """Return a line per cause, the most frequent first, with the number of its letters and the newest one."""
    found: dict[tuple[str, str], list[run_pb2.ListedLetter]] = {}
    for listed in letters:
        found.setdefault((_kind(listed.letter), listed.letter.cause), []).append(listed)
    lines = []
    for (kind, cause), group in sorted(found.items(), key=lambda item: -len(item[1])):
        replayed = sum(listed.replayed for listed in group)
        counts = f"{len(group):,} {kind}" + (f" ({replayed:,} replayed)" if replayed else "")
        lines.append(f"{counts}: {cause}\n    newest: letter {group[-1].letter.dead_id}, {_what(group[-1].letter)}")
    return "\n".join(lines) or NONE


def as_dicts(letters: Sequence[run_pb2.ListedLetter]) -> list[dict[str, Any]]:
    """Return the messages for --json, with their proto field names."""
    return [MessageToDict(letter, preserving_proto_field_name=True) for letter in letters]


def _line(listed: run_pb2.ListedLetter) -> str:
    letter = listed.letter
    tries = f" after {letter.tries} tries" if letter.tries else ""
    return (
        f"{letter.dead_id:>6}  {_kind(letter)} {_what(letter)}{tries}: "
        f"{letter.cause}{'  (replayed)' if listed.replayed else ''}"
    )


def _kind(letter: events_pb2.DeadLetter) -> str:
    return events_pb2.DeadKind.Name(letter.kind).removeprefix("DEAD_KIND_").lower()


def _what(letter: events_pb2.DeadLetter) -> str:
    return f"task {letter.task.task_id}, episode {letter.subject}" if letter.task.task_id else letter.subject


@asynccontextmanager
async def _run_service(root: Path) -> AsyncIterator[tuple[Any, str]]:
    folder = RunFolder(root)
    base_dir = Path(folder.read_origin().base_dir)
    config = load_train_config(folder.config)
    try:
        with owned(folder.root):
            async with (
                Mesh(config, run_dir=folder.root, base_dir=base_dir, services=["coordinator"]) as mesh,
                _stub(mesh.layout.coordinator, mesh.layout) as stub,
            ):
                yield stub, mesh.layout.run
    except RunFolderBusy:
        layout = open_layout(config, run_dir=folder.root, base_dir=base_dir)
        address = MeshAddress(address=layout.gateway, access=layout.access, run=folder.root)
        with address.running():
            async with _stub(layout.gateway, layout) as stub:
                yield stub, layout.run


@asynccontextmanager
async def _stub(address: str, layout: RunLayout) -> AsyncIterator[Any]:
    async with open_channel(address, access=layout.access) as channel:
        yield run_pb2_grpc.RunServiceStub(channel)
