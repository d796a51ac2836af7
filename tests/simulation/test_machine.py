"""The simulated machine behaves like a real one, and its seed determines it."""

from __future__ import annotations

import ast
import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from afferent.runtime import wire
from tests.simulator import socket_calls, system, threads
from tests.simulator.descriptors import Eventfd
from tests.simulator.history import Event, diagram
from tests.simulator.loop import Loop
from tests.simulator.machine import Machine, Process
from tests.simulator.sockets import LinkRules
from tests.simulator.substitution import MODULES, simulated
from tests.simulator.threads import Killed

ROOT = Path(__file__).parents[2]


@pytest.fixture
def machine() -> Iterator[Machine]:
    with simulated():
        machine = Machine("test")
        yield machine
        machine.end_all()


def run(process: Process, main: Callable[[], Coroutine[Any, Any, object]]) -> Loop:
    loop = Loop(process)
    loop.call_soon(lambda: loop.create_task(main()))
    return loop


def test_time_passes_only_while_everybody_waits(machine: Machine) -> None:
    seen: list[float] = []

    async def main() -> None:
        await asyncio.sleep(3600.0)
        seen.append(machine.now_s)

    run(machine.start_process("one"), main)
    machine.run(until_s=7200.0)
    assert seen == [pytest.approx(3600.0, abs=0.01)]
    assert machine.num_events < 10


def test_a_clock_that_drifts_and_jumps_moves_timers_with_it(machine: Machine) -> None:
    process, seen = machine.start_process("one"), []

    async def main() -> None:
        await asyncio.sleep(10.0)
        seen.append(machine.now_s)

    run(process, main)
    machine.after(1.0, lambda: process.run_clock(rate=2.0, jump_s=5.0))
    machine.run(until_s=60.0)
    assert seen == [pytest.approx(3.0, abs=0.01)]  # 1 s, a jump of 5 s, 4 s at double rate


def echo(machine: Machine) -> Process:
    """Start a process that sends back each message."""
    process = machine.start_process("echo")
    fd = socket_calls.listen(process, "echo")

    async def main() -> None:
        listener = socket_calls.Socket(fileno=fd)
        async for sock, _ in wire.accept_peers(listener):  # type: ignore[arg-type]
            channel = wire.AsyncChannel(lambda frame: channel.send(frame), lambda: None)  # noqa: B023
            await channel.attach(sock)

    run(process, main)
    return process


def ask(machine: Machine, said: list[bytes], heard: list[object]) -> Process:
    process = machine.start_process("asks")

    def main() -> None:
        channel = wire.SyncChannel(wire.connect("echo", timeout_s=5.0))
        for each in said:
            try:
                channel.send(each, timeout_s=5.0)
                heard.append(channel.receive(timeout_s=5.0))
            except Exception as error:
                heard.append(type(error).__name__)

    process.start_thread(main)
    return process


@pytest.mark.parametrize("capacity_nbytes", [7, 100_000])
def test_what_is_said_arrives_in_order_whatever_pieces_it_comes_in(capacity_nbytes: int) -> None:
    said, heard = [bytes([i]) * (i * 37) for i in range(20)], []
    with simulated():
        rules = LinkRules(split_one_in=1, slow_one_in=3, capacity_nbytes=capacity_nbytes)
        machine = Machine(1, rules=rules)
        echo(machine)
        ask(machine, said, heard)
        machine.run(until_s=60.0)
        machine.end_all()
    assert heard == said
    assert machine.violations == []


def test_who_is_dead_is_seen_to_be_and_has_no_effect(machine: Machine) -> None:
    heard: list[object] = []
    server = echo(machine)
    asks = ask(machine, [b"one", b"two"], heard)
    was_unwound: list[bool] = []

    def main() -> None:
        try:
            threads.current().wait()
        except Killed:
            was_unwound.append(True)
            with pytest.raises(Killed):
                wire.connect("echo", timeout_s=1.0)
            raise

    server.start_thread(main)
    machine.after(0.01, machine.kill, server)
    machine.run(until_s=60.0)
    assert was_unwound == [True]
    assert heard[:2] == [b"one", b"two"] or "ConnectionClosed" in heard
    assert server.pid not in machine.processes
    assert asks.is_alive


