"""The base of task sources that ask models to write tasks."""

from __future__ import annotations

from rollmesh.services.data.source import TaskSource
from rollmesh.shared.endpoints.answer import AsksBlocking
from rollmesh.shared.errors import ConfigError


class AskingSource(TaskSource):
    """Base of task sources that ask endpoints. A source is read at every start, so its endpoints need `replay`
    (docs/endpoints.md)."""

    _endpoints: AsksBlocking | None = None

    def use_endpoints(self, endpoints: AsksBlocking) -> None:
        self._endpoints = endpoints

    def ask(self, endpoint: str, question: str) -> str:
        """Return the answer without surrounding space. Raise ConfigError without endpoints, else as
        `AsksBlocking.ask`."""
        if self._endpoints is None:
            raise ConfigError(f"the source of tasks needs the endpoint `{endpoint}` in the table `endpoints`")
        return self._endpoints.ask(endpoint, question).text.strip()
