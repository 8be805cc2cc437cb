"""Private names and English messages of dependencies that this package uses, and the pins that keep them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import h11
import msgspec
import pytest
from h11._receivebuffer import ReceiveBuffer
from nats.aio.client import Client
from nats.aio.transport import TcpTransport

from rollmesh.shared.config.loader import _MISSING_FIELD, _MSGSPEC_ERROR, _UNKNOWN_FIELD

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["h11", "msgspec", "nats-py"])
def test_the_next_minor_version_is_excluded(name: str) -> None:
    major, minor, *_ = version(name).split(".")
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (pinned,) = (one for one in dependencies if re.match(rf"{name}\b", one))
    assert pinned.endswith(f",<{major}.{int(minor) + 1}"), "look at what uses private names before raising the pin"


def test_the_receive_buffer_of_h11() -> None:
    """`asgi_server` replaces it with a subclass that reads two of its attributes."""
    assert type(h11.Connection(h11.SERVER)._receive_buffer) is ReceiveBuffer
    buffer = ReceiveBuffer()
    buffer += b"GET / HTTP/1.1\r\nHost: x\r\n"
    assert buffer.maybe_extract_lines() is None
    assert bytes(buffer._data) == b"GET / HTTP/1.1\r\nHost: x\r\n"
    assert 0 < buffer._multiple_lines_search <= len(buffer._data)
    buffer += b"\r\n"
    assert buffer.maybe_extract_lines() == [bytearray(b"GET / HTTP/1.1"), bytearray(b"Host: x")]


def test_the_attributes_of_a_nats_client() -> None:
    """`link` aborts the connection of `_transport`, and reads the name of the cluster."""
    client = Client()
    assert client._transport is None
    assert client._server_info == {}
    transport: Any = TcpTransport
    assert transport()._io_writer is None


def test_the_bus_imports_nats_py_without_aiohttp_and_others_can_import_it() -> None:
    code = "import sys, rollmesh.shared.bus.jetstream_bus as bus; print('aiohttp' in sys.modules); import aiohttp"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


class Inner(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    needed: int
    choice: Literal["a", "b"] = "a"
    items: tuple[int, ...] = ()


class Outer(msgspec.Struct):
    inner: Inner
    named: dict[str, int] = {}


@pytest.mark.parametrize(
    ("tree", "what", "path"),
    [
        ({"inner": {"needed": 1, "other": 2}}, "Object contains unknown field `other`", ".inner"),
        ({"inner": {}}, "Object missing required field `needed`", ".inner"),
        ({"inner": {"needed": 1, "choice": "c"}}, "Invalid enum value 'c'", ".inner.choice"),
        ({"inner": {"needed": 1, "items": "x"}}, "Expected `array`, got `str`", ".inner.items"),
        ({"inner": {"needed": 1, "items": ["x"]}}, "Expected `int`, got `str`", ".inner.items[0]"),
        ({"inner": {"needed": 1}, "named": {"k": "x"}}, "Expected `int`, got `str`", ".named[...]"),
    ],
)
def test_the_messages_of_msgspec(tree: dict[str, Any], what: str, path: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(tree, Outer)
    match = _MSGSPEC_ERROR.match(str(caught.value))
    assert match is not None
    assert (match["what"], match["path"]) == (what, path)


def test_the_fields_in_messages_of_msgspec() -> None:
    for pattern, tree in ((_UNKNOWN_FIELD, {"needed": 1, "named": 2}), (_MISSING_FIELD, {"choice": "a"})):
        with pytest.raises(msgspec.ValidationError) as caught:
            msgspec.convert(tree, Inner)
        match = pattern.match(str(caught.value))
        assert match is not None
        assert match["name"] == ("named" if pattern is _UNKNOWN_FIELD else "needed")
