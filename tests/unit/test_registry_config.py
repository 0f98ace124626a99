"""Addresses of etcd, and what isn't one."""

import pytest

from halfmoon.registry.config import RegistryConfig, etcd_endpoints, etcd_uses_tls
from halfmoon.registry.etcd import StoreRefused, StoreUnavailable, prefix_end


@pytest.mark.parametrize(
    ("url", "endpoints", "tls"),
    [
        ("http://127.0.0.1:2379", ("127.0.0.1:2379",), False),
        ("http://etcd", ("etcd:2379",), False),
        ("https://a:1, https://b:2/", ("a:1", "b:2"), True),
        ("http://[::1]:2379", ("[::1]:2379",), False),
    ],
)
def test_addresses(url: str, endpoints: tuple[str, ...], tls: bool) -> None:
    config = RegistryConfig(etcd_url=url)
    assert etcd_endpoints(config) == endpoints
    assert etcd_uses_tls(config) is tls


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("127.0.0.1:2379", "is not an etcd address; write http://host:port"),
        ("http://", "is not an etcd address"),
        ("http://a:99999", "is not an etcd address"),
        ("http://a/path", "is not an etcd address"),
        ("http://a,https://b", "mixes http and https"),
        ("http://me:secret@a", "must not hold credentials"),
    ],
)
def test_what_is_no_address_is_refused(url: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        etcd_endpoints(RegistryConfig(etcd_url=url))
    assert "secret" not in str(caught.value)


def test_the_errors_say_where_why_and_what_to_do() -> None:
    assert str(StoreUnavailable(("a:1", "b:2"), "refused")) == (
        "no etcd answers at a:1, b:2 (refused): start one or set HALFMOON_REGISTRY_ETCD_URL"
    )
    assert str(StoreRefused(("a:1",), "wrong password")) == "etcd at a:1 refuses: wrong password"


@pytest.mark.parametrize(("prefix", "end"), [(b"ab", b"ac"), (b"a\xff", b"b"), (b"\xff\xff", b"\0")])
def test_the_end_of_a_prefix(prefix: bytes, end: bytes) -> None:
    assert prefix_end(prefix) == end
