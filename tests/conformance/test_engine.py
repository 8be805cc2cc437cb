"""The contract of the engine port, tested on every engine through the port alone."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models

from rollmesh.services.inference.engine import (
    Engine,
    EngineBroken,
    EngineBusy,
    GenerateDelta,
    GenerateRequest,
    KvPolicy,
    WeightsMismatch,
)
from rollmesh.services.inference.engines.attached.sglang import SglangConfig, SglangEngine
from rollmesh.services.inference.engines.attached.vllm_server import VllmServerConfig, VllmServerEngine
from rollmesh.services.inference.engines.torch.config import Forward, TorchEngineConfig
from rollmesh.services.inference.engines.torch.engine import TorchEngine
from rollmesh.shared.codec.checks import check_segment
from rollmesh.shared.domain.outputs import NO_LOGPROB, NO_TOKEN, NUM_TOP, NUM_TOP_MAX, array_names
from rollmesh.shared.domain.trajectory import FinishReason, SamplingParams
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.testing.fake_engine import FakeEngine, FakeEngineConfig
from rollmesh.testing.fake_sglang_server import FakeSglangServer
from tests.bigram import bigram_model
from tests.conformance.vllm_kit import BLOCK_TOKENS, needs_vllm, shared_vllm
from tests.vllm_process import needs_vllm_server, shared_server, stop_servers

VOCAB = 112
CONTEXT = 240
PROMPT = [20, 33, 47, 5, 90, 61]


def version(step: int) -> PolicyVersion:
    """Versions alternate between the two sets of weights."""
    return PolicyVersion(policy="main", step=step, weights_digest=f"d{step % 2}")


@dataclass
class Call:
    """One request and its deltas."""

    request: GenerateRequest
    deltas: list[GenerateDelta] = field(default_factory=list)
    first: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def emit(self, delta: GenerateDelta) -> None:
        assert not self.ended.is_set(), "a delta after the last one"
        self.deltas.append(delta)
        if len(delta.token_ids):
            self.first.set()
        if delta.finish is not None:
            self.ended.set()

    @property
    def tokens(self) -> list[int]:
        return [int(token) for delta in self.deltas for token in delta.token_ids]

    @property
    def logprobs(self) -> list[float]:
        return [float(logprob) for delta in self.deltas for logprob in delta.logprobs]

    def array(self, name: str) -> NDArray[Any]:
        """Return an array of the whole answer, [n] or [n, k]."""
        return np.concatenate([delta.arrays[name] for delta in self.deltas if len(delta.token_ids)])

    @property
    def finish(self) -> FinishReason | None:
        return self.deltas[-1].finish


@dataclass
class Kit:
    """A started engine and weight files for it."""

    engine: Engine
    folder: Path
    file: Callable[[int], Path]
    rename: str
    """Name of one tensor of the files."""
    caches: bool = True
    """The engine keeps keys and values between steps."""
    forks: bool = True
    """A prefix that ends inside an earlier generation is found in the cache."""
    block: int = 1
    """The cache finds prefixes whose length is a multiple of this number of tokens."""
    tolerance: float = 1e-4
    """Largest difference between equal log-probs of two computations, in nats."""
    many_versions: bool = True
    """The engine can hold several sets of weights at once."""
    release: Callable[[], Awaitable[None]] | None = None
    """Ends the use of an engine that tests share; else it is closed."""
    calls: list[Call] = field(default_factory=list)
    keeps: bool = True
    """The engine can keep keys and values across an update."""
    keyed: bool = True
    """The draws depend on (seed, position), so that a resumed request continues as the whole one."""
    counts: bool = True
    """The engine tells how much of a prefix it found in its cache."""
    plain_logprobs: bool = True
    """The log-probs of the plain softmax come with every request."""
    server: FakeSglangServer | None = None
    """A server that must run before the engine starts."""

    def call(
        self,
        token_ids: Sequence[int],
        *,
        session: str = "",
        name: str = "",
        num_resumed: int = 0,
        outputs: tuple[str, ...] = (),
        pinned: int | None = None,
        num_top: int = NUM_TOP,
        **params: Any,
    ) -> Call:
        params.setdefault("max_tokens", 12)
        request = GenerateRequest(
            request_id=name or f"r{len(self.calls)}",
            token_ids=np.array(token_ids, np.int32),
            params=SamplingParams(**params),
            session=session,
            outputs=outputs,
            num_top=num_top,
            num_resumed=num_resumed,
            version=None if pinned is None else version(pinned),
        )
        call = Call(request)
        self.engine.submit(request, call.emit)
        self.calls.append(call)
        return call

    async def end(self, *calls: Call) -> None:
        for call in calls:
            await asyncio.wait_for(call.ended.wait(), 20)

    async def run(self, token_ids: Sequence[int], **options: Any) -> Call:
        call = self.call(token_ids, **options)
        await self.end(call)
        return call

    async def prepare(self, step: int) -> None:
        await self.engine.prepare(version(step), {"model.safetensors": self.file(step % 2)})

    async def activate(self, step: int, kv: KvPolicy = KvPolicy.RECOMPUTE, retain: Sequence[int] = ()) -> None:
        await self.prepare(step)
        await self.engine.activate(version(step), kv, [version(old) for old in retain])

    def changed_file(self, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
        state = load_file(self.file(0))
        change(state)
        path = self.folder / "changed.safetensors"
        save_file(state, path)
        return path


close_servers = pytest.fixture(scope="module", autouse=True)(stop_servers)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Create a folder per model with configuration and tokenizer, and two sets of weights in subfolders."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        OlmoeConfig,
        OlmoeForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    torch.set_num_threads(1)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "tie_word_embeddings": True, "initializer_range": 0.15}
    qwen3 = Qwen3Config(
        **sizes, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=96, max_position_embeddings=CONTEXT,
    )  # fmt: skip
    gpt2 = GPT2Config(**sizes, n_embd=32, n_layer=1, n_head=2, n_positions=CONTEXT)
    olmoe = OlmoeConfig(
        **sizes, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, num_experts=4,
        num_experts_per_tok=2, intermediate_size=16, max_position_embeddings=CONTEXT,
    )  # fmt: skip
    untied = Qwen3Config(
        **sizes | {"tie_word_embeddings": False}, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, intermediate_size=96, max_position_embeddings=CONTEXT + 16,
    )  # fmt: skip
    return {
        "olmoe": _checkpoint(tmp_path_factory.mktemp("olmoe"), OlmoeForCausalLM, olmoe),
        "untied": _checkpoint(tmp_path_factory.mktemp("untied"), Qwen3ForCausalLM, untied),
        "qwen3": _checkpoint(tmp_path_factory.mktemp("qwen3"), Qwen3ForCausalLM, qwen3),
        "gpt2": _checkpoint(tmp_path_factory.mktemp("gpt2"), GPT2LMHeadModel, gpt2),
    }


def _checkpoint(folder: Path, model_class: Any, config: Any) -> Path:
    for index in range(2):
        torch.manual_seed(index)
        model_class(config).save_pretrained(folder / str(index))
    config.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocab={chr(32 + i) if i < 95 else f"<|{i}|>": i for i in range(VOCAB)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    for each in (folder, folder / "0", folder / "1"):
        tokenizer.save(str(each / "tokenizer.json"))
    return folder


def torch_kit(forward: Forward, model: str, norm: str) -> Callable[..., Kit]:
    """Return a function that opens the torch engine with one of its forwards."""

    def kit(checkpoints: dict[str, Path], folder: Path, sizes: dict[str, Any]) -> Kit:
        checkpoint = checkpoints[model]
        config = TorchEngineConfig(model=str(checkpoint), context_max=CONTEXT, flush_tokens=3, forward=forward, **sizes)
        return Kit(
            TorchEngine(config),
            folder,
            lambda i: checkpoint / str(i) / "model.safetensors",
            norm,
            caches=forward != "recompute",
            forks=forward == "built_in",
        )

    return kit


def vllm_kit(checkpoints: dict[str, Path], folder: Path, sizes: dict[str, Any]) -> Kit:
    checkpoint = checkpoints["qwen3"]
    limits = {name: size for name, size in sizes.items() if name != "versions_max"}
    engine, release = shared_vllm(checkpoint, {"context_max": CONTEXT, "flush_tokens": 3, **limits})
    kit = Kit(engine, folder, lambda i: checkpoint / str(i) / "model.safetensors", "model.norm.weight")
    kit.block, kit.many_versions = BLOCK_TOKENS, False
    kit.release = lambda: release(kit.calls)
    return kit


def fake_kit(checkpoints: dict[str, Path], folder: Path, sizes: dict[str, Any]) -> Kit:
    save_file({"w": torch.zeros(4, 4)}, folder / "w.safetensors")
    config = FakeEngineConfig(vocab_size=VOCAB, context_max=CONTEXT, tokens_per_step=2, tensors={"w": (4, 4)}, **sizes)
    return Kit(FakeEngine(config), folder, lambda index: folder / "w.safetensors", "w")


def sglang_kit(checkpoints: dict[str, Path], folder: Path, sizes: dict[str, Any]) -> Kit:
    """Attach to a server of ours that has SGLang's types."""
    model = bigram_model(folder, VOCAB, CONTEXT)
    (model / "tokenizer.json").write_bytes((checkpoints["qwen3"] / "tokenizer.json").read_bytes())
    server = FakeSglangServer(model)
    config = SglangConfig(
        url=server.url, model=str(model), weights_dir=str(folder / "shared"), context_max=CONTEXT, flush_tokens=3,
        routed_experts=True, slots_max=sizes["slots_max"], queue_max=sizes["queue_max"],
    )  # fmt: skip
    files = [folder / f"{i}.safetensors" for i in range(2)]
    return Kit(
        SglangEngine(config), folder, files.__getitem__, "bigram", many_versions=False, keeps=False, plain_logprobs=False, server=server
    )  # fmt: skip


