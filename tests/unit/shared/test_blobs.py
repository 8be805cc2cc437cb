"""The blob store keeps verified blobs within its quota, as long as they have an owner."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from rollmesh.shared.errors import ConfigError, DiskFull, HashMismatch, InvalidInput, UnknownBlob
from rollmesh.shared.weights import blobs
from rollmesh.shared.weights.blobs import BlobStore
from rollmesh.shared.weights.digests import sha256_hex


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


async def put(store: BlobStore, data: bytes, owner: str = "a") -> str:
    digest = sha256_hex(data)
    await store.put(digest, len(data), pieces(data[:3], data[3:]), owner=owner)
    return digest


async def content(store: BlobStore, digest: str, offset: int = 0) -> bytes:
    return b"".join([piece async for piece in store.read(digest, offset=offset, piece_bytes=4)])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlobStore]:
    store = BlobStore(tmp_path / "blobs", quota_bytes=1000)
    store.start()
    yield store
    store.close()


def reopened(store: BlobStore, quota_bytes: int = 1000) -> BlobStore:
    store.close()
    again = BlobStore(store.directory, quota_bytes=quota_bytes)
    again.start()
    return again


@contextlib.asynccontextmanager
async def paused_hash(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[asyncio.Event, threading.Event]]:
    """Hash all files in threads, which hash when the second event is set. The first event is set when a thread waits
    for that."""
    loop, begun, resume = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def hash_later(path: Path) -> str:
        loop.call_soon_threadsafe(begun.set)
        assert resume.wait(10)
        return sha256_hex(path.read_bytes())

    monkeypatch.setattr(blobs, "LINKED_BYTES", 0)
    monkeypatch.setattr(blobs, "sha256_of_file", hash_later)
    try:
        async with asyncio.timeout(20):
            yield begun, resume
    finally:
        resume.set()


async def test_a_blob_is_read_back_from_any_offset(store: BlobStore) -> None:
    digest = await put(store, b"0123456789")
    assert await content(store, digest) == b"0123456789"
    assert await content(store, digest, 7) == b"789"
    assert store.missing([digest, "0" * 64]) == ["0" * 64]


async def test_wrong_bytes_are_never_visible_and_leave_nothing(store: BlobStore) -> None:
    digest = sha256_hex(b"right")
    with pytest.raises(HashMismatch):
        await store.put(digest, 5, pieces(b"wrong"), owner="a")
    with pytest.raises(UnknownBlob):
        await store.open(digest)
    assert store.used_bytes == 0
    assert not list(store.directory.glob("*.partial"))


async def test_a_blob_without_bytes_that_is_not_stored_is_rejected_with_the_remedy(store: BlobStore) -> None:
    with pytest.raises(HashMismatch, match="is not stored here and no bytes came; send its bytes"):
        await store.put(sha256_hex(b"four"), 4, pieces(b""), owner="a")


async def test_more_bytes_than_announced_are_refused(store: BlobStore) -> None:
    with pytest.raises(InvalidInput, match="must have 3 bytes in all, the announced size"):
        await store.put(sha256_hex(b"four"), 3, pieces(b"four"), owner="a")


async def test_a_blob_lives_as_long_as_its_last_owner(store: BlobStore) -> None:
    shared, own = await put(store, b"shared", "v1"), await put(store, b"only v1", "v1")
    assert await store.claim(shared, owner="v2")
    assert store.release("v1") == len(b"only v1")
    assert store.missing([shared, own]) == [own]
    assert store.release("v2") == len(b"shared")
    assert store.used_bytes == 0


async def test_the_quota_counts_blobs_being_written(store: BlobStore) -> None:
    await put(store, bytes(600))
    with store.partial("0" * 64, 300), pytest.raises(DiskFull) as caught:
        store.partial("1" * 64, 200)
    assert caught.value.metadata == {"used_bytes": "900", "quota_bytes": "1000"}
    with store.partial("1" * 64, 400):
        pass


async def test_owners_and_blobs_survive_a_restart(store: BlobStore) -> None:
    kept, dropped = await put(store, b"kept", "v2"), await put(store, b"dropped", "v1")
    store.release("v1")
    again = reopened(store)
    assert again.owners == {"v2"}
    assert again.missing([kept, dropped]) == [dropped]
    assert await content(again, kept) == b"kept"
    again.close()


async def test_a_restart_clears_partial_and_ownerless_files(store: BlobStore) -> None:
    orphan = sha256_hex(b"orphan")
    (store.directory / orphan).write_bytes(b"orphan")
    (store.directory / f"{orphan}.0.partial").write_bytes(b"or")
    again = reopened(store)
    assert again.missing([orphan]) == [orphan]
    assert {path.name for path in again.directory.iterdir()} == {"owners.jsonl", "lock"}
    again.close()


async def test_a_torn_journal_line_is_dropped(store: BlobStore) -> None:
    digest = await put(store, b"data", "v1")
    with (store.directory / "owners.jsonl").open("a") as journal:
        journal.write('{"verb": "drop", "own')
    again = reopened(store)
    assert again.missing([digest]) == []
    again.close()


async def test_damage_since_the_last_life_is_found_at_the_first_use(store: BlobStore) -> None:
    digest = await put(store, b"good bytes")
    (store.directory / digest).write_bytes(b"bad  bytes")
    again = reopened(store)
    with pytest.raises(HashMismatch):
        await again.open(digest)
    assert again.missing([digest]) == [digest]
    await put(again, b"good bytes")
    assert await content(again, digest) == b"good bytes"
    again.close()


async def test_a_damaged_blob_is_replaced_by_a_new_upload(store: BlobStore) -> None:
    digest = await put(store, b"good bytes")
    (store.directory / digest).write_bytes(b"bad  bytes")
    again = reopened(store)
    await put(again, b"good bytes", "b")
    assert await content(again, digest) == b"good bytes"
    again.close()


@pytest.mark.parametrize("use", [BlobStore.open, BlobStore.read_bytes, content])
async def test_a_blob_that_is_released_while_it_is_hashed_is_unknown(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch, use: Callable[[BlobStore, str], Awaitable[object]]
) -> None:
    digest = await put(store, b"data", "v1")
    again = reopened(store)
    async with paused_hash(monkeypatch) as (begun, resume):
        using = asyncio.ensure_future(use(again, digest))
        await begun.wait()
        again.release("v1")
        (again.directory / digest).write_bytes(b"data")  # what a thread reads that opened the blob before its deletion
        resume.set()
        with pytest.raises(UnknownBlob, match="released while it was hashed"):
            await using
        (again.directory / digest).write_bytes(b"other")
        with pytest.raises(HashMismatch):
            await again.claim(digest, owner="v2")
    again.close()


async def test_a_file_written_by_a_peer_is_hashed_before_it_counts(store: BlobStore) -> None:
    good, bad = sha256_hex(b"good"), sha256_hex(b"expected")
    (store.directory / good).write_bytes(b"good")
    (store.directory / bad).write_bytes(b"something else")
    assert await store.claim(good, owner="a")
    with pytest.raises(HashMismatch):
        await store.claim(bad, owner="a")
    assert not (store.directory / bad).exists()
    assert not await store.claim("0" * 64, owner="a")


async def test_adopting_a_file_links_it_and_checks_it(store: BlobStore, tmp_path: Path) -> None:
    file = tmp_path / "peer-blob"
    file.write_bytes(b"peer")
    assert await store.adopt(file, sha256_hex(b"peer"), owner="a")
    assert (store.directory / sha256_hex(b"peer")).stat().st_ino == file.stat().st_ino
    assert not await store.adopt(file, sha256_hex(b"other"), owner="a")
    assert not await store.adopt(tmp_path / "gone", sha256_hex(b"gone"), owner="a")
    assert not list(store.directory.glob("*.partial"))


async def test_an_adoption_that_is_cancelled_leaves_no_link(
    store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "peer-blob"
    file.write_bytes(b"peer")
    async with paused_hash(monkeypatch) as (begun, _):
        adopting = asyncio.create_task(store.adopt(file, sha256_hex(b"peer"), owner="a"))
        await begun.wait()
        adopting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adopting
    assert not list(store.directory.glob("*.partial"))


async def test_an_adoption_that_fails_leaves_no_link(
    store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(path: Path) -> str:
        raise OSError("input/output error")

    file = tmp_path / "peer-blob"
    file.write_bytes(b"peer")
    monkeypatch.setattr(blobs, "sha256_of_file", unreadable)
    with pytest.raises(OSError, match="input/output error"):
        await store.adopt(file, sha256_hex(b"peer"), owner="a")
    assert not list(store.directory.glob("*.partial"))


async def test_a_file_that_is_adopted_twice_leaves_no_link(store: BlobStore, tmp_path: Path) -> None:
    """To rename one link to a file onto another one keeps both."""
    file = tmp_path / "peer-blob"
    file.write_bytes(b"peer")
    for owner in ("a", "b"):
        assert await store.adopt(file, sha256_hex(b"peer"), owner=owner)
    assert await content(store, sha256_hex(b"peer")) == b"peer"
    assert not list(store.directory.glob("*.partial"))


async def test_two_writers_of_one_blob_both_succeed(store: BlobStore) -> None:
    await asyncio.gather(put(store, b"same", "a"), put(store, b"same", "b"))
    store.release("a")
    assert await content(store, sha256_hex(b"same")) == b"same"


def test_a_second_process_is_refused(store: BlobStore) -> None:
    with pytest.raises(ConfigError, match="another process"):
        BlobStore(store.directory, quota_bytes=1).start()


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "A" * 64, "0" * 63])
async def test_a_digest_that_is_no_digest_names_no_file(store: BlobStore, digest: str) -> None:
    with pytest.raises(InvalidInput, match="64 lower-case hex digits"):
        await store.open(digest)


async def followed(store: BlobStore, digest: str, into: bytearray, offset: int = 0) -> None:
    async for piece in store.read(digest, offset=offset, piece_bytes=4):
        into += piece


async def until_read(into: bytearray, num: int) -> None:
    async with asyncio.timeout(10):
        while len(into) < num:  # noqa: ASYNC110  # a reader has no event
            await asyncio.sleep(0)


@pytest.mark.parametrize("offset", [0, 3])
async def test_a_blob_is_read_while_it_is_written_and_its_last_piece_when_it_is_verified(
    store: BlobStore, offset: int
) -> None:
    data, read = b"0123456789ab", bytearray()
    with store.partial(sha256_hex(data), len(data)) as partial:
        await partial.write(data[:5])
        reader = asyncio.create_task(followed(store, sha256_hex(data), read, offset))
        await partial.write(data[5:])
        await until_read(read, 8)
        for _ in range(50):  # no more comes
            await asyncio.sleep(0)
        assert read == data[offset : offset + 8]
        await partial.commit(owner="a")
    await reader
    assert read == data[offset:]


@pytest.mark.parametrize("offset", [-1, 13])
async def test_an_offset_outside_of_a_blob_that_is_written_is_rejected(store: BlobStore, offset: int) -> None:
    data = b"0123456789ab"
    with store.partial(sha256_hex(data), len(data)) as partial:
        await partial.write(data)
        reader = asyncio.create_task(followed(store, sha256_hex(data), bytearray(), offset))
        await asyncio.sleep(0)
        await partial.commit(owner="a")
    with pytest.raises(InvalidInput):
        await reader


async def test_a_reader_does_not_get_all_of_a_wrong_blob(store: BlobStore) -> None:
    digest, read = sha256_hex(b"x" * 12), bytearray()
    with store.partial(digest, 12) as partial:
        await partial.write(b"wrongwrongwr")
        reader = asyncio.create_task(followed(store, digest, read))
        await until_read(read, 8)
        with pytest.raises(HashMismatch):
            await partial.commit(owner="a")
        partial.reset()
        with pytest.raises(HashMismatch, match="forwarded was wrong"):
            await reader
    assert len(read) == 8


async def test_a_reader_of_a_blob_whose_writer_stops_gets_an_error(store: BlobStore) -> None:
    digest = sha256_hex(b"x" * 12)
    with store.partial(digest, 12) as partial:
        await partial.write(b"x" * 6)
        reader = asyncio.create_task(followed(store, digest, bytearray()))
        await store.arrival(digest, 10.0)
    with pytest.raises(UnknownBlob):
        await reader


async def test_arrival_is_the_first_bytes_or_a_blob_that_was_made_at_once(store: BlobStore) -> None:
    data = b"x" * 12
    with store.partial(sha256_hex(data), 12) as partial:
        waiting = asyncio.create_task(store.arrival(sha256_hex(data), 10.0))
        await partial.write(data)
        assert not waiting.done(), "all bytes at once are not verified yet, and nothing follows"
        await partial.commit(owner="a")
    await waiting
    other = b"y" * 12
    with store.partial(sha256_hex(other), 12) as partial:
        waiting = asyncio.create_task(store.arrival(sha256_hex(other), 10.0))
        await partial.write(other[:6])
        await waiting
