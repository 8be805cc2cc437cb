"""The client of endpoints for task sources, whose tasks are read by code that is not asynchronous, before the nodes
have joined.

A source is read again at every start and must give the same tasks. So its endpoint must have `replay`; with `record` in
the same folder, the first start asks and later ones read the recorded answers.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Self, Unpack

from rollmesh.shared.endpoints.answer import AskOptions, EndpointAnswer, Messages
from rollmesh.shared.endpoints.client import Endpoints
from rollmesh.shared.endpoints.config import EndpointConfig
from rollmesh.shared.endpoints.metering import EndpointMeter
from rollmesh.shared.errors import ConfigError


class BlockingEndpoints:
    """A context in which `ask` blocks the calling thread. The requests run on an event loop in a separate thread."""

    def __init__(
        self, table: Mapping[str, EndpointConfig], *, base_dir: Path = Path(), spent_dir: Path | None = None
    ) -> None:
        self._table = table
        self._endpoints = Endpoints(table, base_dir=base_dir, spent_dir=spent_dir)
        self._meter = EndpointMeter("source", caller="source")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is None or self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._endpoints.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = None

    def ask(self, endpoint: str, messages: Messages, **options: Unpack[AskOptions]) -> EndpointAnswer:
        """Return the answer of an endpoint. Raise ConfigError if it has no `replay`, else as `Endpoints.ask`."""
        config = self._table.get(endpoint)
        if config is not None and not config.replay:
            raise ConfigError(
                f"`endpoints.{endpoint}.replay` must be set, because a task source is read at every start and must "
                "give the same tasks; set `record` and `replay` to one folder",
                key=f"endpoints.{endpoint}.replay",
            )
        asking = self._endpoints.ask(endpoint, messages, meter=self._meter, **options)
        return asyncio.run_coroutine_threadsafe(asking, self._running_loop()).result()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="endpoints of sources", daemon=True)
            self._thread.start()
        return self._loop
