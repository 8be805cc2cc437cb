"""Requests of the vLLM engine without vLLM: the outputs have the form of those of its `RequestOutput`."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from rollmesh.services.inference.engine import GenerateDelta, GenerateRequest, KvPolicy
from rollmesh.services.inference.engines.common.stop import StopRules
from rollmesh.services.inference.engines.vllm import columns
from rollmesh.services.inference.engines.vllm.request import LiveRequest
from rollmesh.shared.domain.trajectory import FinishReason, SamplingParams
from rollmesh.shared.domain.versions import PolicyVersion

RULES = StopRules(128, lambda tokens: "".join(map(chr, tokens)))


def version(step: int) -> PolicyVersion:
    return PolicyVersion(policy="main", step=step)


def live(outputs: tuple[str, ...] = (), **options: Any) -> tuple[LiveRequest, list[GenerateDelta]]:
    num_resumed = options.pop("num_resumed", 0)
    deltas: list[GenerateDelta] = []
    request = GenerateRequest(
        request_id="r",
        token_ids=np.array([1, 2, ord("a")], np.int32),
        params=SamplingParams(**options),
        outputs=outputs,
        num_top=2,
        num_resumed=num_resumed,
    )
    found = LiveRequest(request, deltas.append, RULES, 4)
    found.meets(1, version(5), KvPolicy.RECOMPUTE)
    return found, deltas


def output(text: str, serial: int = 1, *, width: int = 2, finish: str | None = None) -> Any:
    rows = [[ord(char), columns.SERIAL_ID - serial, *range(-2, -width, -1)] for char in text]
    logprobs = SimpleNamespace(
        token_ids=[one for row in rows for one in row], logprobs=[-float(i) for _ in rows for i in range(width)]
    )
    completion = SimpleNamespace(token_ids=[ord(char) for char in text], logprobs=logprobs, finish_reason=finish)
    return SimpleNamespace(outputs=[completion], num_cached_tokens=2)


def texts(deltas: list[GenerateDelta]) -> list[tuple[str, int, int]]:
    return [("".join(map(chr, d.token_ids)), d.version.step, d.kv_step_oldest) for d in deltas]


def test_the_first_token_leaves_at_once_and_later_ones_in_groups() -> None:
    request, deltas = live()
    for char in "abcdefg":
        assert request.take(output(char)) == (None, 1)
    assert texts(deltas) == [("a", 5, 5), ("bcde", 5, 5)]
    request.finish(FinishReason.CANCELLED, version(5))
    request.finish(FinishReason.CANCELLED, version(5))
    assert texts(deltas)[2:] == [("fg", 5, 5)]
    assert [delta.finish for delta in deltas] == [None, None, FinishReason.CANCELLED]
    assert [(d.num_prompt_cached, d.num_prompt_prefilled) for d in deltas] == [(2, 1), (0, 0), (0, 0)]
    np.testing.assert_array_equal(deltas[1].logprobs, [0, 0, 0, 0])
    np.testing.assert_array_equal(deltas[1].logprobs_model, [-1, -1, -1, -1])


def test_an_output_that_spans_an_update_becomes_a_delta_per_version() -> None:
    request, deltas = live()
    request.take(output("a"))
    request.meets(2, version(6), KvPolicy.KEEP)
    request.take(output("b", 1))
    request.take(output("cde", 2))
    request.meets(3, version(7), KvPolicy.RECOMPUTE)
    request.take(output("fghi", 3))
    assert texts(deltas) == [("a", 5, 5), ("b", 5, 5), ("cde", 6, 5), ("fghi", 7, 7)]


def test_a_stop_string_ends_within_an_output_and_is_kept() -> None:
    request, _ = live(stop=("bc",))
    assert request.take(output("abcd")) == (FinishReason.STOP, 3)
    assert request.must_abort


def test_a_stop_string_may_begin_in_resumed_tokens_only() -> None:
    for num_resumed, finish in ((1, FinishReason.STOP), (0, FinishReason.LENGTH)):
        request, _ = live(stop=("ab",), num_resumed=num_resumed)
        assert request.take(output("b", finish="length")) == (finish, 1)
        assert not request.must_abort


def test_alternatives_are_decoded_and_places_without_a_token_marked() -> None:
    request, deltas = live(("top_k", "kept_mass"))
    ids = [ord("a"), columns.SERIAL_ID - 1, -2, -3, -4, columns.TOP_ID + 7, columns.TOP_ID - 1]
    logprobs = SimpleNamespace(token_ids=ids, logprobs=[-1.0, -2.0, 0.5, 0.9, -4.0, -0.25, -1e30])
    completion = SimpleNamespace(token_ids=[ord("a")], logprobs=logprobs, finish_reason=None)
    request.take(SimpleNamespace(outputs=[completion], num_cached_tokens=0))
    arrays = deltas[0].arrays
    assert set(arrays) == {"top_k_ids", "top_k_logprobs", "kept_mass"}
    np.testing.assert_array_equal(arrays["top_k_ids"], [[7, -1]])
    np.testing.assert_array_equal(arrays["top_k_logprobs"], np.array([[-0.25, -1e30]], np.float32))
    np.testing.assert_array_equal(arrays["kept_mass"], np.array([0.9], np.float32))


def test_an_end_without_tokens_has_the_active_version() -> None:
    request, deltas = live()
    request.finish(FinishReason.ERROR, version(9), "it broke")
    assert [(d.finish, d.error, d.version.step, len(d.token_ids)) for d in deltas] == [
        (FinishReason.ERROR, "it broke", 9, 0)
    ]


def test_kept_keys_are_those_of_the_oldest_weights_also_after_a_rollback_to_a_lower_step() -> None:
    request, deltas = live()
    request.meets(2, PolicyVersion(policy="main", step=3, incarnation=1), KvPolicy.KEEP)
    request.take(output("a", 2))
    request.meets(3, version(4), KvPolicy.KEEP)
    request.take(output("bcde", 3))
    request.meets(4, version(6), KvPolicy.RECOMPUTE)
    request.take(output("fghi", 4))
    assert texts(deltas) == [("a", 3, 5), ("bcde", 4, 5), ("fghi", 6, 6)]
