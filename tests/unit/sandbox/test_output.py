"""Bounded output: retained bytes, cut bytes, and the flood limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.sandbox_runtime.output import BoundedText, OutputLimitError, clip


@pytest.fixture
def fd(tmp_path: Path) -> int:
    return os.open(tmp_path / "out", os.O_CREAT | os.O_RDWR | os.O_APPEND)


def test_stream_keeps_the_beginning_and_marks_the_cut(fd: int) -> None:
    stream = BoundedText(fd, keep=5, flood=100)
    print("abc", file=stream)
    assert stream.take() == ("abc\n", False)
    print("abcdefgh", file=stream)
    assert stream.take() == ("abcde", True)
    assert stream.take() == ("", False)
    os.close(fd)


def test_stream_stops_a_flood(fd: int) -> None:
    stream = BoundedText(fd, keep=5, flood=100)
    stream.write("x" * 100)
    with pytest.raises(OutputLimitError):
        stream.write("x")
    os.close(fd)


def test_writes_to_the_descriptor_are_taken_too_and_emptied(fd: int) -> None:
    stream = BoundedText(fd, keep=8, flood=100)
    os.write(fd, b"kid\xff")
    stream.write("a")
    assert stream.take() == ("akid\ufffd", False)
    os.write(fd, b"x" * 20)
    assert stream.take() == ("x" * 8, True)
    assert os.fstat(fd).st_size == 0
    os.close(fd)
    assert stream.take() == ("", False)


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=())), st.integers(1, 20))
def test_clip_is_valid_utf8_within_its_bytes(text: str, keep: int) -> None:
    kept, cut = clip(text, keep)
    plain = text.encode("utf-8", "replace")
    assert len(kept.encode()) <= keep
    assert cut == (len(plain) > keep)
    assert plain.startswith(kept.encode())
