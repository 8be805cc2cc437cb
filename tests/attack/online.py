"""Sessions with egress for the attacks: two profiles, and their policies on the web server of `internet`.

Limits are far below the usual ones, so that a few requests exceed them. Both policies record their responses in one
file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rollmesh.services.sandbox.config import ProfileConfig
from rollmesh.services.sandbox.egress.config import EgressConfig, EgressRule
from rollmesh.services.sandbox.egress.retrieval_config import CacheConfig, RetrievalConfig
from rollmesh.shared.config.registry import Extension

from .internet import Internet

HOST = "allowed.test"
ONLINE, INNER = "online", "inner"
_LEADS_INSIDE = {
    "loopback": ("127.0.0.1",), "six": ("::1",), "mapped": ("::ffff:127.0.0.1",), "nat64": ("64:ff9b::7f00:1",),
    "sixtofour": ("2002:7f00:1::",), "unspecified": ("0.0.0.0",), "mixed": ("127.0.0.1", "8.8.8.8"),
    "metadata": ("169.254.169.254",),
}  # fmt: skip
"""Host below `public.test`, which the policy allows at public addresses only."""


def profiles(limits: dict[str, int | float]) -> dict[str, ProfileConfig]:
    """A policy for attackers, and one that allows what the first forbids."""
    prelude = Path(__file__).with_name("inside_egress.py").read_text()
    return {name: ProfileConfig(prelude=prelude, egress=name, limits=limits) for name in (ONLINE, INNER)}


def policies(layout: Internet, records: Path, *, leaky: bool = False) -> Mapping[str, EgressConfig]:
    """Return the policies. `leaky` wrongly allows private addresses; an attack then shows that a breach would be
    detected."""
    below = EgressRule(host=".public.test", schemes=("http",), ports=(layout.forbidden_port,), allow_private=leaky)
    return {
        ONLINE: _policy(layout, records, _host(layout, "/open", ("GET", "HEAD", "POST")), below),
        INNER: _policy(layout, records, _host(layout, "/inner", ("GET",))),
    }


def _host(layout: Internet, path: str, methods: tuple[str, ...]) -> EgressRule:
    ports = (layout.allowed_port,)
    return EgressRule(host=HOST, schemes=("http",), ports=ports, methods=methods, path_prefix=path, allow_private=True)


def _policy(layout: Internet, records: Path, *rules: EgressRule) -> EgressConfig:
    endpoint = Extension("endpoint", {"url": f"http://{HOST}:{layout.allowed_port}/open/search?q={{query}}"})
    return EgressConfig(
        rules=rules,
        retrieval=RetrievalConfig(backend=endpoint),
        cache=CacheConfig(mode="on", path=str(records)),
        addresses={HOST: ("127.0.0.1",), **{f"{name}.public.test": found for name, found in _LEADS_INSIDE.items()}},
        requests_max=60,
        connections_max=3,
        rate_per_s=1.0,
        burst=30,
        header_bytes_max=8 << 10,
        request_bytes_max=4 << 10,
        response_bytes_max=64 << 10,
        request_s=2.0,
        timeout_s=2.0,
    )