def test_who_is_stopped_does_nothing_until_it_goes_on(machine: Machine) -> None:
    heard: list[object] = []
    server = echo(machine)
    server.pause()
    ask(machine, [b"one"], heard)
    machine.run(until_s=2.0)
    assert heard == []
    server.resume()
    machine.run(until_s=4.0)
    assert heard == [b"one"]


def test_a_mute_connection_says_nothing_and_is_cut(machine: Machine) -> None:
    heard: list[object] = []
    echo(machine)
    ask(machine, [b"one", b"two"], heard)

    def harm() -> None:
        for end in machine.links.values():
            end.is_mute = end.name == "echo"
            machine.after(1.0, end.cut)

    machine.after(1e-4, harm)
    machine.run(until_s=30.0)
    assert "ConnectionClosed" in heard


def test_a_thread_that_waits_is_woken_once(machine: Machine) -> None:
    process, woken = machine.start_process("one"), []
    bell = Eventfd()
    fd = machine.new_fd(process, bell)

    def main() -> None:
        poll = system.STAND_INS["select"].poll()
        poll.register(fd, 1)
        for _ in range(3):
            woken.append(bool(poll.poll(1000.0)))
            system.STAND_INS["os"].eventfd_read(fd) if bell.count else None

    process.start_thread(main)
    for at_s in (0.5, 0.6):
        machine.after(at_s, bell.ring, 1)
    machine.run(until_s=5.0)
    assert woken == [True, True, False]


def test_what_is_not_simulated_is_an_error() -> None:
    with pytest.raises(AttributeError, match=r"os\.fork is not simulated"):
        _ = system.STAND_INS["os"].fork
    assert system.STAND_INS["os"].MFD_CLOEXEC == os.MFD_CLOEXEC


def imports_of(path: Path) -> set[str]:
    """Return the modules of the operating system that a file imports at its top."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & set(system.STAND_INS)


@pytest.mark.parametrize("room", ["store/client", "store/daemon", "runtime/wire.py"])
def test_no_module_of_the_store_escapes_the_simulation(room: str) -> None:
    """Modules that no simulated process runs are excepted."""
    outside = {"local_store", "media_reader", "metrics", "server"}
    path = ROOT / "src" / "afferent" / room
    for file in [path] if path.is_file() else sorted(path.glob("*.py")):
        name = ".".join(file.relative_to(ROOT / "src").with_suffix("").parts)
        if file.stem not in outside and imports_of(file):
            assert name in MODULES, name


def test_a_simulation_leaves_nothing_behind() -> None:
    real = wire.time
    with simulated():
        assert wire.time is not real
    assert wire.time is real


def test_a_diagram_has_a_column_for_each_process_and_a_line_for_each_event() -> None:
    events = [
        Event(0.001, "a", "hello", "b"),
        Event(0.002, "b", b"x", "a"),
        Event(0.003, "b", "dies"),
    ]
    head, there, back, dead = diagram(events, width=5, read=str).splitlines()
    assert head.split() == ["a", "b"]
    assert "|--->" in there
    assert "<---|" in back
    assert dead.split()[1:] == ["|", "*", "dies"]


_SEEDS = (3, 15, 37)  # the second of these has an engine
_PROGRAM = f"""
from tests.simulation.running import run_seed, stage
with stage():
    print(*(run_seed(seed).digest for seed in {_SEEDS}))
"""


def test_a_seed_is_the_whole_truth() -> None:
    """The history depends neither on earlier runs nor on the hash seed."""
    digests = []
    for number in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": number},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        digests.append(done.stdout.split())
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == len(_SEEDS)
