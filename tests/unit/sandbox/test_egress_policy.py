"""The allow-list, the addresses behind names, and rates, without a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rollmesh.services.sandbox.config import ProfileConfig, SandboxConfig
from rollmesh.services.sandbox.egress import addresses, policy
from rollmesh.services.sandbox.egress.budget import Rates
from rollmesh.services.sandbox.egress.config import EgressConfig, EgressRule
from rollmesh.services.sandbox.egress.exchange import EgressRefused, EgressRequest
from rollmesh.services.sandbox.egress.upstream import Upstream
from rollmesh.shared.clock import ManualClock

WIKI = EgressRule(host="wiki.test", path_prefix="/wiki/")
BELOW = EgressRule(host=".docs.test", schemes=("http", "https"), methods=("GET", "POST"))


def verdict(method: str, url: str) -> str:
    try:
        policy.allow((WIKI, BELOW), method, policy.parse(url))
    except EgressRefused as error:
        return error.rule
    return "allowed"


@pytest.mark.parametrize(
    ("method", "url", "said"),
    [
        ("GET", "https://wiki.test/wiki/Ada?action=raw", "allowed"),
        ("GET", "HTTPS://WIKI.TEST:443/wiki/Ada", "allowed"),
        ("GET", "https://wiki.test./wiki/Ada", "allowed"),
        ("HEAD", "https://wiki.test/wiki", "path"),
        ("GET", "https://wiki.test/wiki/../admin", "path"),
        ("GET", "https://wiki.test/wiki/%2e%2e/admin", "path"),
        ("GET", "https://wiki.test/wiki/%252e%252e/admin", "path"),
        ("GET", "https://wiki.test/wiki/x%2f..%2fadmin", "path"),
        ("GET", "https://wiki.test/wiki/x%5c..%5cadmin", "path"),
        ("GET", "https://wiki.test/wikis/Ada", "path"),
        ("GET", "https://wiki.test/?/wiki/", "path"),
        ("POST", "https://wiki.test/wiki/Ada", "method"),
        ("GET", "https://wiki.test:8443/wiki/Ada", "port"),
        ("GET", "http://wiki.test/wiki/Ada", "scheme"),
        ("GET", "https://wiki.test.evil.test/wiki/Ada", "host"),
        ("GET", "https://evilwiki.test/wiki/Ada", "host"),
        ("POST", "http://a.b.docs.test/x%2Fy", "allowed"),
        ("GET", "https://docs.test/", "host"),
        ("GET", "https://evildocs.test/", "host"),
        ("GET", "https://wiki.test@evil.test/wiki/", "malformed"),
        ("GET", "https://evil.test\\@wiki.test/wiki/", "malformed"),
        ("GET", "https://wiki.test/wiki/#@evil.test", "malformed"),
        ("GET", "https://wiki.test:0x50/wiki/", "malformed"),
        ("GET", "https://wïki.test/wiki/", "malformed"),
        ("GET", "https://wiki.test/wiki/a b", "malformed"),
        ("GET", "//wiki.test/wiki/", "malformed"),
        ("GET", "https:wiki.test/wiki/", "malformed"),
        ("GET", "https://10.0.0.1/", "ip_literal"),
        ("GET", "https://10.1/", "ip_literal"),
        ("GET", "https://0x7f.1/", "ip_literal"),
        ("GET", "https://017700000001/", "ip_literal"),
        ("GET", "https://wiki.test.0x1/", "ip_literal"),
        ("GET", "https://[::ffff:127.0.0.1]/", "ip_literal"),
        ("GET", "gopher://wiki.test/", "scheme"),
    ],
)
def test_allow_list_decides_by_the_rule_that_is_named(method: str, url: str, said: str) -> None:
    assert verdict(method, url) == said


@pytest.mark.parametrize(
    ("address", "public", "with_private"),
    [
        ("8.8.8.8", True, True),
        ("2001:4860:4860::8888", True, True),
        ("127.0.0.1", False, True),
        ("::1", False, True),
        ("10.2.3.4", False, True),
        ("192.168.1.1", False, True),
        ("fd00::1", False, True),
        ("fec0::1", False, True),
        ("::ffff:10.2.3.4", False, True),
        ("::ffff:8.8.8.8", True, True),
        ("2002:0a02:0304::1", False, True),
        ("64:ff9b::0a02:0304", False, True),
        ("64:ff9b::808:808", True, True),
        ("169.254.169.254", False, False),
        ("::ffff:169.254.169.254", False, False),
        ("64:ff9b::a9fe:a9fe", False, False),
        ("fe80::1", False, False),
        ("fe80::1%eth0", False, False),
        ("0.0.0.0", False, False),
        ("::", False, False),
        ("224.0.0.1", False, False),
        ("255.255.255.255", False, False),
        ("240.0.0.1", False, False),
        ("100.64.0.1", False, False),
        ("not an address", False, False),
    ],
)
def test_addresses_are_public_or_excepted_by_name(address: str, public: bool, with_private: bool) -> None:
    assert addresses.may_connect(address, allow_private=False) is public
    assert addresses.may_connect(address, allow_private=True) is with_private


async def test_one_private_address_among_public_ones_refuses_the_name() -> None:
    async def mixed(host: str, port: int) -> Sequence[str]:
        return ["8.8.8.8", "10.0.0.1"]

    with pytest.raises(EgressRefused, match="not public"):
        await addresses.resolve("a.test", 443, fixed={}, resolver=mixed, allow_private=False)


async def test_host_that_can_be_no_name_is_refused_by_the_systems_resolver() -> None:
    host = f"{'a' * 64}.docs.test"
    with pytest.raises(EgressRefused, match="is not a valid name") as caught:
        await addresses.resolve(host, 443, fixed={}, resolver=addresses.resolve_by_dns, allow_private=False)
    assert caught.value.rule == "upstream"


async def test_name_is_asked_once_and_its_checked_address_is_the_one_connected_to() -> None:
    asked: list[str] = []

    async def rebinding(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return ["127.0.0.1"]

    rule = EgressRule(host="a.test", schemes=("http",), ports=(1,), allow_private=True)
    upstream = Upstream(EgressConfig(rules=(rule,)), rebinding)
    with pytest.raises(EgressRefused, match=r"cannot connect to a\.test:1") as caught:
        await upstream.ask(EgressRequest(method="GET", target="http://a.test:1/"))
    assert (caught.value.rule, asked) == ("upstream", ["a.test"])


def test_tenants_have_a_bucket_each_which_fills_with_time() -> None:
    clock = ManualClock()
    rates = Rates(2.0, 3, clock)
    for _ in range(3):
        rates.spend("a")
    with pytest.raises(EgressRefused, match=r"retry in 0\.50 s"):
        rates.spend("a")
    rates.spend("b")
    clock.advance(0.5)
    rates.spend("a")
    with pytest.raises(EgressRefused):
        rates.spend("a")
    clock.advance(60.0)
    for _ in range(3):
        rates.spend("a")
    with pytest.raises(EgressRefused):
        rates.spend("a")


@pytest.mark.parametrize(
    "fields",
    [
        {"host": "10.0.0.1"},
        {"host": "Wiki.test"},
        {"host": ""},
        {"host": "*.test"},
        {"host": "a.test", "methods": ("CONNECT",)},
        {"host": "a.test", "schemes": ("ftp",)},
        {"host": "a.test", "ports": (0,)},
        {"host": "a.test", "path_prefix": "wiki"},
        {"host": "a.test", "header_files": {"A: b\r\nC": "/x"}},
    ],
)
def test_rule_that_cannot_mean_what_it_says_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must"):
        EgressRule(**fields)  # type: ignore[arg-type]


def test_profile_names_a_policy_that_exists(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`profiles.python.egress` must be a key of egress, got 'web'"):
        SandboxConfig(profiles={"python": ProfileConfig(egress="web")})
