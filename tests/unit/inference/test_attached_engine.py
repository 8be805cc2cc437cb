"""Failures, checks and boundaries of an engine that attaches to a server. The port's contract is in
`tests/conformance`."""

import ast
import asyncio
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.services.inference.engine import (
    INFERENCE_ENGINES,
    EngineBroken,
    GenerateDelta,
    GenerateRequest,
    KvPolicy,
)
from rollmesh.services.inference.engines.attached import weight_folders
from rollmesh.services.inference.engines.attached.sglang import VERSION, SglangConfig, SglangEngine
from rollmesh.services.inference.engines.attached.weight_folders import version_label
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import FinishReason, SamplingParams
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import ConfigError, Unavailable
from rollmesh.testing import fake_sglang_server
from rollmesh.testing.fake_sglang_server import FakeSglangServer
from tests.bigram import bigram_model

VOCAB = 40
CONTEXT = 200
PROMPT = [3, 1, 4, 1, 5]
KEY = "a-key-that-must-not-be-shown"


def version(step: int) -> PolicyVersion:
    return PolicyVersion(policy="main", step=step, weights_digest=f"d{step}")


@dataclass
class Received:
    """The deltas of one request."""

    deltas: list[GenerateDelta] = field(default_factory=list)
    first: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def emit(self, delta: GenerateDelta) -> None:
        assert not self.ended.is_set()
        self.deltas.append(delta)
        self.first.set()
        if delta.finish is not None:
            self.ended.set()

    async def end(self) -> GenerateDelta:
        await asyncio.wait_for(self.ended.wait(), 10)
        return self.deltas[-1]

    @property
    def tokens(self) -> list[int]:
        return [int(token) for delta in self.deltas for token in delta.token_ids]


@dataclass
class World:
    """A server and an engine that attaches to it."""

    folder: Path
    server: FakeSglangServer
    engine: SglangEngine

    async def prepare(self, step: int) -> None:
        await self.engine.prepare(version(step), {"model.safetensors": self.folder / f"{step % 2}.safetensors"})

    async def activate(self, step: int) -> None:
        await self.prepare(step)
        await self.engine.activate(version(step), KvPolicy.RECOMPUTE)

    def submit(
        self, name: str = "r", *, outputs: tuple[str, ...] = (), pinned: int | None = None, **params: Any
    ) -> Received:
        received = Received()
        request = GenerateRequest(
            request_id=name,
            token_ids=np.array(PROMPT, np.int32),
            params=SamplingParams(**{"max_tokens": 150, "seed": 1} | params),
            outputs=outputs,
            version=None if pinned is None else version(pinned),
        )
        self.engine.submit(request, received.emit)
        return received

    async def running(self, **options: Any) -> Received:
        """Return a request whose first tokens have arrived."""
        received = self.submit(**options)
        await asyncio.wait_for(received.first.wait(), 10)
        return received


Open = Callable[..., Awaitable[World]]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Open]:
    worlds: list[World] = []

    async def make(*, start: bool = True, options: dict[str, Any] | None = None, **flags: Any) -> World:
        model = bigram_model(tmp_path, VOCAB, CONTEXT)
        server = FakeSglangServer(model, **flags)
        await server.start()
        limits = {
            "context_max": CONTEXT,
            "flush_tokens": 4,
            "call_s": 2.0,
            "connect_s": 0.5,
            "poll_s": 0.05,
            "dead_s": 0.5,
        }
        settings = {"url": server.url, "model": str(model), "weights_dir": str(tmp_path / "shared")} | limits
        one = World(tmp_path, server, SglangEngine(SglangConfig(**settings | (options or {}))))
        worlds.append(one)
        if start:
            await one.engine.start()
            await one.activate(0)
        return one

    yield make
    for one in worlds:
        await one.engine.close()
        await one.server.stop()


