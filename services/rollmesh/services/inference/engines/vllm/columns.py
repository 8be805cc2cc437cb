"""The columns in which a worker of vLLM returns its numbers per token, inside vLLM's log-prob arrays.

vLLM carries for each token one row of (id, log-prob) pairs from the worker to the caller. Pair 0 is the sampled token.
The engine requests more pairs, and its sampler fills them with these numbers, so that every number comes from the
forward that drew the token. The ids of one row are all different, because vLLM may keep them as keys of a mapping;
hence all but the sampled token's are negative.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WEIGHTS = 1
"""Pair of a sampled token: the serial number of the weights that drew it, and its log-prob under the plain softmax."""
VALUES = {"entropy": 2, "kept_mass": 3, "mean_logprob": 4}
"""Pairs whose value is an output."""
NUM_OUTPUTS = max(VALUES.values())
"""Number of the pairs up to here, beside the sampled token's. A request with outputs has all of them."""
TOP = NUM_OUTPUTS + 1
"""First of the pairs with the most likely tokens."""

SCORE_ENTROPY, SCORE_MEAN, SCORE_TOP = 1, 2, 3
"""Pairs of a scored token. The id of pair `SCORE_ENTROPY` is the serial number of the weights."""

SERIAL_ID = -16
"""Id of the serial number 0; that of n is `SERIAL_ID - n`."""
TOP_ID = -(1 << 30)
"""Id of the alternative 0; that of token n is `TOP_ID + n`. Smaller ids are places without a token."""
ARGUMENT = "rollmesh"
"""Key of `SamplingParams.extra_args` with the sampling rules of a request: [seed as int64, temperature, top_p,
top_k]."""


def serials_of(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the serial numbers of ids [n]."""
    return SERIAL_ID - ids


def top_ids_of(ids: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the token ids of the alternatives [n, k]; -1 for a place without a token."""
    return np.maximum(ids - TOP_ID, -1).astype(np.int32)
