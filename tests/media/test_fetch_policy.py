"""The URLs and addresses that may be fetched from."""

from __future__ import annotations

import ipaddress
import random

import pytest

from afferent.errors import ForbiddenUrl
from afferent.media.fetch.fetch_policy import check_redirect, check_url, is_public

NOT_PUBLIC = """
127.0.0.1 127.8.8.8 0.0.0.0 0.1.2.3 10.1.2.3 172.16.0.1 172.31.255.255 192.168.1.1 169.254.169.254
100.64.0.1 100.100.100.200 192.0.0.1 192.0.0.192 192.0.2.1 192.88.99.1 198.18.0.1 198.19.255.255
198.51.100.1 203.0.113.1 224.0.0.1 239.255.255.255 240.0.0.1 255.255.255.255 168.63.129.16
:: ::1 ::7f00:1 ::1.1.1.1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:169.254.169.254
::ffff:168.63.129.16 ::ffff:0:1.1.1.1 64:ff9b::a00:1 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe
64:ff9b:1::1 64:ff9b:1::1.1.1.1 2002:7f00:1:: 2002:101:101::1 2001:0:1::1 2001:0:101:101::1
2001:10::1 2001:20::1 2001:db8::1 3fff::1 5f00::1 100::1 fe80::1 fe80::1%eth0 fec0::1 feff::1
fc00::1 fd00:ec2::254 ff02::1 ff0e::1 4000::1 2606:4700::5efe:10.0.0.1 2606:4700::200:5efe:1.1.1.1
2606:4700::1111%eth0 localhost 1.1.1 0x7f000001
"""
PUBLIC = """
1.1.1.1 8.8.8.8 93.184.216.34 100.63.255.255 100.128.0.1 172.15.255.255 172.32.0.1 168.63.129.17
223.255.255.255 2606:4700::1111 2a00:1450:4001::1 2001:200::1 2001:4860:4860::8888 ::ffff:1.1.1.1
64:ff9b::1.1.1.1
"""


@pytest.mark.parametrize("address", NOT_PUBLIC.split())
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC.split())
def test_addresses_that_are(address: str) -> None:
    assert is_public(address)


def test_what_the_standard_library_calls_private_is_never_public() -> None:
    chance = random.Random(0)
    for _ in range(5000):
        v4 = ipaddress.IPv4Address(chance.getrandbits(32))
        assert not is_public(str(v4)) or v4.is_global
        v6 = ipaddress.IPv6Address(chance.getrandbits(128) >> 3 | 1 << 125)
        assert not is_public(str(v6)) or v6.is_global


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://example.com/",
        "gopher://example.com/",
        "//example.com/",
        "example.com/a.png",
        "http://",
        "http:///a",
        "http:example.com",
        "http://user@example.com/",
        "http://user:pass@example.com/",
        "http://@example.com/",
        "http://:80/",
        "http://example.com:8080/",
        "http://example.com:99999/",
        "http://example.com:-1/",
        "http://example.com\\@127.0.0.1/",
        "http://example.com/a\\b",
        "http://example.com/a b",
        "http://exa\tmple.com/",
        " http://example.com/",
        "http://example.com/\r\nHost: evil",
        "http://example.com/\x00",
        "http://example.com/\x7f",
        "http://exämple.com/",
        "http://example.com/ä",
        "http://127.0.0.1%2f@example.com/",
        "http://example%2ecom/",
        "http://[::1",
        "http://[::1%25eth0]/",
        "http://[v1.a]/",
        "http://exa$mple.com/",
        "http://a,b/",
        "http://" + "a" * 300 + "/",
        "https://example.com/" + "a" * 9000,
    ],
)
def test_urls_that_are_refused_unseen(url: str) -> None:
    with pytest.raises(ForbiddenUrl):
        check_url(url)


def test_urls_that_are_not() -> None:
    target = check_url("https://Example.com/a.png?b#c")
    assert (target.host, target.port, target.path) == ("example.com", 443, "/a.png?b")
    assert target.host_header == "example.com"
    assert check_url("http://example.com:443/").host_header == "example.com:443"
    assert check_url("http://example.com").path == "/"
    assert check_url("http://example.com?a=http://u@b:1/").path == "/?a=http://u@b:1/"
    assert check_url("http://[2606:4700::1111]/").host_header == "[2606:4700::1111]"


def test_other_ports_of_ones_own() -> None:
    assert check_url("http://example.com:8080/", allow=["example.com:8080"]).port == 8080
    assert check_url("http://[::1]:8080/", allow=["[::1]:8080"]).host_header == "[::1]:8080"
    with pytest.raises(ForbiddenUrl):
        check_url("http://example.com:8081/", allow=["example.com:8080"])


@pytest.mark.parametrize(
    ("location", "url"),
    [
        ("/b", "https://example.com/b"),
        ("b?c", "https://example.com/x/b?c"),
        ("//other.example/b", "https://other.example/b"),
        ("https://other.example/", "https://other.example/"),
        ("http://example.com/", None),
        ("http://other.example/", None),
        ("file:///etc/passwd", None),
        ("//user@other.example/", None),
        ("//other.example:22/", None),
        ("ht\ttps://other.example/", None),
        ("\x00/b", None),
        ("/\\other.example/", None),
        ("//[", None),
        ("/ü", None),
    ],
)
def test_redirects(location: str, url: str | None) -> None:
    source = check_url("https://example.com/x/a")
    if url is None:
        with pytest.raises(ForbiddenUrl):
            check_redirect(source, location)
    else:
        assert check_redirect(source, location).url == url
