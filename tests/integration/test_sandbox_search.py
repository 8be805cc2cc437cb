"""The search tools, from an agent's tools over a real service into a real jail, on a corpus."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import msgspec
import pytest
import yaml

from rollmesh.services.rollout.agent import ToolResult
from rollmesh.services.rollout.config import ToolConfig
from rollmesh.services.rollout.tools import ToolBox
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.node import SandboxNode
from rollmesh.shared.clients.sandbox import SandboxClient
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.domain.trajectory import EpisodeKey
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.server import ServerConfig

ACCESS = Access(token="t")
DOCUMENTS = [
    {"id": "ada", "url": "https://wiki.test/Ada", "title": "Ada Lovelace", "text": "Wrote the first program, for a loom-like engine."},
    {"id": "babbage", "url": "https://wiki.test/Babbage", "title": "Charles Babbage", "text": "Designed the analytical engine."},
    {"id": "long", "title": "A long one", "text": "".join(f"{number:04d} " for number in range(2000))},
    {"id": "bare", "text": "<b>Markup of a corpus is text</b>"},
]  # fmt: skip
CONFIG = """
sandbox:
  profiles:
    search: {{tools: [rollmesh.sandbox_runtime.tools.search], egress: library}}
    python: {{}}
  egress:
    library: {{retrieval: {{backend: {{name: corpus, options: {{path: {corpus}}}}}, page_chars_max: 1000{extra}}}}}
rollout:
  tools:
    search: {{profile: search, function: search}}
    browse: {{profile: search, function: browse}}
    retrieve: {{profile: search, function: retrieve}}
    python: {{profile: python}}
"""


class Parts(msgspec.Struct, forbid_unknown_fields=True):
    """Return the two sections of the configuration of a search tool."""

    sandbox: SandboxConfig
    rollout: dict[str, dict[str, ToolConfig]]


def connect(address: str) -> grpc.aio.Channel:
    return open_channel(address, access=ACCESS)


def parts(folder: Path, extra: str = "") -> Parts:
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    return msgspec.convert(yaml.safe_load(CONFIG.format(corpus=corpus, extra=extra)), Parts)


@asynccontextmanager
async def tool_box(folder: Path, made: Parts) -> AsyncIterator[ToolBox]:
    server = ServerConfig(stop_s=0.0)
    async with SandboxNode(made.sandbox, node_id="a", access=ACCESS, state_dir=folder / "state", server=server) as node:
        client = SandboxClient(lambda: [node.address], connect, SystemClock())
        tools = made.rollout["tools"]
        try:
            async with ToolBox(
                client, tools, list(tools), EpisodeKey(run="run", task="t", group="g", episode="episode"), 60.0
            ) as box:
                yield box
        finally:
            await client.close()


@pytest.mark.row("S092")
async def test_agent_searches_browses_and_retrieves_by_config_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rollmesh.services.sandbox.egress.proxy")
    async with tool_box(tmp_path, parts(tmp_path)) as box:
        found = await box.call("search", "who designed an engine?")
        assert found.ok
        assert found.text.startswith("[1] Charles Babbage\nid: babbage\nurl: https://wiki.test/Babbage\nDesigned the")
        assert "[2] Ada Lovelace\nid: ada" in found.text
        assert (await box.call("browse", "https://wiki.test/Ada")).text.startswith("Ada Lovelace\n\nWrote the first")
        assert (await box.call("retrieve", "bare")).text == "<b>Markup of a corpus is text</b>"
        assert (await box.call("search", "nonexistentword")).text == "no results"
    lines = [json.loads(record.getMessage().removeprefix("egress ")) for record in caplog.records]
    assert {line["session"] for line in lines} == {"run.episode.1.1"}, "a sample's evidence is found by its episode"
    assert [line["url"].partition("?")[0] for line in lines] == ["/search", "/browse", "/retrieve", "/search"]
    assert all(len(line["sha256"]) == 64 and line["status"] == 200 for line in lines)


async def test_long_document_comes_in_pieces(tmp_path: Path) -> None:
    async with tool_box(tmp_path, parts(tmp_path)) as box:
        text, wanted = "", "long"
        for _ in range(10):
            piece = (await box.call("retrieve", wanted)).text
            body, _, rest = piece.partition("\n[")
            text += body
            if not rest:
                break
            wanted = rest.partition("retrieve: ")[2].removesuffix("]")
        assert text == "A long one\n\n" + str(DOCUMENTS[2]["text"])
        assert (await box.call("retrieve", "long @99999")).text == ""


async def test_what_cannot_be_found_or_asked_is_said_in_clear_text(tmp_path: Path) -> None:
    async with tool_box(tmp_path, parts(tmp_path)) as box:
        cases = [
            ("retrieve", "missing", "the corpus has no document with id 'missing'"),
            ("browse", "https://elsewhere.test/", "the corpus has no document with url"),
            ("search", "   ", "takes one parameter, `q`"),
            ("search", "x" * 501, "exceeds 500 characters"),
        ]
        for tool, text, why in cases:
            result = await box.call(tool, text)
            assert not result.ok
            assert result.text.startswith("error: EgressError: egress refused by rule"), result
            assert why in result.text
        nothing = [await box.call("search", text) for text in ('"', "a OR (", "NEAR(", "* ^", "title:", "_", "'; DROP")]
        assert all(result.ok for result in nothing), "no query language reaches the index"


async def test_jail_of_another_profile_reaches_no_corpus(tmp_path: Path) -> None:
    async with tool_box(tmp_path, parts(tmp_path)) as box:
        assert (await box.call("search", "engine")).ok
        probe = "import os, socket; [socket.socket(fileno=os.dup(fd)).send(b'c') for fd in range(4, 20)]"
        assert "Bad file descriptor" in (await box.call("python", probe)).text


async def test_index_outlives_the_node_and_follows_the_corpus(tmp_path: Path) -> None:
    async def searched() -> tuple[ToolResult, dict[str, int]]:
        async with tool_box(tmp_path, parts(tmp_path)) as box:
            result = await box.call("search", "engine program")
        indexes = (tmp_path / "state" / "egress").glob("corpus-*.sqlite")
        return result, {path.name: path.stat().st_ino for path in indexes}

    first, index = await searched()
    assert (await searched()) == (first, index)
    DOCUMENTS.append({"id": "new", "text": "engine program"})
    try:
        changed, indexes = await searched()
    finally:
        del DOCUMENTS[-1]
    assert changed != first
    assert index.items() < indexes.items()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"id": "ada", "text": "again"}', "the id 'ada' is duplicated"),
        ('{"id": 1}', "not a document"),
        ("{", "not a document"),
        pytest.param("[" * 100_000, "not a document", id="nested"),
    ],
)
async def test_broken_corpus_stops_the_start_and_names_the_line(tmp_path: Path, line: str, why: str) -> None:
    made = parts(tmp_path)
    with (tmp_path / "corpus.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match=rf"corpus\.jsonl:5: {why}"):
        async with tool_box(tmp_path, made):
            pass
    assert not list((tmp_path / "state").rglob("corpus-*"))


async def test_missing_corpus_stops_the_start(tmp_path: Path) -> None:
    made = parts(tmp_path)
    await asyncio.to_thread((tmp_path / "corpus.jsonl").unlink)
    with pytest.raises(ConfigError, match="cannot be indexed"):
        async with tool_box(tmp_path, made):
            pass
