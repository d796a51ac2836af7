"""The benchmark of request bodies, with small bodies."""

from __future__ import annotations

from afferent.store.daemon.server import StoreServer
from afferent.store.state.region import DEFAULT_SHARES
from afferent.types import MiB
from benchmarks import body


def test_the_heap_and_the_processor_time_of_a_body() -> None:
    data = body._request(bytes(4_000_000))
    with StoreServer(32 * MiB, shares=DEFAULT_SHARES) as server, body._host(server.address) as host:
        for _ in range(2):  # the first call also allocates memory that stays
            cut_mb, parsed_mb = host.heap_mb("/cut", data), host.heap_mb("/parse", data)
        assert 0 < cut_mb < 2
        assert parsed_mb > 12
        assert host.cpu_ms("/cut", data, num_times=2) > 0
        image = body._request(body._image())
        assert not host.post("/decode", image)["is_known"]
        assert host.post("/decode", image)["is_known"]


def test_the_image_is_as_large_as_is_said() -> None:
    assert 540_000 < len(body._image()) < 600_000
