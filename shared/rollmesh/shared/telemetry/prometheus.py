"""Metrics for Prometheus: one /metrics per process, served on the event loop of its nodes.

Sources are read on that loop, so a scrape sees consistent state; a separate thread writes the text. If one source
fails, only its series are missing. One collection runs at a time, and simultaneous and close scrapes share it, so that
a flood of scrapes costs no more than a few. The address is written to RUN/metrics as a target file of Prometheus'
`file_sd_configs`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from rollmesh.shared.errors import ConfigError, MeshError
from rollmesh.shared.net.asgi_server import AsgiServer, bind_http
from rollmesh.shared.telemetry.metrics import Metric, Reading, Source

FOLDER = "metrics"
"""Folder of target files, in the run folder."""
SCRAPE_S_MAX = 5.0
"""Limit of reading the sources. A scrape that takes longer gets status 503."""
FRESH_S = 0.2
"""Time in which later scrapes get the same text, in seconds."""
CONNECTIONS_MAX = 128
PORTS_MAX = 64
"""Number of ports that are tried, from a fixed one on."""
_log = logging.getLogger(__name__)


class PrometheusMeter(Collector):
    """A `metrics.Meter` and the HTTP server that exposes it. It is created and closed on the event loop."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._instruments: dict[str, Any] = {}
        self._sources: dict[str, Source] = {}
        self._loop = asyncio.get_running_loop()
        self._server: AsgiServer | None = None
        self._target: Path | None = None
        self._scrape: asyncio.Task[bytes] | None = None
        """The newest collection, until its text is no longer fresh."""

    # metrics.Meter ----------------------------------------------------------------------------------------------------

    def count(self, metric: Metric, node: str, labels: tuple[str, ...], amount: float) -> None:
        self._instrument(metric, Counter).labels(node, *labels).inc(amount)

    def observe(self, metric: Metric, node: str, labels: tuple[str, ...], value: float) -> None:
        self._instrument(metric, Histogram, buckets=metric.buckets).labels(node, *labels).observe(value)

    def _instrument(self, metric: Metric, kind: type, **options: Any) -> Any:
        made = self._instruments.get(metric.name)
        if made is None:
            made = kind(metric.name, metric.help, ("node", *metric.labels), registry=self._registry, **options)
            self._instruments[metric.name] = made
        return made

    # Sources ----------------------------------------------------------------------------------------------------------

    def add_source(self, node: str, source: Source) -> None:
        """Expose the values of `source` as series of `node`."""
        self._sources[node] = source

    def remove_source(self, node: str) -> None:
        self._sources.pop(node, None)

    def describe(self) -> Iterable[Any]:
        """Return no series, because registering must not read the nodes."""
        return []

    def collect(self) -> Iterable[Any]:
        """Return the values of all sources. It runs on the thread of a scrape."""
        reading = asyncio.run_coroutine_threadsafe(self._read_all(), self._loop)
        try:
            return _families(reading.result(SCRAPE_S_MAX))
        except TimeoutError:
            reading.cancel()
            raise

    async def _read_all(self) -> list[tuple[str, Reading]]:
        found: list[tuple[str, Reading]] = []
        for node, source in list(self._sources.items()):
            try:
                found += [(node, reading) for reading in await source()]
            except MeshError as err:  # the series of a service that stops or has no leader are missing until it returns
                _log.debug("no metrics of %s: %s", node, err)
        return found

    # Serving ----------------------------------------------------------------------------------------------------------

    async def serve(self, host: str, port: int, *, folder: Path, process: str) -> str:
        """Serve at host:port, or at the next free port. Return the address. ConfigError if none is free."""
        listener = _bind(host, port)
        bound = listener.getsockname()[1]
        self._server = await AsgiServer.start(self._answer, listener, num_max=CONNECTIONS_MAX)
        address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        folder.joinpath(FOLDER).mkdir(parents=True, exist_ok=True)
        self._target = folder / FOLDER / f"{process}.json"
        self._target.write_text(json.dumps([{"targets": [address], "labels": {"process": process}}]) + "\n")
        return address

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        """The ASGI application."""
        if scope["path"] not in ("/", "/metrics"):
            status, body = 404, b"use /metrics\n"
        elif scope["method"] not in ("GET", "HEAD"):
            status, body = 405, b"use GET\n"
        else:
            try:
                status, body = 200, await asyncio.shield(self._shared_scrape())
            except TimeoutError:
                status, body = 503, b"the process is too busy to read its metrics; retry later\n"
        kind = b"text/plain; version=0.0.4; charset=utf-8" if status == 200 else b"text/plain"
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _shared_scrape(self) -> asyncio.Task[bytes]:
        if self._scrape is None:
            self._scrape = asyncio.create_task(asyncio.to_thread(generate_latest, self._registry), name="metrics")
            self._scrape.add_done_callback(self._scraped)
        return self._scrape

    def _scraped(self, scrape: asyncio.Task[bytes]) -> None:
        if not scrape.cancelled():
            scrape.exception()  # marks it as seen: its clients may be gone
        self._loop.call_later(FRESH_S, self._forget_scrape)

    def _forget_scrape(self) -> None:
        self._scrape = None

    async def close(self) -> None:
        """Stop the server and remove its target file, so that Prometheus no longer scrapes it."""
        if self._server is not None:
            await self._server.close()
        if self._scrape is not None:
            await asyncio.wait({self._scrape})
        if self._target is not None:
            self._target.unlink(missing_ok=True)


def _bind(host: str, port: int) -> socket.socket:
    last = port + PORTS_MAX if port else 1
    for one in range(port, last):
        try:
            return bind_http(f"[{host}]:{one}" if ":" in host else f"{host}:{one}", "telemetry.metrics_address")
        except ConfigError as err:
            cause = err
    raise ConfigError(
        f"telemetry.metrics_address: no port of {host}:{port} to {last - 1} can be listened on ({cause.message}); "
        "use port 0 for a free one"
    )


def _families(readings: Iterable[tuple[str, Reading]]) -> list[Any]:
    families: dict[str, Any] = {}
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    for node, reading in readings:
        metric, labels = reading.metric, (node, *reading.labels)
        if metric.name not in families:
            families[metric.name] = kinds[metric.kind](metric.name, metric.help, labels=("node", *metric.labels))
        family = families[metric.name]
        if isinstance(reading.value, Mapping):
            buckets, total = _histogram(reading.value, metric.buckets)
            family.add_metric(labels, buckets=buckets, sum_value=total)
        else:
            family.add_metric(labels, reading.value)
    return list(families.values())


def _histogram(observed: Mapping[int, int], bounds: tuple[float, ...]) -> tuple[list[tuple[str, float]], float]:
    upper = [*bounds, float("inf")]
    buckets = [
        (
            "+Inf" if bound == float("inf") else str(float(bound)),
            float(sum(n for v, n in observed.items() if v <= bound)),
        )
        for bound in upper
    ]
    return buckets, float(sum(value * num for value, num in observed.items()))
