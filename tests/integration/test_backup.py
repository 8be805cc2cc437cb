"""A run is backed up while it runs, restored elsewhere, and resumed; damaged files and existing streams are
rejected."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from rollmesh.app.backup.backup import BackupSource, back_up_folder, back_up_mesh, copied_files
from rollmesh.app.backup.backup_file import BackupAbout, BackupSummary, StreamPart, read_backup, verify_backup
from rollmesh.app.backup.restore import restore_backup
from rollmesh.app.config import TrainConfig
from rollmesh.app.folder_audit import audit_folder
from rollmesh.app.mesh_client import find_mesh
from rollmesh.app.open_run import open_resumed
from rollmesh.app.run_folder import RESTORING, new_folder, open_folder, origin_now
from rollmesh.mesh import Mesh
from rollmesh.mesh.run_layout import PAYLOADS
from rollmesh.services.coordinator.audit import audit_run
from rollmesh.shared.bus.bus import Bus, BusUnavailable, StreamSpec
from rollmesh.shared.bus.embedded_server import EmbeddedServer
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.errors import AlreadyExists, ConfigError, DataLoss, NotReady
from rollmesh.shared.store.payload_files import OFFSET_BITS, PayloadFiles, record_header
from rollmesh.testing.memory_bus import MemoryBus

from ..chaos.world import as_train_config, mesh_config, save_model_folder
from .test_mesh import Operator, policy

UPDATES = 10


def config(model: Path, payloads: str) -> TrainConfig:
    made = mesh_config(model, batch_groups=4, group_size=4, updates_max=UPDATES)
    return as_train_config(msgspec.structs.replace(made, bus=msgspec.structs.replace(made.bus, payloads=payloads)))


async def back_up(root: Path, file: Path) -> BackupSummary:
    return await asyncio.to_thread(back_up_folder, root, file)


@asynccontextmanager
async def bus_of(mesh: Mesh) -> AsyncIterator[Bus]:
    assert mesh.nats is not None
    bus = mesh.layout.with_payloads(await JetStreamBus.connect(mesh.nats.url, login=BusLogin.of(mesh.access)))
    try:
        yield bus
    finally:
        await bus.close()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("payloads", ["stream", "files"])
async def test_a_run_that_lost_its_folder_is_resumed_from_a_backup_and_its_checkpoints(
    tmp_path: Path, payloads: str
) -> None:
    made = config(save_model_folder(tmp_path / "tokenizer"), payloads)
    old = new_folder(made, origin_now(["test"], tmp_path), tmp_path / "old")
    async with Mesh(made, run_dir=old.root, base_dir=tmp_path) as mesh:
        await Operator(mesh).until(lambda state: policy(state).applied_step >= 5)
        with suppress(shutil.Error):  # an older checkpoint is removed meanwhile
            shutil.copytree(old.checkpoints, tmp_path / "checkpoints", ignore=shutil.ignore_patterns(".*"))
        summary = await back_up(
            old.root, tmp_path / "backup"
        )  # after the copy, so that the ledger has all updates of the checkpoint
    assert summary.num_records["ledger"] == summary.position > 10
    shutil.rmtree(old.root)

    assert await asyncio.to_thread(restore_backup, tmp_path / "backup", tmp_path / "new") == summary
    assert not (tmp_path / "new" / RESTORING).exists()
    assert list((tmp_path / "new/publishing").glob("*.manifest")), "the newest version can be published again"
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "new/checkpoints")
    again = (await asyncio.to_thread(open_resumed, tmp_path / "new", [f"run.updates_max={UPDATES + 1}"])).config
    async with Mesh(again, run_dir=tmp_path / "new", base_dir=tmp_path) as mesh:
        operator = Operator(mesh)
        await operator.finished()
        state = await operator.until(lambda state: bool(state.ended) and state.samples.live == 0)
        async with bus_of(mesh) as bus:
            audit = await audit_run(bus, made.run.name, checkpoint=tmp_path / "new/checkpoints")
    assert audit.holds, audit.to_text()
    assert state.ended == "UPDATES_MAX"
    assert audit.updates == UPDATES + 1, "a setting was changed at the resume"
    assert not state.samples.failed, "every payload that the ledger names is in the backup"


@pytest.mark.timeout(120)
async def test_a_mesh_is_backed_up_over_the_network_unless_its_payloads_are_files_of_its_host(tmp_path: Path) -> None:
    for payloads in ("stream", "files"):
        made = config(save_model_folder(tmp_path / payloads / "tokenizer"), payloads)
        made = msgspec.structs.replace(made, run=msgspec.structs.replace(made.run, updates_max=2))
        folder = new_folder(made, origin_now(["test"], tmp_path), tmp_path / payloads / "run")
        file = tmp_path / payloads / "backup"
        async with Mesh(made, run_dir=folder.root, base_dir=tmp_path) as mesh:
            address = find_mesh(None, mesh.gateway_address, folder.root / "token", [])
            if payloads == "files":
                with pytest.raises(
                    ConfigError, match=r"payloads in files of its host .* run `rollmesh backup FILE --run FOLDER`"
                ):
                    await asyncio.to_thread(back_up_mesh, address, file)
                assert not file.exists()
                continue
            await Operator(mesh).finished()
            summary = await asyncio.to_thread(back_up_mesh, address, file)
        assert summary.num_records["ledger"] == summary.position > 5
        assert summary.num_files == 0
        assert await asyncio.to_thread(restore_backup, file, tmp_path / payloads / "new") == summary
        holds, report = await asyncio.to_thread(audit_folder, tmp_path / payloads / "new")
        assert holds, report
        resumed = await asyncio.to_thread(open_resumed, tmp_path / payloads / "new", ["run.updates_max=3"])
        assert resumed.notes == ("changed: run.updates_max 2 -> 3",)


# Files and streams ----------------------------------------------------------------------------------------------------


@pytest.fixture
async def finished(tmp_path: Path) -> tuple[Path, BackupSummary]:
    """The backup of a short run."""
    made = config(save_model_folder(tmp_path / "tokenizer"), "stream")
    made = msgspec.structs.replace(made, run=msgspec.structs.replace(made.run, updates_max=2))
    folder = new_folder(made, origin_now(["test"], tmp_path), tmp_path / "old")
    async with Mesh(made, run_dir=folder.root, base_dir=tmp_path) as mesh:
        await Operator(mesh).finished()
    return tmp_path / "backup", await back_up(folder.root, tmp_path / "backup")


@pytest.mark.timeout(120)
async def test_a_damaged_file_is_rejected_before_anything_is_written(
    tmp_path: Path, finished: tuple[Path, BackupSummary]
) -> None:
    file, summary = finished
    assert verify_backup(file)[1] == summary
    whole = file.read_bytes()
    for at in range(len(whole) // 7, len(whole), len(whole) // 7):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DataLoss):
            restore_backup(file, tmp_path / "new")
    for length in (len(whole) - 1, len(whole) // 2):
        file.write_bytes(whole[:length])
        with pytest.raises(DataLoss, match="damaged or cut off at byte"):
            restore_backup(file, tmp_path / "new")
    at = whole.index(b"config_yaml") + len(b"config_yaml") + 8
    file.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])  # no UTF-8
    with pytest.raises(DataLoss, match="damaged or cut off at byte"):
        restore_backup(file, tmp_path / "new")
    file.write_bytes(whole + whole)
    with pytest.raises(DataLoss, match="damaged or cut off at byte"):
        restore_backup(file, tmp_path / "new")
    file.write_bytes(b"rollmesh backup\n" + whole)
    with pytest.raises(ConfigError, match="has format 1, and this version reads format 2; restore it with"):
        restore_backup(file, tmp_path / "new")
    file.write_bytes(b"something else")
    with pytest.raises(ConfigError, match="is not a file of `rollmesh backup`"):
        restore_backup(file, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(AlreadyExists, match="a backup never overwrites a file"):
        await back_up(tmp_path / "old", file)


@pytest.mark.timeout(120)
async def test_a_backup_is_a_tar_archive_and_other_members_are_rejected(
    tmp_path: Path, finished: tuple[Path, BackupSummary]
) -> None:
    file, _ = finished
    with tarfile.open(file) as tar:
        names = tar.getnames()
        contents = {name: (tar.extractfile(name) or io.BytesIO()).read() for name in names}
    assert (names[0], names[-1]) == ("about.json", "end.json")
    assert {name.partition("/")[0] for name in names[1:-1]} == {"samples", "ledger", "dead", "files"}
    bad = tmp_path / "bad"

    def offsets_with(added: str = "", kind: bytes = tarfile.REGTYPE) -> dict[str, int]:
        """Write the archive with a member before its end, and return where each member begins."""
        with tarfile.open(bad, "w") as tar:
            for member in (*names[:-1], *([added] if added else []), names[-1]):
                info = tarfile.TarInfo(member)
                data = contents.get(member, b"")
                info.size, info.type = len(data), kind if member == added else tarfile.REGTYPE
                info.mode = 0o600
                tar.addfile(info, io.BytesIO(data))
        with tarfile.open(bad) as tar:
            return {member.name: member.offset for member in tar.getmembers()}

    offsets_with()
    assert bad.read_bytes() == file.read_bytes()
    for name in ("../../escape", "/etc/escape"):
        offsets_with(f"files/{name}")
        with pytest.raises(ConfigError, match=f"contains the file name '{name}', which is outside of the run folder"):
            restore_backup(bad, tmp_path / "new")
    for name, kind, rejected in (
        ("files/link", tarfile.SYMTYPE, "files/link"),
        ("notes.txt", tarfile.REGTYPE, "notes.txt"),
        ("about.json", tarfile.REGTYPE, "about.json"),
        ("files/added", tarfile.REGTYPE, "end.json"),  # it has the digest of the members before it
    ):
        offsets = offsets_with(name, kind)
        with pytest.raises(DataLoss, match=f"damaged or cut off at byte {offsets[rejected]};"):
            restore_backup(bad, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.timeout(120)
async def test_a_restore_overwrites_no_stream_and_no_folder(
    tmp_path: Path, finished: tuple[Path, BackupSummary]
) -> None:
    file, _ = finished
    with pytest.raises(AlreadyExists, match="holds a run"):
        restore_backup(file, tmp_path / "old")
    async with EmbeddedServer(tmp_path / "nats", login=BusLogin(user="me", password="secret-password")) as server:
        (tmp_path / "login").write_text("me:secret-password\n")
        overrides = [f"bus.url={server.url}", f"bus.login_file={tmp_path / 'login'}"]
        await asyncio.to_thread(restore_backup, file, tmp_path / "first", overrides)
        with pytest.raises(AlreadyExists, match=r"RM_chaos_LEDGER exists; a restore never overwrites a stream"):
            await asyncio.to_thread(restore_backup, file, tmp_path / "second", overrides)


@pytest.mark.timeout(120)
async def test_an_interrupted_restore_is_not_a_run_and_is_continued(
    tmp_path: Path, finished: tuple[Path, BackupSummary], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, summary = finished
    async with EmbeddedServer(tmp_path / "nats", login=BusLogin(user="me", password="secret-password")) as server:
        (tmp_path / "login").write_text("me:secret-password\n")
        overrides = [f"bus.url={server.url}", f"bus.login_file={tmp_path / 'login'}"]
        end = JetStreamBus.end_restore

        async def fail(bus: JetStreamBus, spec: StreamSpec) -> None:
            if spec.name.endswith("LEDGER"):
                raise BusUnavailable("the connection was lost")
            await end(bus, spec)

        with monkeypatch.context() as patch:
            patch.setattr(JetStreamBus, "end_restore", fail)
            with pytest.raises(BusUnavailable):
                await asyncio.to_thread(restore_backup, file, tmp_path / "new", overrides)
        with pytest.raises(ConfigError, match="a restore into this folder is not complete; repeat"):
            open_folder(tmp_path / "new", [])
        bus = await JetStreamBus.connect(server.url, login=BusLogin(user="me", password="secret-password"))
        ledger = run_streams(summary.run).ledger
        with pytest.raises(NotReady, match="is being restored from a backup"):
            await bus.open(ledger.name)
        unlink = Path.unlink

        def killed(path: Path, missing_ok: bool = False) -> None:
            if path.name == RESTORING:
                raise BusUnavailable("the connection was lost")
            unlink(path, missing_ok=missing_ok)

        with monkeypatch.context() as patch:  # after the last step
            patch.setattr(Path, "unlink", killed)
            with pytest.raises(BusUnavailable):
                await asyncio.to_thread(restore_backup, file, tmp_path / "new", overrides)
        await asyncio.to_thread(restore_backup, file, tmp_path / "new", overrides)
        open_folder(tmp_path / "new", [])
        log = await bus.open(ledger.name)
        stored = [record async for record in log.read_range()]
        parts = [part for part in read_backup(file) if isinstance(part, StreamPart) and part.kind == "ledger"]
        backed_up = [record for part in parts for record in part.records]
        assert [(r.seq, r.msg_id, r.payload) for r in stored] == [(f.seq, f.msg_id, f.payload) for f in backed_up]
        assert await log.append(b"next", msg_id="next", expected_last_seq=summary.position) == summary.position + 1
        await (await bus.create(ledger)).read(1)  # with other limits, as a coordinator opens it
        samples = await (await bus.open(run_streams(summary.run).samples.name)).info()
        assert samples.first_seq >= 1
        await bus.close()


def test_payloads_that_are_kept_for_an_export_are_not_in_a_backup(tmp_path: Path) -> None:
    files = PayloadFiles(tmp_path / PAYLOADS / "r")
    (files.folder / "kept").mkdir(parents=True)
    number, descriptor = files.create()
    os.write(descriptor, record_header(number << OFFSET_BITS, b"x") + b"x")
    os.close(descriptor)
    files.keep(number, lambda _: True)
    about = BackupAbout(format=1, run="r", created_unix_s=0.0, config_yaml="", origin_json="", base_dir="")
    found = copied_files(BackupSource(bus=MemoryBus(), about=about, root=tmp_path))
    assert [name for _, name in found] == [f"{PAYLOADS}/r/{number:08d}.payloads"]
