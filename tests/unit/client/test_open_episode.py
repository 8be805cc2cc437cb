"""An episode that an application opens: when the client drops it, and what of it a log line shows."""

from __future__ import annotations

from typing import Any, cast

import pytest

from rollmesh.client.client import Run
from rollmesh.v1 import run_pb2


class Recording(Run):
    """Opens every episode, and records how it is finished."""

    def __init__(self) -> None:
        super().__init__(cast(Any, None), "r", "main", "main")
        self.finished: list[run_pb2.FinishEpisodeRequest] = []

    async def ask(self, verb: str, request: Any, limit_s: float | None = None) -> Any:
        if verb == "OpenEpisode":
            return run_pb2.OpenEpisodeResponse(lease_id=f"{request.key}#1", base_url="http://w/v1", api_key="sk-secret")
        self.finished.append(request)
        return run_pb2.FinishEpisodeResponse()


async def test_an_error_in_the_context_drops_the_episode_and_its_end_does_not() -> None:
    run = Recording()
    async with run.episode("kept"):
        pass
    assert not run.finished
    with pytest.raises(ZeroDivisionError):
        async with run.episode("dropped"):
            raise ZeroDivisionError
    assert run.finished == [run_pb2.FinishEpisodeRequest(run="r", lease_id="dropped#1")]


async def test_the_text_of_an_open_episode_has_no_key() -> None:
    async with Recording().episode("a") as episode:
        assert episode.api_key == "sk-secret"
        assert "secret" not in f"{episode} {episode!r}"
