"""Choose the node of a request: the node of its session, else the one with the lowest cost in prefix tokens and load.

A session keeps its node, because only this node has computed its history. It moves if the node is crowded
(`session_moves_at`). Other requests go to the node with the lowest cost

    tokens of the prefix that the node has not computed  +  request_tokens * (requests at the node, relative to its
    capacity)

Nodes without a free slot, and nodes whose running requests fill the key-value cache, come after all others. A busy node
thus loses the advantage of a known prefix when each further request there costs more than the prefix. The cost has the
form of that of NVIDIA Dynamo's router (new prefill blocks plus active blocks); SGLang's cache-aware router compares
queue lengths against thresholds instead.

Independent routers see different parts of the traffic. At equal cost they choose by rendezvous hashing of the prompt,
so that members of one group meet at one node.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Collection

from rollmesh.shared.clients.inference_nodes import KnownNode, RoutedRequest, RouterConfig
from rollmesh.shared.clients.prefix_index import BLOCK_TOKENS

_GROWTH_BLOCKS = 8
"""A history of a session is hashed again when it has grown or shrunk by this many blocks, so that most turns cost
nothing."""
_KV_FULL = 0.9
"""Share of the key-value cache held by running requests from which a node counts as full."""
_ODD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class PrefixAffinity:
    """The choice of a router. It stores the node of each session; the nodes store the prefixes that they were sent."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._sessions: OrderedDict[tuple[str, str], KnownNode] = OrderedDict()
        """By policy and session, least recently used first."""

    def choose(self, request: RoutedRequest, nodes: Collection[KnownNode], now_s: float) -> KnownNode | None:
        """Return one of `nodes`, which can all serve the request; None if all of them are skipped at `now_s`."""
        last = self._sessions.get((request.target.policy, request.session)) if request.session else None
        if last is not None and (last not in nodes or not request.may_use(last, now_s)):
            last = None
        if last is not None and last.num_live < self._config.session_moves_at:
            return last
        usable = [node for node in nodes if request.may_use(node, now_s)]
        if last is not None:
            load_max = last.num_requests(now_s) / last.capacity / 2
            usable = [node for node in usable if (node.num_requests(now_s) + 1) / node.capacity <= load_max]
        if len(usable) > 1:
            return self._cheapest(request, usable, now_s)
        return usable[0] if usable else last

    def sent(self, request: RoutedRequest, node: KnownNode) -> None:
        """Record that a request goes to a node, which then computes its prefix and keeps it for the session."""
        session = (request.target.policy, request.session)
        if request.num_blocks and (prefixes := node.prefixes(request.target)) is not None:
            size_max = self._config.prefix_tokens_max // BLOCK_TOKENS
            known = prefixes.touch(session) if request.session else 0
            if not known or abs(min(request.num_blocks, size_max) - known) >= _GROWTH_BLOCKS:
                blocks = request.blocks()
                kv_max = node.stream.load.kv_tokens_max // BLOCK_TOKENS or size_max
                prefixes.add(session if request.session else blocks[-1], blocks, size_max, min(size_max, kv_max))
        if request.session:
            self._sessions[session] = node
            self._sessions.move_to_end(session)
            if len(self._sessions) > self._config.sessions_max:
                self._sessions.popitem(last=False)

    def _cheapest(self, request: RoutedRequest, nodes: list[KnownNode], now_s: float) -> KnownNode:
        blocks = request.blocks()
        last_block = blocks[-1] if blocks else None
        capacity_max = max(node.capacity for node in nodes)

        def cost(node: KnownNode) -> tuple[bool, float, float, int, str]:
            num = node.num_requests(now_s)
            full = num >= node.capacity or node.kv_pressure(now_s) >= _KV_FULL
            prefixes = node.prefixes(request.target) if blocks else None
            missing = (len(blocks) - (prefixes.matched(blocks) if prefixes is not None else 0)) * BLOCK_TOKENS
            tokens = missing + self._config.request_tokens * num * capacity_max / node.capacity
            place = 0 if last_block is None else (last_block ^ zlib.crc32(node.node_id.encode())) * _ODD & _MASK
            return full, tokens, num / node.capacity, place, node.node_id

        return min(nodes, key=cost)
