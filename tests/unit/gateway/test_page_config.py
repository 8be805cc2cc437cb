"""Settings of the page: where it may listen, when it is served, and the port that a run keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollmesh.app.page_link import page_link
from rollmesh.mesh.config import MeshConfig
from rollmesh.mesh.run_layout import open_layout
from rollmesh.services.gateway.page import server
from rollmesh.services.gateway.page.config import PageConfig
from rollmesh.services.gateway.page.server import is_served, page_url
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.errors import ConfigError


def mesh(**page: Any) -> MeshConfig:
    return config_from_dict(MeshConfig, {"gateway": {"page": page}})


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ({"address": "127.0.0.1"}, "must be host:port, got '127.0.0.1'"),
        ({"address": ":8080"}, "must be host:port"),
        ({"address": "127.0.0.1:99999"}, "must be host:port"),
        ({"address": "0.0.0.0:8080"}, "gateway.page.advertise` must name the host"),
        ({"address": "10.0.0.1:8080"}, "gateway.page is reachable from other machines"),
        ({"client_certificates": True}, "needs `security` with ca, certificate and key"),
        ({"streams_max": 0}, "must be >= 1"),
    ],
)
def test_wrong_settings_name_the_key_and_the_remedy(page: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mesh(**page)
    assert problem in str(caught.value)


def test_the_page_is_served_on_loopback_or_where_it_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_served(PageConfig(), local=True)
    assert not is_served(PageConfig(), local=False)
    assert is_served(PageConfig(address="127.0.0.1:8080"), local=False)
    assert not is_served(PageConfig(serve="never"), local=True)
    monkeypatch.setattr(server, "_LIBRARIES", ("a_library_that_does_not_exist",))
    assert not is_served(PageConfig(), local=True)
    assert is_served(PageConfig(serve="always"), local=False)


def test_a_run_keeps_its_port_also_in_a_folder_of_an_earlier_version(tmp_path: Path) -> None:
    config = mesh()
    first = open_layout(config, run_dir=tmp_path / "run", base_dir=tmp_path)
    assert open_layout(config, run_dir=tmp_path / "run", base_dir=tmp_path).page == first.page
    addresses = tmp_path / "run" / "addresses.json"
    known = json.loads(addresses.read_text())
    del known["page"]
    addresses.write_text(json.dumps(known))
    older = open_layout(config, run_dir=tmp_path / "run", base_dir=tmp_path)
    assert open_layout(config, run_dir=tmp_path / "run", base_dir=tmp_path).page == older.page
    assert older.gateway == first.gateway
    named = open_layout(mesh(address="127.0.0.1:8080"), run_dir=tmp_path / "run", base_dir=tmp_path)
    assert named.page == "127.0.0.1:8080"


def test_the_link_has_a_ticket_and_not_the_token(tmp_path: Path) -> None:
    layout = open_layout(mesh(address="127.0.0.1:8080"), run_dir=tmp_path / "run", base_dir=tmp_path)
    link = page_link(layout)
    assert link.startswith("http://127.0.0.1:8080/?login=")
    assert layout.access.token not in link
    with pytest.raises(ConfigError, match="does not serve the live page"):
        page_link(open_layout(mesh(serve="never"), run_dir=tmp_path / "run", base_dir=tmp_path))


def test_the_url_has_the_advertised_host() -> None:
    assert (
        page_url(PageConfig(address="0.0.0.0:8080", advertise="mesh.example.org"), 8080, secure=True)
        == "https://mesh.example.org:8080/"
    )