def vllm_server_kit(checkpoints: dict[str, Path], folder: Path, sizes: dict[str, Any]) -> Kit:
    """Attach to a real vLLM server, see `tests.vllm_process`."""
    model = checkpoints["untied"]
    config = VllmServerConfig(
        url=shared_server(model, CONTEXT + 1).url, model=str(model), weights_dir=str(folder / "shared"), context_max=CONTEXT,
        flush_tokens=3, slots_max=sizes["slots_max"], queue_max=sizes["queue_max"],
    )  # fmt: skip
    files = [model / str(i) / "model.safetensors" for i in range(2)]
    return Kit(
        VllmServerEngine(config), folder, files.__getitem__, "model.norm.weight", many_versions=False, keeps=False, keyed=False,
        counts=False, plain_logprobs=False,
    )  # fmt: skip


Build = Callable[..., Awaitable[Kit]]


ENGINES = {
    "fake": fake_kit,
    "torch": torch_kit("built_in", "qwen3", "model.norm.weight"),
    "cached": torch_kit("cached", "olmoe", "model.norm.weight"),
    "recompute": torch_kit("recompute", "gpt2", "transformer.ln_f.weight"),
    "vllm": vllm_kit,
    "sglang": sglang_kit,
    "vllm_server": vllm_server_kit,
}
MARKS = {"vllm": needs_vllm, "vllm_server": needs_vllm_server}

ENGINE_PARAMS = [pytest.param(kit, id=name, marks=MARKS.get(name, ())) for name, kit in ENGINES.items()]


