"""Measure a fetch of 4 values of 30 MiB from a tier with verification, and a lookup of 64 names.

The server is a `redis-server` or `valkey-server` in a network namespace of this machine, behind a
link that is shaped or not, or on the loopback interface where namespaces are not permitted. Server
and client share the machine's cores. The sides are:

- `floor`: raw TCP from a process that sends as many bytes, read with `recv_into` into warm memory;
- `plain`: a client that gets whole values from the same server, reads them likewise, and verifies
  nothing;
- `py`: the official client;
- `ours`: every byte is verified in place (BLAKE3), as a node does; `ours_raw`: the same without
  verification;
- `ray`: Ray's object transfer, where it is installed (`make bench-ray`): four arrays from another
  node's object store, without verification.

A lookup is for 64 names, all of which are absent; its lower bound is `ping`.

Expected before the measurement: ours 1.1 times plain, because two threads make the digests beside
it; on two cores that the server needs, too, rather 1.3 times; 1.05 times raw TCP where the link is
slow. A lookup: a round trip and 0.3 ms.
"""

from __future__ import annotations

import contextlib
import mmap
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial

import redis

from afferent.errors import ConfigError
from afferent.tier.protocol import Wanted
from afferent.tier.redis_tier import RedisTier
from afferent.tier.sealed import Sealer
from afferent.tier.vault import Body, Vault, Wish
from afferent.types import ContentKey, MiB, ObjectKind
from benchmarks.link import Link, free_port, link
from benchmarks.peers.ray_nodes import ray_nodes
from benchmarks.peers.ray_store import is_installed
from benchmarks.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row, alternate

QUESTION = "What does it cost to fetch from a tier, and to look for what is not there?"
COLUMNS = ("case", "link", "floor_ms", "ours_ms", "ours_raw_ms", "plain_ms", "py_ms", "ray_ms")

_NUM_VALUES, _VALUE_NBYTES = 4, 30 * MiB
_ALL_NBYTES = _NUM_VALUES * _VALUE_NBYTES
_NUM_NAMES = 64
_TIMEOUT_S = 60.0
_MOST_OF_PLAIN, _MOST_OF_TCP = 1.1, 1.2
_MOST_BESIDE_PING_MS = 0.3
_START_TIMEOUT_S = 20.0
_SIDES = ("floor", "ours", "ours_raw", "plain", "py")
_WITHOUT_RAY = "ray: it is not installed, so its column is empty; make bench-ray installs it"


def num_steps(*, quick: bool) -> int:
    return 3 * (len(_SIDES) + is_installed() + 2) * (_num_samples(quick=quick) + 1)


def _num_samples(*, quick: bool) -> int:
    return MIN_SAMPLES if quick else 2 * MIN_SAMPLES


def run(*, quick: bool, after_sample: Callable[[], None]) -> Report:
    report, meter = Report("tier", QUESTION), BusyMeter()
    number = _num_samples(quick=quick)
    with (
        link() as net,
        redis_at(net) as port,
        _sender(net) as sender,
        ray_nodes(net) as ray,
    ):
        for rate in net.rates:
            net.shape(rate)
            with _Sides(net.host, port, sender) as sides:
                fetching = {name: getattr(sides, name) for name in _SIDES}
                if ray is not None:
                    fetching["ray"] = partial(ray.fetch, _NUM_VALUES, _VALUE_NBYTES)
                fetched = alternate(fetching, num_samples=number, after_sample=after_sample)
                looking = {"floor": sides.ping, "ours": sides.look_up}
                looked = alternate(looking, num_samples=number, after_sample=after_sample)
            for case, samples in (("fetch 4 x 30 MiB", fetched), ("look up 64", looked)):
                keys = {"case": case, "link": rate or net.name}
                row = Row(keys, {f"{name}_ms": ms for name, ms in samples.items()})
                report.rows.append(row)
                report.goals.append(_goal(row, is_shaped=bool(rate)))
    report.notes = ["server and clients share the machine's cores"]
    if not is_installed():
        report.notes.append(_WITHOUT_RAY)
    report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    return report


def _goal(row: Row, *, is_shaped: bool) -> Goal:
    where, ours = row.keys["link"], row.median("ours_ms")
    if "plain_ms" not in row.samples:
        beside, most = ours - row.median("floor_ms"), _MOST_BESIDE_PING_MS
        what = f"{where}: a look-up of 64, less a round trip <= {most:g} ms"
        return Goal(what, beside <= most, beside)
    control, most = ("floor", _MOST_OF_TCP) if is_shaped else ("plain", _MOST_OF_PLAIN)
    times = ours / row.median(f"{control}_ms")
    return Goal(f"{where}: ours / {control} <= {most:g}", times <= most, times)


