"""Per-token outputs of an engine besides log-probs, and the arrays in which a segment carries them.

Row i of an array belongs to the forward from which token i was drawn, that is, whose last input is token i - 1.

    output          arrays                        value per token
    entropy         entropy [n] f32               entropy of the sampling distribution, in nats
    top_k           top_k_ids [n, k] i32          the k most likely tokens of the sampling distribution, the most likely one first
                    top_k_logprobs [n, k] f32     their log-probs in it; k is the request's `num_top`
    kept_mass       kept_mass [n] f32             probability, after temperature, of the tokens that top-k and top-p kept
    hidden          hidden [n, d] f16             state after the last normalization, from which the logits are computed
    routed_experts  routed_experts [n, layers * experts per token] u8 or i32    chosen experts, layer by layer (mixture-of-experts models)
    mean_logprob    mean_logprob [n] f32          mean of the log-probs of the plain softmax over the vocabulary

The sampling distribution is the one after temperature, top-k and top-p; for greedy requests and for `score` it is the
plain softmax. An engine may have further outputs; each of them is an array of the same name.
"""  # noqa: E501, W505

from __future__ import annotations

from collections.abc import Iterable

NO_TOKEN = -1
"""Id in `top_k_ids` of a place without a token, because fewer than k tokens can be drawn."""
NO_LOGPROB = -1e30
"""Log-prob of such a place. It is finite, and its exponential is 0."""
NUM_TOP = 8
"""k of a request that names `top_k` without a number."""
NUM_TOP_MAX = 256
"""Largest k."""
_ARRAYS = {"top_k": ("top_k_ids", "top_k_logprobs")}


def array_names(outputs: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the arrays of these outputs, in order."""
    return tuple(array for output in outputs for array in _ARRAYS.get(output, (output,)))


def output_of(array: str) -> str:
    """Return the output that has this array."""
    return next((output for output, arrays in _ARRAYS.items() if array in arrays), array)