@pytest.fixture(params=ENGINE_PARAMS)
async def build(request: pytest.FixtureRequest, checkpoints: dict[str, Path], tmp_path: Path) -> AsyncIterator[Build]:
    kits: list[Kit] = []

    async def make(*, slots_max: int = 16, queue_max: int = 64, active: bool = True, versions_max: int = 1) -> Kit:
        sizes = {"slots_max": slots_max, "queue_max": queue_max, "versions_max": versions_max}
        kit: Kit = request.param(checkpoints, tmp_path, sizes)
        if versions_max > 1 and not kit.many_versions:
            pytest.skip("this engine has one set of weights at once")
        assert kit.engine.capabilities.versions_max == versions_max
        if not active and kit.engine.active is not None:  # a shared engine, which has weights
            await kit.engine.close()
            kit = request.param(checkpoints, tmp_path, sizes)
        kits.append(kit)
        if kit.server is not None:
            await kit.server.start()
        await kit.engine.start()
        if active:
            await kit.activate(0)
        return kit

    yield make
    for kit in kits:
        await (kit.release or kit.engine.close)()
        if kit.server is not None:
            await kit.server.stop()


@pytest.fixture
async def kit(build: Build) -> Kit:
    return await build()


async def test_request_ends_once_at_max_tokens(kit: Kit) -> None:
    calls = [kit.call(PROMPT, seed=i, max_tokens=1 + 3 * i) for i in range(8)]
    await kit.end(*calls)
    for i, call in enumerate(calls):
        assert len(call.tokens) == len(call.logprobs) == 1 + 3 * i
        assert [delta.finish for delta in call.deltas[:-1]] == [None] * (len(call.deltas) - 1)
        assert call.finish is FinishReason.LENGTH
        assert {delta.version for delta in call.deltas} == {version(0)}
        assert {delta.kv_step_oldest for delta in call.deltas} == {0}


async def test_logprobs_agree_with_score(kit: Kit) -> None:
    plain = await kit.run(PROMPT, seed=1, max_tokens=30)
    shaped = await kit.run(PROMPT, seed=1, max_tokens=30, temperature=0.6, top_p=0.9, top_k=20)
    for call in (plain, shaped):
        (scored,) = await kit.engine.score([np.array(PROMPT + call.tokens, np.int32)])
        assert scored.version == version(0)
        assert scored.logprobs[0] == 0
        model = scored.logprobs[len(PROMPT) :]
        if call is plain or kit.plain_logprobs:
            np.testing.assert_allclose(model_logprobs(call), model, atol=1e-4)
    np.testing.assert_allclose(plain.logprobs, model_logprobs(plain), atol=1e-6)
    assert sum(shaped.logprobs) > sum(model)


SHAPES: dict[str, tuple[int, set[str]]] = {
    "entropy": (1, {"float32"}),
    "top_k_ids": (2, {"int32"}),
    "top_k_logprobs": (2, {"float32"}),
    "kept_mass": (1, {"float32"}),
    "hidden": (2, {"float16"}),
    "routed_experts": (2, {"uint8", "int32"}),
    "mean_logprob": (1, {"float32"}),
}
"""Dimensions and types of the arrays of the outputs that `rollmesh.shared.domain.outputs` defines."""


async def test_every_token_has_the_requested_outputs_and_no_others(kit: Kit) -> None:
    names = tuple(sorted(kit.engine.capabilities.outputs))
    some = [names[i : i + 1] for i in range(len(names))]
    calls = [kit.call(PROMPT, seed=i, outputs=wanted, max_tokens=9) for i, wanted in enumerate([(), names, *some])]
    await kit.activate(1)
    await kit.end(*calls)
    for call in calls:
        for delta in call.deltas:
            check_segment(delta.segment(), "segment", index=0, num_params=0)
            assert set(delta.arrays) == (set(array_names(call.request.outputs)) if len(delta.token_ids) else set())
            for name, values in delta.arrays.items():
                num_dimensions, dtypes = SHAPES.get(name, (values.ndim, {str(values.dtype)}))
                assert (values.ndim, str(values.dtype) in dtypes) == (num_dimensions, True), name
    assert (await kit.run(PROMPT, seed=0)).tokens == (await kit.run(PROMPT, seed=0, outputs=names)).tokens


async def test_a_request_for_an_unknown_output_is_rejected(kit: Kit) -> None:
    with pytest.raises(ValueError, match=r"outputs must be among .*got \[no_such_output\]"):
        kit.call(PROMPT, outputs=("no_such_output",))
    with pytest.raises(ValueError, match=r"outputs must be among .*got \[no_such_output\]"):
        await kit.engine.score([np.array(PROMPT, np.int32)], outputs=("no_such_output",))


@pytest.mark.parametrize("num", [0, NUM_TOP_MAX + 1])
async def test_a_k_outside_its_range_is_rejected(kit: Kit, num: int) -> None:
    needs(kit, "top_k")
    with pytest.raises(ValueError, match=f"num_top must be in .*got {num}"):
        kit.call(PROMPT, outputs=("top_k",), num_top=num)


def needs(kit: Kit, *outputs: str, score: bool = False) -> None:
    """Skip the test for an engine that does not declare these outputs."""
    declared = kit.engine.capabilities.score_outputs if score else kit.engine.capabilities.outputs
    if lacking := set(outputs) - set(declared):
        pytest.skip(f"the engine does not declare {', '.join(sorted(lacking))}")


async def test_the_most_likely_tokens_and_their_logprobs_are_those_of_the_sampling_distribution(kit: Kit) -> None:
    needs(kit, "top_k")
    few = await kit.run(PROMPT, seed=3, max_tokens=30, outputs=("top_k",), num_top=5)
    every = await kit.run(PROMPT, seed=3, max_tokens=30, outputs=("top_k",), num_top=VOCAB)
    ids, logprobs = every.array("top_k_ids"), every.array("top_k_logprobs")
    assert every.tokens == few.tokens
    assert (few.array("top_k_ids").shape, ids.shape) == ((30, 5), (30, VOCAB))
    assert (np.sort(ids, axis=1) == np.arange(VOCAB)).all()
    assert (np.diff(logprobs, axis=1) <= 0).all()
    np.testing.assert_allclose(np.exp(logprobs).sum(axis=1), 1.0, atol=kit.tolerance)
    drawn = np.take_along_axis(logprobs, (ids == np.array(every.tokens)[:, None]).argmax(axis=1)[:, None], axis=1)
    np.testing.assert_allclose(drawn[:, 0], every.logprobs, atol=kit.tolerance)
    np.testing.assert_allclose(few.array("top_k_logprobs"), logprobs[:, :5], atol=kit.tolerance)
    assert_same_ids(kit, few.array("top_k_ids"), ids[:, :5], logprobs[:, :5])


