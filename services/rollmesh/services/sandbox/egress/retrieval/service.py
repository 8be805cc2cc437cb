"""The proxy's own paths for sessions: /search?q=, /browse?url=, /retrieve?id=. Responses are JSON, bounded, and equal
for equal requests."""

from __future__ import annotations

from urllib.parse import parse_qs

import msgspec

from rollmesh.services.sandbox.egress.exchange import EgressRefused, EgressReply, EgressRequest
from rollmesh.services.sandbox.egress.retrieval.backend import Backend
from rollmesh.services.sandbox.egress.retrieval_config import RetrievalConfig

_encoder = msgspec.json.Encoder(order="deterministic")
_PARAMETERS = {"/search": "q", "/browse": "url", "/retrieve": "id"}


class Retrieval:
    """Serves requests for the proxy's own paths."""

    def __init__(self, config: RetrievalConfig, backend: Backend, response_bytes_max: int) -> None:
        self._shape = config
        self._backend = backend
        self._bytes_max = response_bytes_max

    @property
    def digest(self) -> str:
        """Digest of everything that responses depend on."""
        shape = msgspec.json.encode(
            (self._shape.results_max, self._shape.snippet_chars_max, self._shape.page_chars_max)
        )
        return f"{self._backend.digest}:{shape.decode()}"

    def close(self) -> None:
        self._backend.close()

    async def answer(self, request: EgressRequest) -> EgressReply:
        """Serve a request. Raises EgressRefused."""
        path, value = self._question(request)
        match path:
            case "/search":
                answer: object = {"results": await self._backend.search(value)}
            case "/browse":
                answer = {"page": await self._backend.page(value), "page_chars_max": self._shape.page_chars_max}
            case _:
                answer = {"page": await self._backend.document(value), "page_chars_max": self._shape.page_chars_max}
        body = _encoder.encode(answer)
        if len(body) > self._bytes_max:
            raise EgressRefused("response_bytes", f"the response exceeds {self._bytes_max} bytes")
        return EgressReply(status=200, headers={"content-type": "application/json"}, body=body)

    def _question(self, request: EgressRequest) -> tuple[str, str]:
        path, _, query = request.target.partition("?")
        if path not in _PARAMETERS:
            raise EgressRefused("not_found", f"unknown path {path[:100]!r}; known: {', '.join(_PARAMETERS)}")
        if request.method != "GET":
            raise EgressRefused("method", f"{path} must be requested by GET")
        try:
            values = parse_qs(query, strict_parsing=True, max_num_fields=1, errors="strict").get(_PARAMETERS[path], [])
        except ValueError:
            values = []
        if len(values) != 1 or not values[0].strip():
            raise EgressRefused("malformed", f"{path} takes one parameter, `{_PARAMETERS[path]}`")
        if len(values[0]) > self._shape.query_chars_max:
            raise EgressRefused("request_bytes", f"the query exceeds {self._shape.query_chars_max} characters")
        return path, values[0]
