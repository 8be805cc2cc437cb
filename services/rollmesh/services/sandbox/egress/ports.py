"""The egress ports of a node by session: the interface of egress to engines.

await ports.start()
with ports.opening(session_id, policy) as fds:      # one descriptor, or none without a policy
    ... pass it to the session ...
ports.close(session_id)
ports.stop()
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from rollmesh.services.sandbox.egress.addresses import Resolver, resolve_by_dns
from rollmesh.services.sandbox.egress.config import EgressConfig
from rollmesh.services.sandbox.egress.port import Port
from rollmesh.services.sandbox.egress.proxy import EgressClient, Proxy
from rollmesh.services.sandbox.egress.retrieval.backend import BACKENDS
from rollmesh.services.sandbox.egress.retrieval.cache import Cache
from rollmesh.services.sandbox.egress.retrieval.service import Retrieval
from rollmesh.services.sandbox.egress.upstream import Upstream
from rollmesh.shared.clock import Clock, SystemClock


class Ports:
    """The policies and ports of a node. `folder` holds indexes and records; it is created on demand and persists over
    restarts."""

    def __init__(
        self,
        configs: Mapping[str, EgressConfig],
        folder: Path,
        *,
        clock: Clock | None = None,
        resolver: Resolver = resolve_by_dns,
    ) -> None:
        self._configs = configs
        self._folder = folder
        self._clock = clock or SystemClock()
        self._resolver = resolver
        self._proxies: dict[str, Proxy] = {}
        self._ports: dict[str, Port] = {}

    async def start(self) -> None:
        """Prepare the policies. A corpus without an index is indexed now. Raises ConfigError."""
        for name, config in self._configs.items():
            self._proxies[name] = await asyncio.to_thread(
                make_proxy, name, config, self._folder, clock=self._clock, resolver=self._resolver
            )

    def stop(self) -> None:
        """Close all ports and proxies."""
        for session_id in list(self._ports):
            self.close(session_id)
        for proxy in self._proxies.values():
            proxy.close()

    @contextmanager
    def opening(self, session_id: str, policy: str, tenant: str = "") -> Iterator[tuple[int, ...]]:
        """Yield the descriptors for a new session, open inside the block: one, or none without a policy."""
        if not policy:
            yield ()
            return
        port = self._ports[session_id] = Port(self._proxies[policy], EgressClient(session=session_id, tenant=tenant))
        try:
            with port.theirs:
                yield (port.theirs.fileno(),)
        except BaseException:
            self.close(session_id)
            raise

    def close(self, session_id: str) -> None:
        """Close the port of an ended session, if it has one."""
        port = self._ports.pop(session_id, None)
        if port is not None:
            port.close()


def make_proxy(name: str, config: EgressConfig, folder: Path, *, clock: Clock, resolver: Resolver) -> Proxy:
    """Create a proxy with its upstream, retrieval and cache. Blocking. Raises ConfigError."""
    upstream = Upstream(config, resolver)
    retrieval = None
    if config.retrieval is not None:
        backend = BACKENDS.make(config.retrieval.backend, limits=config.retrieval, folder=folder, upstream=upstream)
        retrieval = Retrieval(config.retrieval, backend, config.response_bytes_max)
    cache = None
    if config.cache.mode != "off":
        cache = Cache.opened(config.cache, folder / f"{quote(name, safe='')}.records")
    return Proxy(name, config, clock=clock, upstream=upstream, retrieval=retrieval, cache=cache)