def assert_same_ids(kit: Kit, found: NDArray[Any], expected: NDArray[Any], logprobs: NDArray[Any]) -> None:
    """Compare ids where the log-probs beside them differ by more than the tolerance, so that the order is decided."""
    gaps = -np.diff(logprobs, axis=1) > 2 * kit.tolerance
    one = np.ones((len(gaps), 1), bool)
    decided = np.hstack((one, gaps)) & np.hstack((gaps, one))
    decided[:, -1] = False  # a tie with the next token, which is not among them, could decide it either way
    assert decided.any()
    np.testing.assert_array_equal(found[decided], expected[decided])


async def test_entropy_follows_from_all_logprobs(kit: Kit) -> None:
    needs(kit, "entropy", "top_k")
    shapes: list[dict[str, Any]] = [{}, {"temperature": 0.6}, {"top_p": 0.8, "top_k": 20}, {"temperature": 0.0}]
    calls = [
        kit.call(PROMPT, seed=4, max_tokens=20, outputs=("entropy", "top_k"), num_top=VOCAB, **shape)
        for shape in shapes
    ]
    await kit.end(*calls)
    for call in calls:
        logprobs = call.array("top_k_logprobs").astype(np.float64)
        expected = -(np.exp(logprobs) * logprobs).sum(axis=1)
        np.testing.assert_allclose(call.array("entropy"), expected, atol=10 * kit.tolerance)
        assert (call.array("entropy") > 0).any()


async def test_mean_logprob_is_that_of_all_logprobs_of_the_plain_softmax(kit: Kit) -> None:
    needs(kit, "mean_logprob", "top_k")
    call = await kit.run(PROMPT, seed=4, max_tokens=20, outputs=("mean_logprob", "top_k"), num_top=VOCAB)
    expected = call.array("top_k_logprobs").mean(axis=1)
    np.testing.assert_allclose(call.array("mean_logprob"), expected, atol=10 * kit.tolerance)


async def test_truncation_keeps_the_nucleus_and_its_mass_is_returned(kit: Kit) -> None:
    needs(kit, "top_k", "kept_mass")
    needs(kit, "top_k", score=True)
    temperature, top_p, top_k = 0.7, 0.8, 12
    call = await kit.run(
        PROMPT, seed=5, max_tokens=40, temperature=temperature, top_p=top_p, top_k=top_k,
        outputs=("top_k", "kept_mass"), num_top=top_k + 3,
    )  # fmt: skip
    ids, logprobs, mass = call.array("top_k_ids"), call.array("top_k_logprobs"), call.array("kept_mass")
    (scored,) = await kit.engine.score([np.array(PROMPT + call.tokens, np.int32)], outputs=("top_k",), num_top=VOCAB)
    for row, (token, logprob) in enumerate(zip(call.tokens, call.logprobs, strict=True)):
        plain = np.empty(VOCAB)
        plain[scored.arrays["top_k_ids"][len(PROMPT) + row]] = scored.arrays["top_k_logprobs"][len(PROMPT) + row]
        tempered = np.exp(plain / temperature) / np.exp(plain / temperature).sum()
        kept = ids[row][ids[row] != NO_TOKEN]
        assert 0 < len(kept) <= top_k
        assert (ids[row][len(kept) :] == NO_TOKEN).all()
        assert (logprobs[row][len(kept) :] == np.float32(NO_LOGPROB)).all()
        first = np.sort(tempered)[::-1][:top_k]
        shares = np.cumsum(first) / first.sum()  # of the nucleus among the first top_k tokens
        assert shares[len(kept) - 1] >= top_p - 1e-3
        assert len(kept) == 1 or shares[len(kept) - 2] < top_p + 1e-3
        np.testing.assert_allclose(mass[row], tempered[kept].sum(), atol=10 * kit.tolerance)
        np.testing.assert_allclose(
            np.exp(logprobs[row][: len(kept)]), tempered[kept] / tempered[kept].sum(), atol=10 * kit.tolerance
        )
        assert logprob == pytest.approx(logprobs[row][list(kept).index(token)], abs=kit.tolerance)
    assert (mass < 1).all()


@pytest.mark.parametrize("shape", [{}, {"temperature": 0.5}, {"temperature": 0.0, "top_p": 0.5, "top_k": 2}])
async def test_nothing_is_cut_off_without_truncation_and_in_greedy_requests(kit: Kit, shape: dict[str, Any]) -> None:
    needs(kit, "kept_mass")
    beside = kit.call(PROMPT, seed=9, max_tokens=30, top_p=0.5, outputs=("kept_mass",))
    call = await kit.run(PROMPT, seed=5, max_tokens=30, outputs=("kept_mass",), **shape)
    np.testing.assert_allclose(call.array("kept_mass"), 1.0, atol=1e-6)
    await kit.end(beside)
    assert (beside.array("kept_mass") < 1).all()


async def test_requests_of_one_batch_get_their_own_outputs(kit: Kit) -> None:
    names = tuple(sorted(kit.engine.capabilities.outputs))
    wishes = [(names, 3), (names, 40), ((), 1), *((names[i : i + 1], 1 + 2 * i) for i in range(len(names)))]

    def begin(number: int) -> Call:
        wanted, num = wishes[number]
        return kit.call(PROMPT, seed=number, max_tokens=10 + number, outputs=wanted, num_top=num, temperature=0.9)

    alone = [begin(number) for number in range(len(wishes))]
    for call in alone:
        await kit.end(call)
    together = [begin(number) for number in range(len(wishes))]
    await kit.end(*together)
    for one, other in zip(alone, together, strict=True):
        for name in array_names(one.request.outputs):
            assert one.array(name).shape == other.array(name).shape
            if name.startswith("top_k"):
                assert one.array(name).shape[1] == one.request.num_top
            if one.array(name).dtype.kind == "f":
                np.testing.assert_allclose(one.array(name), other.array(name), atol=50 * kit.tolerance)


