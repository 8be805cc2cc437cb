"""The ports of a node's sessions, by session; what an engine needs to know of egress.

with ports.opening(session_id, policy) as fd:      # None without a policy
    ... pass fd to the session ...
ports.close(session_id)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rollmesh.services.sandbox.egress.addresses import Resolver, resolve_by_dns
from rollmesh.services.sandbox.egress.config import EgressConfig
from rollmesh.services.sandbox.egress.port import Port
from rollmesh.services.sandbox.egress.proxy import Client, Proxy
from rollmesh.services.sandbox.egress.upstream import Upstream
from rollmesh.shared.clock import Clock, SystemClock


class Ports:
    """Policies by name, made when first used."""

    def __init__(
        self, configs: Mapping[str, EgressConfig], *, clock: Clock | None = None, resolver: Resolver = resolve_by_dns
    ) -> None:
        self._configs = configs
        self._clock = clock or SystemClock()
        self._resolver = resolver
        self._proxies: dict[str, Proxy] = {}
        self._ports: dict[str, Port] = {}

    @contextmanager
    def opening(self, session_id: str, policy: str, tenant: str = "") -> Iterator[tuple[int, ...]]:
        """The descriptor for a new session, open inside; none without a policy."""
        if not policy:
            yield ()
            return
        port = self._ports[session_id] = Port(self._proxy(policy), Client(session=session_id, tenant=tenant))
        try:
            with port.theirs:
                yield (port.theirs.fileno(),)
        except BaseException:
            self.close(session_id)
            raise

    def close(self, session_id: str) -> None:
        """The session has ended; one without a port is none the worse."""
        port = self._ports.pop(session_id, None)
        if port is not None:
            port.close()

    def _proxy(self, name: str) -> Proxy:
        if name not in self._proxies:
            config = self._configs[name]
            upstream = Upstream(config, self._resolver)
            self._proxies[name] = Proxy(name, config, clock=self._clock, upstream=upstream)
        return self._proxies[name]
