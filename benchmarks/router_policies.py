"""Policies for the choice of a node that `python -m benchmarks router` compares with the router's: round robin and
consistent hashing."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection

from rollmesh.shared.clients.inference_nodes import KnownNode, PendingRequest, RoutedRequest

_POINTS = 64
"""Points of a node on the ring. The share of a node then deviates by about an eighth."""


class RoundRobin:
    """Nodes in turns: the next one for every request, or for every new session."""

    def __init__(self, *, by_session: bool) -> None:
        self._by_session = by_session
        self._nodes: dict[str, KnownNode] = {}
        self._num = 0

    def choose(self, request: RoutedRequest, nodes: Collection[KnownNode], now_s: float) -> KnownNode | None:
        if self._by_session and request.session in self._nodes:
            return self._nodes[request.session]
        self._num += 1
        return sorted(nodes, key=lambda node: node.node_id)[self._num % len(nodes)] if nodes else None

    def sent(self, request: RoutedRequest, node: KnownNode) -> None:
        self._nodes[request.session] = node


class ConsistentHash:
    """The node whose point on a ring follows the hash of a key."""

    def __init__(self, key: Callable[[RoutedRequest], bytes]) -> None:
        self._key = key

    def choose(self, request: RoutedRequest, nodes: Collection[KnownNode], now_s: float) -> KnownNode | None:
        ring = sorted(
            (_hash(f"{node.node_id}/{i}".encode()), node.node_id, node) for node in nodes for i in range(_POINTS)
        )
        place = _hash(self._key(request))
        return next((node for at, _, node in ring if at >= place), ring[0][2]) if ring else None

    def sent(self, request: RoutedRequest, node: KnownNode) -> None:
        """Nothing is stored."""


def session_key(request: RoutedRequest) -> bytes:
    return request.session.encode()


def prompt_key(num_tokens: int) -> Callable[[RoutedRequest], bytes]:
    """Return a key of the first tokens of a prompt."""

    def key(request: RoutedRequest) -> bytes:
        assert isinstance(request, PendingRequest)
        return request.token_ids[:num_tokens].tobytes()

    return key


def _hash(data: bytes) -> int:
    # The product spreads the checksums of similar names.
    return zlib.crc32(data) * 0x9E3779B1 % (1 << 32)