async def test_score_returns_the_outputs_of_a_generation_at_temperature_1(kit: Kit) -> None:
    both = set(kit.engine.capabilities.outputs) & set(kit.engine.capabilities.score_outputs)
    if not both:
        pytest.skip("the engine does not declare an output of generation and score")
    names, prompts = tuple(sorted(both)), [PROMPT, [7, 8, 9], list(range(40, 65))]
    calls = [kit.call(prompt, seed=i, max_tokens=25, outputs=names, num_top=9) for i, prompt in enumerate(prompts)]
    await kit.end(*calls)
    rows = [np.array(prompt + call.tokens, np.int32) for prompt, call in zip(prompts, calls, strict=True)]
    scores = await kit.engine.score(rows, outputs=names, num_top=9)
    plain = await kit.engine.score(rows)
    for prompt, call, result, bare in zip(prompts, calls, scores, plain, strict=True):
        assert (set(result.arrays), dict(bare.arrays)) == (set(array_names(names)), {})
        np.testing.assert_allclose(result.logprobs, bare.logprobs, atol=kit.tolerance)
        for name, values in result.arrays.items():
            found = call.array(name)
            assert (len(values), values.dtype) == (len(prompt) + 25, found.dtype)
            assert (values[0] == (NO_TOKEN if name == "top_k_ids" else 0)).all()
            if name == "top_k_ids":
                assert_same_ids(kit, found, values[len(prompt) :], call.array("top_k_logprobs"))
            elif name == "hidden":  # float16 rounds the 10 leading bits
                np.testing.assert_allclose(found, values[len(prompt) :], rtol=2e-3, atol=2e-3)
            else:
                np.testing.assert_allclose(found, values[len(prompt) :], atol=kit.tolerance)


def model_logprobs(call: Call) -> list[float]:
    return [float(x) for delta in call.deltas if delta.logprobs_model is not None for x in delta.logprobs_model]


async def test_seed_decides_the_tokens_whatever_runs_beside(kit: Kit) -> None:
    alone = await kit.run(PROMPT, seed=5, max_tokens=40)
    crowd = [kit.call([i, 2 * i, 3], seed=i, max_tokens=10 + 4 * i, temperature=0.5 + i / 10) for i in range(12)]
    again = kit.call(PROMPT, seed=5, max_tokens=40)
    other = kit.call(PROMPT, seed=6, max_tokens=40)
    await kit.end(again, other, *crowd)
    assert again.tokens == alone.tokens
    np.testing.assert_allclose(again.logprobs, alone.logprobs, atol=1e-4)
    assert other.tokens != alone.tokens


async def test_resume_from_received_tokens_continues_the_same(kit: Kit) -> None:
    if not kit.keyed:
        pytest.skip("its draws depend on the number of draws before")
    whole = await kit.run(PROMPT, seed=2**64 - 1, max_tokens=40, top_p=0.9)
    rest = await kit.run(PROMPT + whole.tokens[:17], seed=2**64 - 1, max_tokens=23, top_p=0.9)
    assert rest.tokens == whole.tokens[17:]


async def test_greedy_does_not_depend_on_the_seed(kit: Kit) -> None:
    calls = [await kit.run(PROMPT, seed=seed, temperature=0.0) for seed in (1, 2)]
    assert calls[0].tokens == calls[1].tokens
    np.testing.assert_allclose(calls[0].logprobs, model_logprobs(calls[0]), atol=1e-6)


async def test_stop_id_ends_and_is_kept(kit: Kit) -> None:
    free = await kit.run(PROMPT, seed=3, max_tokens=60)
    stop = free.tokens[20]
    call = await kit.run(PROMPT, seed=3, max_tokens=60, stop_token_ids=(stop,))
    assert call.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert call.finish is FinishReason.STOP


@pytest.mark.row(
    "S099",
    missing="The database of the task in the session of the agent, the composite reward, and decoding in a tree.",
)
async def test_stop_string_ends_and_is_kept(kit: Kit) -> None:
    free = await kit.run(PROMPT, seed=3, max_tokens=60)
    at = next(i for i in range(10, 50) if max(free.tokens[i : i + 2]) < 95)
    string = "".join(chr(32 + token) for token in free.tokens[at : at + 2])
    call = await kit.run(PROMPT, seed=3, max_tokens=60, stop=("not in there", string))
    text = "".join(chr(32 + token) if token < 95 else "\0" for token in free.tokens)
    assert call.tokens == free.tokens[: text.index(string) + 2]
    assert call.finish is FinishReason.STOP


async def test_stop_string_may_begin_in_resumed_tokens_but_not_in_the_prompt(kit: Kit) -> None:
    if not kit.keyed:
        pytest.skip("its draws depend on the number of draws before")
    free = await kit.run(PROMPT, seed=3, max_tokens=60)
    at = next(i for i in range(10, 50) if max(free.tokens[i : i + 2]) < 95)
    string = "".join(chr(32 + token) for token in free.tokens[at : at + 2])
    options = {"seed": 3, "max_tokens": 1, "stop": (string,)}
    resumed = await kit.run(PROMPT + free.tokens[: at + 1], num_resumed=at + 1, **options)
    prompted = await kit.run(PROMPT + free.tokens[: at + 1], **options)
    assert (resumed.tokens, resumed.finish) == ([free.tokens[at + 1]], FinishReason.STOP)
    assert (prompted.tokens, prompted.finish) == ([free.tokens[at + 1]], FinishReason.LENGTH)


