"""The link with which a browser opens the live page of a run on this host."""

from __future__ import annotations

import msgspec

from rollmesh.mesh.run_layout import RunLayout
from rollmesh.services.gateway.page.login import new_ticket
from rollmesh.services.gateway.page.server import is_served, page_url
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.rpc.addresses import host_of, is_loopback, port_of


def page_link(layout: RunLayout) -> str:
    """Return a link that logs in once. Raise ConfigError with the remedy if the gateway of the run does not serve the
    page."""
    if not has_page(layout):
        raise ConfigError(
            "the gateway of this run does not serve the live page; install its libraries with `pip install "
            "'rollmesh[openai]'`, and set `gateway.page.address` if the gateway is not on loopback"
        )
    config = msgspec.structs.replace(layout.config.gateway.page, address=layout.page)
    url = page_url(config, port_of(layout.page), secure=layout.access.tls is not None)
    return f"{url}?login={new_ticket(layout.access.token, clock=SystemClock())}"


def has_page(layout: RunLayout) -> bool:
    """Return whether the gateway of the run serves the live page."""
    return is_served(layout.config.gateway.page, local=is_loopback(host_of(layout.gateway)))
