"""The commit digest: a hash chain over the samples of every update.

Coordinator and trainer compute it independently and compare it at attach: equal digests mean that both agree on every
update since the first, and on its samples. Its definition is therefore part of the contract between them:

    digest_0 = ""
    digest_k = sha256( field(digest_{k-1}) field(str(k)) field(id_1) ... field(id_n) ), lower-case hex

where field(x) is the length of x in UTF-8 bytes as an unsigned 64-bit big-endian integer, followed by those bytes, and
id_1 ... id_n are the ids of the samples that were trained on, sorted by their UTF-8 bytes. The length prefix keeps
("ab", "c") and ("a", "bc") apart; the order keeps the digest independent of how a batch was shuffled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

INITIAL_DIGEST = ""
"""Digest before the first update."""


def next_digest(previous: str, update: int, sample_ids: Sequence[str]) -> str:
    """Return the digest after update `update` (1, 2, ...), which trained on `sample_ids`, in any order.

    An update without samples also advances the chain. Raises ValueError for an update below 1 or an id that
    occurs twice: within one update a sample is trained on at most once.
    """
    if update < 1:
        raise ValueError(f"update = {update}: the first update is 1")
    ordered = sorted(sample_id.encode() for sample_id in sample_ids)
    if len(set(ordered)) != len(ordered):
        raise ValueError(f"update {update} names a sample more than once")
    return _hash_fields([previous.encode(), str(update).encode(), *ordered])


def _hash_fields(fields: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for value in fields:
        digest.update(len(value).to_bytes(8, "big"))
        digest.update(value)
    return digest.hexdigest()