async def test_sequence_ends_when_the_context_is_full(kit: Kit) -> None:
    call = await kit.run([7] * (CONTEXT - 5), max_tokens=50)
    assert len(call.tokens) == 5
    assert call.finish is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("token_ids", "params", "message"),
    [
        ([], {}, "non-empty"),
        ([1] * CONTEXT, {}, "no room in a context of 240"),
        ([1, VOCAB], {}, "token 112 is outside the vocabulary of 112"),
        ([1, -1], {}, "token -1 is outside"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
    ],
)
async def test_request_that_can_never_run_is_rejected(
    kit: Kit, token_ids: list[int], params: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kit.call(token_ids, **params)
    assert (await kit.run(PROMPT)).finish is FinishReason.LENGTH


async def test_id_may_be_used_again_once_it_ended(kit: Kit) -> None:
    first = kit.call(PROMPT, name="same")
    with pytest.raises(ValueError, match="running already"):
        kit.call(PROMPT, name="same")
    await kit.end(first)
    assert (await kit.run(PROMPT, name="same")).tokens == first.tokens


async def test_cancel_ends_with_what_was_sampled(kit: Kit) -> None:
    free = await kit.run(PROMPT, seed=8, max_tokens=200)
    for _ in range(10):  # a thread may finish the request before the cancellation
        call = kit.call(PROMPT, seed=8, max_tokens=200)
        await asyncio.wait_for(call.first.wait(), 20)
        kit.engine.cancel(call.request.request_id)
        kit.engine.cancel("unknown")
        await kit.end(call)
        if call.finish is FinishReason.CANCELLED:
            break
    assert call.finish is FinishReason.CANCELLED
    assert 0 < len(call.tokens) < 200
    assert call.tokens == free.tokens[: len(call.tokens)]


async def test_cancel_of_a_waiting_request_ends_it_without_tokens(build: Build) -> None:
    kit = await build(slots_max=1)
    running = kit.call(PROMPT, max_tokens=200)
    waiting = kit.call(PROMPT, max_tokens=200)
    kit.engine.cancel(waiting.request.request_id)
    await kit.end(waiting)
    assert (waiting.tokens, waiting.finish) == ([], FinishReason.CANCELLED)
    assert not running.ended.is_set()


async def test_full_queue_is_busy_and_drains(build: Build) -> None:
    kit = await build(slots_max=2, queue_max=3)
    calls = [kit.call(PROMPT, seed=i) for i in range(5)]
    with pytest.raises(EngineBusy):
        kit.call(PROMPT)
    await kit.end(*calls)
    await kit.run(PROMPT)


async def test_request_waits_for_the_first_weights(build: Build) -> None:
    kit = await build(active=False)
    assert kit.engine.active is None
    with pytest.raises(ValueError, match="no weights are active"):
        await kit.engine.score([np.array(PROMPT, np.int32)])
    call = kit.call(PROMPT)
    await kit.activate(0)
    await kit.end(call)
    assert {delta.version for delta in call.deltas} == {version(0)}


async def swapped_call(kit: Kit, kv: KvPolicy) -> Call:
    """A request whose weights change after its first tokens. A server may finish it before the update arrives, so it
    has several tries."""
    for _ in range(10):
        await kit.activate(0)
        await kit.prepare(1)
        call = kit.call(PROMPT, seed=4, max_tokens=200)
        await asyncio.wait_for(call.first.wait(), 20)
        await kit.engine.activate(version(1), kv)
        assert kit.engine.active == version(1)
        await kit.end(call)
        steps = [delta.version.step for delta in call.deltas]
        assert steps == sorted(steps)
        if set(steps) == {0, 1}:
            return call
    pytest.fail("no request of ten was running when the weights changed")


@pytest.mark.row("S005")
async def test_swap_with_recompute_continues_under_the_new_weights_exactly(kit: Kit) -> None:
    call = await swapped_call(kit, KvPolicy.RECOMPUTE)
    assert all(delta.kv_step_oldest == delta.version.step for delta in call.deltas)
    (scored,) = await kit.engine.score([np.array(PROMPT + call.tokens, np.int32)])
    old = sum(len(delta.token_ids) for delta in call.deltas if delta.version == version(0))
    np.testing.assert_allclose(call.logprobs[old:], scored.logprobs[len(PROMPT) + old :], atol=1e-4)
    assert not np.allclose(call.logprobs[:old], scored.logprobs[len(PROMPT) : len(PROMPT) + old], atol=1e-4)


async def test_swap_with_keep_stamps_the_oldest_step_of_the_cache(kit: Kit) -> None:
    call = await swapped_call(kit, KvPolicy.KEEP)
    assert {delta.kv_step_oldest for delta in call.deltas} == ({0} if kit.caches and kit.keeps else {0, 1})
    after = await kit.run(PROMPT)
    assert {(delta.version.step, delta.kv_step_oldest) for delta in after.deltas} == {(1, 1)}


async def test_with_keep_a_request_that_begins_after_the_swap_reads_no_older_keys(kit: Kit) -> None:
    """Its prompt is in the cache, computed with the old weights, and it was submitted before the swap."""
    prompt = [*PROMPT * 12, 7]
    for attempt in range(10):
        await kit.activate(0)
        await kit.run(prompt, seed=attempt)
        await kit.prepare(1)
        call = kit.call(prompt, seed=attempt)
        await kit.engine.activate(version(1), KvPolicy.KEEP)
        await kit.end(call)
        if {delta.version.step for delta in call.deltas} == {1}:
            break
    else:
        pytest.fail("every request of ten had a token before the weights changed")
    assert {delta.kv_step_oldest for delta in call.deltas} == {1}
    (scored,) = await kit.engine.score([np.array(prompt + call.tokens, np.int32)])
    np.testing.assert_allclose(call.logprobs, scored.logprobs[len(prompt) :], atol=kit.tolerance)


async def test_activate_of_an_unprepared_version_is_a_key_error(kit: Kit) -> None:
    with pytest.raises(KeyError):
        await kit.engine.activate(version(9), KvPolicy.RECOMPUTE)
    await kit.prepare(1)
    kit.engine.discard(version(1))
    kit.engine.discard(version(7))
    with pytest.raises(KeyError):
        await kit.engine.activate(version(1), KvPolicy.RECOMPUTE)
    assert kit.engine.active == version(0)


async def test_prepare_and_activate_are_idempotent(kit: Kit) -> None:
    await kit.prepare(1)
    await kit.prepare(1)
    await kit.engine.activate(version(1), KvPolicy.RECOMPUTE)
    await kit.engine.activate(version(1), KvPolicy.RECOMPUTE)
    await kit.prepare(1)
    assert kit.engine.active == version(1)


async def test_scores_of_an_activation_are_those_of_the_new_weights(kit: Kit) -> None:
    activate_scored = getattr(kit.engine, "activate_scored", None)
    if activate_scored is None:
        pytest.skip("the engine has no `activate_scored`")
    await kit.prepare(1)
    row = np.array(PROMPT, np.int32)
    (scored,) = await activate_scored(version(1), KvPolicy.RECOMPUTE, [row], [])
    assert kit.engine.active == scored.version == version(1)
    (expected,) = await kit.engine.score([row])
    np.testing.assert_array_equal(scored.logprobs, expected.logprobs)


@pytest.mark.parametrize("fault", ["shape", "nan", "missing", "extra", "garbage"])
async def test_unfit_weights_are_rejected_while_serving_continues(kit: Kit, fault: str) -> None:
    name = kit.rename
    changes: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
        "shape": lambda state: state.update({name: torch.zeros(3)}),
        "nan": lambda state: state[name].view(-1)[0].fill_(float("nan")),
        "missing": lambda state: (state.pop(name), state.update({"other": torch.zeros(1)})),
        "extra": lambda state: state.update({"other": torch.zeros(1)}),
        "garbage": lambda state: None,
    }
    path = kit.changed_file(changes[fault])
    if fault == "garbage":
        path.write_bytes(b"\xff" * 100)
    call = kit.call(PROMPT, max_tokens=100)
    with pytest.raises(WeightsMismatch, match=path.name if fault == "garbage" else f"{name}|other"):
        await kit.engine.prepare(version(1), {"model.safetensors": path})
    await kit.end(call)
    assert (call.finish, kit.engine.active) == (FinishReason.LENGTH, version(0))