async def until(condition: Callable[[], object]) -> None:
    """Polls: what it waits for happens in the server's own time."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


# Failures of the server -----------------------------------------------------------------------------------------------


async def test_a_dead_server_ends_requests_at_once_and_breaks_the_engine_in_time(world: Open) -> None:
    one = await world(step_s=0.01)
    received = await one.running()
    await one.server.stop()
    last = await received.end()
    assert last.finish is FinishReason.ERROR
    assert one.server.url in last.error
    await until(lambda: broken(one))
    assert one.engine.load().num_running == one.engine.load().num_waiting == 0
    with pytest.raises(EngineBroken, match=r"no response from the server for dead_s = 0\.5.*restart the node"):
        await one.engine.score([np.array(PROMPT, np.int32)])


def broken(one: World) -> bool:
    try:
        one.submit("probe")
    except EngineBroken:
        return True
    except ValueError:  # the probe of an earlier call is still running
        return False
    one.engine.cancel("probe")
    return False


async def test_a_server_that_stops_responding_ends_the_request_after_idle_s(world: Open) -> None:
    one = await world(options={"idle_s": 0.3, "dead_s": 60.0})
    one.server.hang = True
    last = await one.submit().end()
    assert (last.finish, "no data within 0.3 s" in last.error) == (FinishReason.ERROR, True)


async def test_weights_of_another_client_break_the_engine(world: Open) -> None:
    one = await world()
    one.server.set_version("theirs")
    await until(lambda: broken(one))
    with pytest.raises(EngineBroken, match="now has weights 'theirs', not 'rollmesh-0.0-"):
        one.submit()


async def test_tokens_of_other_weights_end_the_request_with_an_error(world: Open) -> None:
    one = await world(step_s=0.002, options={"poll_s": 60.0})
    received = await one.running(max_tokens=60)
    one.server.set_version("theirs")
    last = await received.end()
    assert (last.finish, "sampled with weights ['theirs']" in last.error) == (FinishReason.ERROR, True)


async def test_a_score_under_other_weights_is_not_of_the_version(world: Open) -> None:
    one = await world(options={"poll_s": 60.0})
    one.server.set_version("theirs")
    (result,) = await one.engine.score([np.array(PROMPT, np.int32)])
    assert result.version != version(0)


async def test_a_failed_update_breaks_the_engine_with_the_servers_words(world: Open) -> None:
    one = await world(step_s=0.01)
    received = await one.running()
    one.server.fail_update = "no such folder"
    with pytest.raises(EngineBroken, match=r"update of the server to main@1\.0 failed.*no such folder.*weights_dir"):
        await one.activate(1)
    assert (await received.end()).finish is FinishReason.ERROR
    assert one.engine.active == version(0)
    with pytest.raises(EngineBroken, match="restart server and node"):
        one.submit()


# Requests -------------------------------------------------------------------------------------------------------------


async def test_an_ended_request_holds_no_memory_at_the_server(world: Open) -> None:
    one = await world(step_s=0.005)
    cancelled, beside = await one.running(name="a"), await one.running(name="b")
    one.engine.cancel("a")
    assert (await cancelled.end()).finish is FinishReason.CANCELLED
    await until(lambda: len(one.server.running) == 1)
    assert one.server.num_aborted == 1
    assert (await beside.end()).finish is FinishReason.LENGTH


async def test_a_stop_string_ends_the_request_at_the_server(world: Open) -> None:
    one = await world(start=False, step_s=0.005)
    vocabulary = {chr(65 + i): i for i in range(VOCAB)}
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "A"}}
    (one.folder / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    await one.engine.start()
    await one.activate(0)
    free = one.submit(max_tokens=40)
    await free.end()
    received = one.submit(stop=(chr(65 + free.tokens[9]),))
    assert (await received.end()).finish is FinishReason.STOP
    assert received.tokens == free.tokens[: free.tokens.index(free.tokens[9]) + 1]
    await until(lambda: not one.server.running)


async def test_an_end_token_that_the_request_does_not_name_does_not_end_it(world: Open) -> None:
    one = await world()
    free = one.submit("free", max_tokens=80)
    await free.end()
    await one.engine.close()
    await one.server.stop()
    other = await world(eos_token_id=free.tokens[20])
    before = other.server.num_served
    received = other.submit(max_tokens=80, stop_token_ids=(VOCAB - 1 if VOCAB - 1 not in free.tokens else 0,))
    last = await received.end()
    assert last.finish in (FinishReason.LENGTH, FinishReason.STOP)
    assert received.tokens == free.tokens[: len(received.tokens)]
    assert len(received.tokens) > 21
    assert other.server.num_served > before + 1


async def test_an_update_continues_requests_whose_parts_the_server_has_not_begun(world: Open) -> None:
    one = await world(step_s=0.01)
    one.server.hang = True
    received = one.submit(max_tokens=20)
    await until(lambda: one.engine.load().num_running)
    one.server.hang = False
    await one.activate(1)
    assert (await received.end()).finish is FinishReason.LENGTH
    assert {delta.version for delta in received.deltas} == {version(1)}


async def test_a_request_pinned_to_old_weights_is_cancelled_by_an_update(world: Open) -> None:
    one = await world(step_s=0.005)
    received = await one.running(pinned=0)
    await one.activate(1)
    assert (await received.end()).finish is FinishReason.CANCELLED
    assert {delta.version for delta in received.deltas} == {version(0)}
    with pytest.raises(ValueError, match="is not held"):
        one.submit(pinned=0)


async def test_a_truncation_without_exact_logprobs_is_rejected(world: Open) -> None:
    one = await world(sampling_mask_max_tokens=VOCAB - 1)
    with pytest.raises(ValueError, match=r"`top_k` must be in \[1, 39\] on SGLang, got 0"):
        one.submit(top_p=0.9)
    assert (await one.submit(top_p=0.9, top_k=VOCAB - 1, max_tokens=5).end()).finish is FinishReason.LENGTH


async def test_routed_experts_have_a_row_per_token_across_an_update(world: Open) -> None:
    one = await world(step_s=0.005, options={"routed_experts": True})
    await one.prepare(1)
    received = one.submit(outputs=("routed_experts",))
    await until(lambda: one.engine.load().steps > 3)
    await one.engine.activate(version(1), KvPolicy.RECOMPUTE)
    await received.end()
    assert [delta.version.step for delta in received.deltas] == [0, 1]
    rows = np.concatenate([delta.arrays["routed_experts"] for delta in received.deltas])
    inputs = np.array([PROMPT[-1], *received.tokens[:-1]], np.int32)
    np.testing.assert_array_equal(rows, (inputs[:, None] + np.arange(6)) % 8)


# The start ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": VOCAB - 1}, "has another vocabulary than the 39 tokens"),
        ({"vocab_size": VOCAB + 1}, "has another vocabulary than the 41 tokens"),
        ({"model_type": "qwen3"}, "model_type 'bigram', the model folder has 'qwen3'"),
        ({"architectures": ["Other"]}, r"architectures \['BigramForCausalLM'\], the model folder has \['Other'\]"),
        ({"hidden_size": 8}, "model/config.json has hidden_size 4, the model folder has 8"),
        ({"vocab_size": None}, "must give `vocab_size`"),
        ({"max_position_embeddings": 100}, "200 is beyond the 100 positions"),
    ],
)
async def test_a_server_with_another_model_is_a_configuration_error(
    world: Open, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    one = await world(start=False)
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | fields))
    if "hidden_size" not in fields:  # else the server is on another machine
        (tmp_path / "model" / "config.json").unlink()
    engine = SglangEngine(
        SglangConfig(url=one.server.url, model=str(other), weights_dir=str(tmp_path / "w"), context_max=CONTEXT)
    )
    with pytest.raises(ConfigError, match=message):
        await engine.start()
    await engine.close()


@pytest.mark.parametrize(
    ("flags", "options", "message"),
    [
        ({"incremental_streaming_output": False}, {}, "start it with --incremental-streaming-output"),
        ({"enable_return_routed_experts": False}, {"routed_experts": True}, "lacks --enable-return-routed-experts"),
        ({"context_length": CONTEXT}, {}, "`context_max` must be < 194 .* got 200"),
        ({"api_key": KEY}, {}, "`api_key_file`: the server rejects the key"),
        ({}, {"api_key_file": "/no/such/file"}, "`api_key_file`: cannot read /no/such/file"),
        ({}, {"weights_dir": "/dev/null/x"}, "`weights_dir`: cannot use /dev/null/x"),
        ({}, {"model": "/no/such/model"}, "`model`: cannot read /no/such/model/config.json"),
    ],
)
async def test_a_server_or_option_that_does_not_fit_is_a_configuration_error(
    world: Open, flags: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    one = await world(start=False, options=options, **flags)
    with pytest.raises(ConfigError, match=message):
        await one.engine.start()


async def test_an_unreachable_server_is_reported_with_the_remedy(world: Open) -> None:
    one = await world(start=False)
    await one.server.stop()
    with pytest.raises(
        Unavailable, match=r"no server at `url` http://127\.0\.0\.1:\d+ within connect_s = 0\.5.*start it"
    ):
        await one.engine.start()


async def test_the_start_waits_for_a_server_that_comes_up(world: Open, tmp_path: Path) -> None:
    server = FakeSglangServer(bigram_model(tmp_path, VOCAB, CONTEXT))
    engine = SglangEngine(
        SglangConfig(
            url=server.url, model=str(tmp_path / "model"), weights_dir=str(tmp_path / "w"), context_max=CONTEXT
        )
    )
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    await server.start()
    await asyncio.wait_for(starting, 10)
    await engine.close()
    await server.stop()


async def test_the_key_is_sent_and_never_shown(world: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "key").write_text(KEY + "\n")
    with caplog.at_level(logging.DEBUG):
        one = await world(api_key=KEY, options={"api_key_file": str(tmp_path / "key")})
        received = await one.running()
        await one.server.stop()
        last = await received.end()
        await until(lambda: broken(one))
    assert KEY not in caplog.text + last.error


async def test_two_nodes_cannot_share_a_folder_of_weights(world: Open, tmp_path: Path) -> None:
    one = await world()
    second = SglangEngine(
        SglangConfig(
            url=one.server.url, model=str(tmp_path / "model"), weights_dir=str(tmp_path / "shared"), context_max=CONTEXT
        )
    )
    with pytest.raises(ConfigError, match="`weights_dir`: .*another node uses it"):
        await second.start()
    await second.close()
    assert (await one.submit(max_tokens=3).end()).finish is FinishReason.LENGTH


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://host", "http://user:pass@host:1", "http://host?x=1", ""])
def test_an_address_that_is_not_one_is_rejected(url: str) -> None:
    with pytest.raises(ConfigError, match="url"):
        INFERENCE_ENGINES.options(Extension("sglang", options={"url": url, "model": "m", "weights_dir": "/w"}))


# Weights on disk ------------------------------------------------------------------------------------------------------


async def test_prepared_versions_are_model_folders_and_are_removed(world: Open, tmp_path: Path) -> None:
    one = await world()
    shared = tmp_path / "shared"
    for step in (1, 2, 3):
        await one.engine.prepare(version(step), {"model.safetensors": tmp_path / "1.safetensors"})
    names = {version_label(version(step)) for step in (0, 2, 3)}  # the active one, and prepared_max = 2
    await until(lambda: {path.name for path in shared.glob("rollmesh-*")} == names)
    folder = shared / version_label(version(3))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    await one.engine.close()
    assert list(shared.glob("rollmesh-*")) == []


async def test_a_cancelled_prepare_leaves_no_folder(
    world: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await world()
    loop, begun, resume = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def copy_later(source: Path, target: Path) -> None:
        loop.call_soon_threadsafe(begun.set)
        assert resume.wait(10)
        shutil.copyfile(source, target)

    monkeypatch.setattr(weight_folders, "_link_or_copy", copy_later)
    preparing = asyncio.create_task(one.engine.prepare(version(1), {"m.safetensors": tmp_path / "1.safetensors"}))
    async with asyncio.timeout(10):
        await begun.wait()
        preparing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await preparing
        resume.set()
        await written(one)
    assert folders(tmp_path) == {version_label(version(0))}


async def test_a_prepare_that_fails_leaves_no_folder(
    world: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        target.touch()
        raise OSError("no space left")

    one = await world()
    monkeypatch.setattr(weight_folders, "_link_or_copy", full)
    with pytest.raises(EngineBroken, match="cannot write the weights to `weights_dir`.*no space left"):
        await one.engine.prepare(version(1), {"model.safetensors": tmp_path / "1.safetensors"})
    await written(one)
    assert folders(tmp_path) == {version_label(version(0))}


async def written(one: World) -> None:
    """Wait until the thread that writes and removes folders has done what it was given."""
    async with asyncio.timeout(10):
        await asyncio.get_running_loop().run_in_executor(one.engine._writer, lambda: None)


def folders(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "shared").glob("rollmesh-*")}


async def test_weights_are_compared_with_those_of_the_model_folder(world: Open, tmp_path: Path) -> None:
    one = await world(start=False)
    bigram_model(tmp_path, VOCAB + 1, CONTEXT)
    (tmp_path / "0.safetensors").rename(tmp_path / "model" / "model.safetensors")
    bigram_model(tmp_path, VOCAB, CONTEXT)
    await one.engine.start()
    with pytest.raises(Exception, match=r"bigram has shape \[40, 40\], the model needs \[41, 41\]"):
        await one.engine.prepare(version(0), {"model.safetensors": tmp_path / "0.safetensors"})


# The library and the source -------------------------------------------------------------------------------------------


def test_capabilities_are_known_without_the_http_library() -> None:
    program = (
        "import sys; sys.modules['aiohttp'] = None\n"
        "from rollmesh.services.inference.engine import INFERENCE_ENGINES as engines\n"
        "from rollmesh.shared.config.registry import Extension\n"
        "options = {'url': 'http://h:1', 'model': 'm', 'weights_dir': '/w'}\n"
        "for name in ('sglang', 'vllm_server'):\n"
        "    print(engines.make(Extension(name, options=options)).capabilities.outputs)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["('top_k', 'kept_mass')", "('top_k',)"]


def test_the_names_of_the_test_server_are_those_of_the_real_source() -> None:
    """Needs the unpacked wheel `sglang==0.5.23`, which needs no GPU: `ROLLMESH_SGLANG_SOURCE` is its folder
    `sglang`."""
    source = os.environ.get("ROLLMESH_SGLANG_SOURCE")
    if not source:
        pytest.skip("ROLLMESH_SGLANG_SOURCE is not set")
    types = _field_names(Path(source) / "srt/managers/io_struct.py") | _field_names(
        Path(source) / "srt/sampling/sampling_params.py"
    )
    assert types["GenerateReqInput"] >= fake_sglang_server.GENERATE_FIELDS
    assert types["SamplingParams"] >= fake_sglang_server.SAMPLING_FIELDS
    for name, fields in fake_sglang_server.BODY_FIELDS.items():
        assert fields <= types[name] | types["BaseReq"], name
    routes = (Path(source) / "srt/entrypoints/http_server.py").read_text()
    for route in ("model_info", "server_info", "generate", "abort_request", "pause_generation", "continue_generation"):
        assert f'"/{route}"' in routes
    assert '"/update_weights_from_disk"' in routes
    assert fake_sglang_server.VERSION == VERSION


def _field_names(path: Path) -> dict[str, frozenset[str]]:
    """Return the annotated names of each class of a file."""
    return {
        node.name: frozenset(
            entry.target.id
            for entry in node.body
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
        )
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