class _Sides:
    """The sides; each reads 120 MiB into the same warm memory, and returns the milliseconds."""

    def __init__(self, host: str, port: int, sender: int) -> None:
        self._memory = mmap.mmap(-1, _ALL_NBYTES)
        self._target = memoryview(self._memory)
        self._target[:] = bytes(len(self._target))
        self._sender = (host, sender)
        self._tier = RedisTier(f"redis://{host}:{port}")
        self._vault = Vault(self._tier, Sealer(secrets.token_bytes(16)))
        self._client = redis.Redis(host=host, port=port)
        self._sock = socket.create_connection((host, port))
        self._keys = [ContentKey(secrets.token_bytes(32)) for _ in range(_NUM_VALUES)]
        for index, key in enumerate(self._keys):
            data = secrets.token_bytes(_VALUE_NBYTES)
            body = Body(key, ObjectKind.FEATURES, memoryview(data))
            self._vault.put([body], ttl_s=3600, deadline_s=_soon())
            self._client.set(f"whole-{index}", data)

    def __enter__(self) -> _Sides:
        return self

    def __exit__(self, *_: object) -> None:
        self._vault.close()
        self._client.close()
        self._sock.close()
        self._target.release()
        self._memory.close()

    def _place(self, index: int) -> memoryview:
        return self._target[index * _VALUE_NBYTES : (index + 1) * _VALUE_NBYTES]

    def floor(self) -> float:
        start_s = time.perf_counter()
        with socket.create_connection(self._sender) as sock:
            _receive(sock, self._target)
        return _ms_since(start_s)

    def ours(self) -> float:
        start_s = time.perf_counter()
        heads = self._vault.look_up(self._keys, deadline_s=_soon())
        wishes = [Wish(head, self._place(i)) for i, head in enumerate(heads) if head is not None]
        if self._vault.fetch(wishes, deadline_s=_soon()) != [True] * _NUM_VALUES:
            raise ConfigError("a value was not there")
        return _ms_since(start_s)

    def ours_raw(self) -> float:
        start_s = time.perf_counter()
        names = [self._vault.name_of(key) for key in self._keys]
        self._tier.exists_many(names, deadline_s=_soon())
        wanted = [Wanted(name, self._place(index)) for index, name in enumerate(names)]
        if not all(self._tier.get_many_into(wanted, deadline_s=_soon())):
            raise ConfigError("a value was not there")
        return _ms_since(start_s)

    def plain(self) -> float:
        start_s = time.perf_counter()
        self._sock.sendall(b"".join(b"GET whole-%d\r\n" % i for i in range(_NUM_VALUES)))
        for index in range(_NUM_VALUES):
            head = bytearray(len(b"$%d\r\n" % _VALUE_NBYTES))
            _receive(self._sock, memoryview(head))
            _receive(self._sock, self._place(index))
            _receive(self._sock, memoryview(bytearray(2)))
        return _ms_since(start_s)

    def py(self) -> float:
        start_s = time.perf_counter()
        for index in range(_NUM_VALUES):
            self._place(index)[:] = self._client.get(f"whole-{index}")  # type: ignore[assignment]
        return _ms_since(start_s)

    def ping(self) -> float:
        start_s = time.perf_counter()
        self._client.ping()
        return _ms_since(start_s)

    def look_up(self) -> float:
        names = [ContentKey(index.to_bytes(32, "little")) for index in range(_NUM_NAMES)]
        start_s = time.perf_counter()
        self._vault.look_up(names, deadline_s=_soon())
        return _ms_since(start_s)


def _soon() -> float:
    return time.monotonic() + _TIMEOUT_S


def _ms_since(start_s: float) -> float:
    return 1e3 * (time.perf_counter() - start_s)


def _receive(sock: socket.socket, target: memoryview) -> None:
    num = 0
    while num < len(target):
        received = sock.recv_into(target[num:])
        if received == 0:
            raise ConfigError("the other end has hung up")
        num += received


@contextlib.contextmanager
def redis_at(net: Link) -> Iterator[int]:
    """Run a server at the other end of the link; yield its port.

    Raises:
        ConfigError: None is installed, or it does not start.
    """
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        raise ConfigError("no redis-server is installed (Debian: apt-get install redis-server)")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [*net.there, program, "--port", str(port), "--save", "", "--dir", folder]
        command += ["--bind", net.host, "--protected-mode", "no"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            _wait_for(net.host, port)
            yield port
        finally:
            process.kill()
            process.wait()


def _wait_for(host: str, port: int) -> None:
    until_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            redis.Redis(host=host, port=port).ping()
        except redis.ConnectionError:
            if time.monotonic() > until_s:
                raise ConfigError("the server does not start") from None
            time.sleep(0.02)
        else:
            return


@contextlib.contextmanager
def _sender(net: Link) -> Iterator[int]:
    """Run a process at the other end that sends the bytes to each client; yield its port."""
    port = free_port()
    command = [*net.there, sys.executable, "-c", _SEND, net.host, str(port), str(_ALL_NBYTES)]
    process = subprocess.Popen(command)
    try:
        until_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection((net.host, port)):
                break
            if time.monotonic() > until_s:
                raise ConfigError("the sender does not start")
            time.sleep(0.02)
        yield port
    finally:
        process.kill()
        process.wait()


_SEND = """
import socket, sys
data = bytes(int(sys.argv[3]))
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as listener:
    while True:
        sock, _ = listener.accept()
        try:
            sock.sendall(data)
        except OSError:
            pass
        sock.close()
"""