async def test_next_turn_of_a_session_prefills_its_new_tokens_only(kit: Kit) -> None:
    if not kit.counts:
        pytest.skip("it does not tell what it found in its cache")
    prefix = list(PROMPT)
    for turn in range(4):
        before = kit.engine.load()
        call = await kit.run(prefix, session="s", seed=turn)
        known = len(prefix) - 4  # without three observed tokens and the last sampled one, which was never fed
        new = len(prefix) - (known // kit.block * kit.block if turn and kit.caches else 0)
        assert call.deltas[0].num_prompt_prefilled == new
        assert call.deltas[0].num_prompt_cached == len(prefix) - new
        after = kit.engine.load()
        assert after.tokens_prefilled - before.tokens_prefilled == new
        assert after.tokens_prefix_hit - before.tokens_prefix_hit == len(prefix) - new
        assert after.tokens_generated - before.tokens_generated == len(call.tokens)
        prefix += [*call.tokens, 50, 51, 52]


@pytest.mark.row(
    "S099",
    missing="The database of the task in the session of the agent, the composite reward, and decoding in a tree.",
)
@pytest.mark.parametrize("at", [1, 17, 40])
@pytest.mark.parametrize("forced", [(), (50, 51, 52, 53)], ids=["fork", "forced"])
async def test_a_fork_and_a_forced_prefix_reuse_the_cache_and_give_the_tokens_of_an_undisturbed_request(
    kit: Kit, at: int, forced: tuple[int, ...]
) -> None:
    first = await kit.run(PROMPT, seed=1, max_tokens=40, session="s")
    prefix = PROMPT + first.tokens[:at] + list(forced)
    fork = await kit.run(prefix, seed=1, max_tokens=30, session="s")
    shared = min(len(PROMPT) + at, len(prefix) - 1, len(PROMPT) + 39)  # the last sampled token was never fed
    found = shared // kit.block * kit.block if kit.caches and (kit.forks or at == 40) else 0
    if kit.counts:
        assert fork.deltas[0].num_prompt_cached == found
        assert fork.deltas[0].num_prompt_prefilled == len(prefix) - found
    await kit.activate(2)  # the same weights, and an empty cache
    undisturbed = await kit.run(prefix, seed=1, max_tokens=30)
    assert undisturbed.deltas[0].num_prompt_cached == 0
    assert fork.tokens == undisturbed.tokens
    np.testing.assert_allclose(fork.logprobs, undisturbed.logprobs, atol=kit.tolerance)


async def test_a_fork_of_a_generation_that_still_runs_gives_the_tokens_of_an_undisturbed_request(kit: Kit) -> None:
    trunk = kit.call(PROMPT, seed=1, max_tokens=200, session="s")
    await asyncio.wait_for(trunk.first.wait(), 20)
    prefix = PROMPT + trunk.tokens + [50, 51]
    fork = await kit.run(prefix, seed=2, max_tokens=20, session="s")
    await kit.end(trunk)
    await kit.activate(2)
    undisturbed = [await kit.run(prefix, seed=2, max_tokens=20), await kit.run(PROMPT, seed=1, max_tokens=200)]
    assert [fork.tokens, trunk.tokens] == [call.tokens for call in undisturbed]


async def test_prefix_is_not_reused_across_an_update(kit: Kit) -> None:
    first = await kit.run(PROMPT, session="s")
    await kit.activate(1)
    second = await kit.run([*PROMPT, *first.tokens, 9], session="s")
    assert second.deltas[0].num_prompt_cached == 0


async def test_pinned_requests_finish_under_their_version_while_an_update_activates(build: Build) -> None:
    kit = await build(versions_max=2)
    alone = [await kit.run(PROMPT, seed=seed, max_tokens=200) for seed in range(2)]
    for old in range(0, 20, 2):  # a thread may finish the requests before the update, so there are ten tries
        if old:
            await kit.activate(old)
        await kit.prepare(old + 1)
        pinned = [kit.call(PROMPT, seed=seed, max_tokens=200, pinned=old) for seed in range(2)]
        free = [kit.call(PROMPT, seed=seed, max_tokens=200) for seed in range(2)]
        for call in (*pinned, *free):
            await asyncio.wait_for(call.first.wait(), 20)
        await kit.engine.activate(version(old + 1), KvPolicy.RECOMPUTE, [version(old)])
        assert kit.engine.held == (version(old + 1), version(old))
        late = kit.call(PROMPT, seed=0, max_tokens=200, pinned=old)
        were_running = not any(call.ended.is_set() for call in (*pinned, *free))
        await kit.end(*pinned, *free, late)
        if were_running:
            break
    assert were_running
    for call, undisturbed in zip([*pinned, late], [*alone, alone[0]], strict=True):
        assert {(delta.version, delta.kv_step_oldest) for delta in call.deltas} == {(version(old), old)}
        assert call.tokens == undisturbed.tokens
        np.testing.assert_allclose(call.logprobs, undisturbed.logprobs, atol=1e-4)
    for call in free:
        assert {delta.version for delta in call.deltas} == {version(old), version(old + 1)}
    assert (await kit.run(PROMPT)).deltas[0].version == version(old + 1)


async def test_a_pinned_request_that_waits_for_a_slot_keeps_its_version(build: Build) -> None:
    kit = await build(versions_max=2, slots_max=1)
    alone = await kit.run(PROMPT, seed=3, max_tokens=20)
    running, waiting = kit.call(PROMPT, max_tokens=100), kit.call(PROMPT, seed=3, max_tokens=20, pinned=0)
    await asyncio.wait_for(running.first.wait(), 20)
    await kit.activate(1, retain=[0])
    await kit.end(running, waiting)
    assert waiting.tokens == alone.tokens


@pytest.mark.parametrize("drop", ["activate", "discard"])
async def test_requests_of_a_dropped_version_end_with_what_was_sampled(build: Build, drop: str) -> None:
    kit = await build(versions_max=2)
    alone = await kit.run(PROMPT, seed=1, max_tokens=200)
    await kit.activate(1, retain=[0])
    await kit.prepare(2)
    kept, dropped = kit.call(PROMPT, max_tokens=200, pinned=1), kit.call(PROMPT, seed=1, max_tokens=200, pinned=0)
    await asyncio.wait_for(dropped.first.wait(), 20)
    if drop == "discard":
        kit.engine.discard(version(0))
    else:
        await kit.engine.activate(version(2), KvPolicy.RECOMPUTE, [version(1)])
    await kit.end(dropped)
    assert (dropped.finish, {delta.version for delta in dropped.deltas}) == (FinishReason.CANCELLED, {version(0)})
    assert 0 < len(dropped.tokens) < 200
    assert dropped.tokens == alone.tokens[: len(dropped.tokens)]
    assert version(0) not in kit.engine.held
    with pytest.raises(ValueError, match=r"main@0 .*is not held|is not held"):
        kit.call(PROMPT, pinned=0)
    await kit.end(kept)
    assert kept.finish is FinishReason.LENGTH


async def test_score_is_that_of_the_wanted_version(build: Build) -> None:
    kit = await build(versions_max=2)
    row = np.array(PROMPT, np.int32)
    (before,) = await kit.engine.score([row])
    await kit.activate(1, retain=[0])
    (old,), (new,) = await kit.engine.score([row], version=version(0)), await kit.engine.score([row])
    assert (old.version, new.version) == (version(0), version(1))
    np.testing.assert_allclose(old.logprobs, before.logprobs, atol=1e-6)
    assert not np.allclose(new.logprobs, before.logprobs, atol=1e-4)
    await kit.activate(2)
    with pytest.raises(ValueError, match="is not held"):
        await kit.engine.score([row], version=version(0))


async def test_prefix_is_reused_within_one_version_only(build: Build) -> None:
    kit = await build(versions_max=2)
    first = await kit.run(PROMPT, session="s", pinned=0)
    await kit.activate(1, retain=[0])
    turn = [*PROMPT, *first.tokens, 9]
    again = await kit.run(turn, session="s", pinned=0)
    assert again.deltas[0].num_prompt_cached == (len(turn) - 2 if kit.caches else 0)
    other = await kit.run([*turn, *again.tokens, 9], session="s")
    assert other.deltas[0].num_prompt_cached == 0
    (scored,) = await kit.engine.score([np.array([*other.request.token_ids, *other.tokens], np.int32)])
    np.testing.assert_allclose(other.logprobs, scored.logprobs[-len(other.tokens) :], atol=1e-4)


async def test_more_versions_than_fit_are_not_retained(kit: Kit) -> None:
    await kit.prepare(1)
    with pytest.raises(ValueError, match="at most 0 older versions can be retained, got 1"):
        await kit.engine.activate(version(1), KvPolicy.RECOMPUTE, [version(0)])
    await kit.engine.activate(version(1), KvPolicy.RECOMPUTE, [version(7)])
    assert kit.engine.held == (version(1),)


async def test_load_returns_to_nothing_running(kit: Kit) -> None:
    before = kit.engine.load()
    calls = [kit.call(PROMPT, seed=i) for i in range(20)]
    await kit.end(*calls)
    load = kit.engine.load()
    assert (load.num_running, load.num_waiting, load.slots_max) == (0, 0, 16)
    assert load.tokens_generated - before.tokens_generated == sum(len(call.tokens) for call in calls)
    assert load.steps > before.steps


async def test_close_ends_everything_and_later_calls_raise(kit: Kit) -> None:
    calls = [kit.call(PROMPT, seed=i, max_tokens=200) for i in range(30)]
    await asyncio.wait_for(calls[0].first.wait(), 20)
    await kit.engine.close()
    assert all(call.ended.is_set() for call in calls)
    assert calls[-1].finish is FinishReason.CANCELLED
    with pytest.raises(EngineBroken, match="closed"):
        kit.call(PROMPT)
    with pytest.raises(EngineBroken):
        await kit.engine.score([np.array(PROMPT, np.int32)])
    await kit.engine.close()
