"""``afferent store``: the real commands on real daemons."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from afferent import cli
from afferent.errors import ConfigError, StoreUnavailable
from afferent.operations.commands import daemons, tables
from afferent.operations.commands.daemons import Running
from afferent.operations.commands.removal import resolve
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.store.protocol.items import MAX_ITEMS, Claim, Join, SealItem
from afferent.types import CreateItem, MiB, ObjectKind, ReserveItem
from tests.server import wait_until

AFFERENT = [sys.executable, "-m", "afferent.cli"]
CAPACITY = 16 * MiB
RAW, FEATURES, EMBEDDINGS = ObjectKind.RAW, ObjectKind.FEATURES, ObjectKind.EMBEDDINGS


def key(index: int) -> bytes:
    """Return ``a00...``, ``a11...``: keys that share only their first digit."""
    return bytes([0xA0 + index, *([index] * 31)])


@pytest.fixture
def server() -> Iterator[StoreServer]:
    shares = {RAW: 0.25, FEATURES: 0.5, EMBEDDINGS: 0.25}
    with StoreServer(CAPACITY, shares=shares) as running:
        yield running


@pytest.fixture
def writer(server: StoreServer) -> Iterator[DaemonStore]:
    with DaemonStore(server.address, name="writer", writable=True) as store:
        yield store


HOLDER = """
import sys
from afferent.store.protocol.items import Join
from afferent.store.client.daemon_store import DaemonStore
from afferent.types import ObjectKind
with DaemonStore(sys.argv[1], name="holder") as store:
    item = Join(bytes.fromhex(sys.argv[2]))
    print(type(store.acquire("r", [item])[0]).__name__, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(server: StoreServer, content: None) -> Iterator[subprocess.Popen[str]]:
    """Another process, which pins the second object of features."""
    command = [sys.executable, "-c", HOLDER, server.address, key(2).hex()]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "Hit\n"
        yield child
        child.kill()


@pytest.fixture
def content(writer: DaemonStore) -> None:
    """Fill the store with objects of all states.

    - features 1, 2 and 3 of 1, 2 and 3 MiB, of which the writer pins the third
    - embeddings 4, which the writer is still writing
    - 1 MiB of raw media that is reserved
    """
    for index in (1, 2, 3):
        put(writer, index, nbytes=index * MiB)
    for index in (1, 2):
        writer.release(f"r{index}")
    writer.create("r4", [CreateItem(EMBEDDINGS, MiB, key(4))])
    writer.reserve("r5", [ReserveItem(RAW, MiB)])


def put(store: DaemonStore, index: int, *, nbytes: int, kind: ObjectKind = FEATURES) -> None:
    request = f"r{index}"
    (outcome,) = store.acquire(request, [Claim(key(index), kind, nbytes)])
    assert outcome.handle is not None
    store.seal(request, [SealItem(outcome.handle, nbytes)])


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``afferent store`` as a script would: in a process without a terminal."""
    return subprocess.run(
        [*AFFERENT, "store", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "COLUMNS"},
    )


def ask(server: StoreServer, *arguments: str) -> str:
    """Return the output of a command that succeeds; it fits the columns, and nothing is cut."""
    written = io.BytesIO()
    output = io.TextIOWrapper(written, encoding="utf-8", write_through=True)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setenv("COLUMNS", "80")
        assert cli.main(["store", *arguments, "--address", server.address]) == 0
    text = written.getvalue().decode()
    if "--json" not in arguments:
        assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    return text


def ask_json(server: StoreServer, *arguments: str) -> Any:
    return json.loads(ask(server, *arguments, "--json"))


def refuse(*arguments: str) -> str:
    """Return the error of a command that fails, which prints nothing else."""
    output, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error):
        assert cli.main(["store", *arguments]) == 2
    assert output.getvalue() == ""
    assert error.getvalue().startswith("error: ")
    return error.getvalue()


def row(output: str, name: str) -> list[str]:
    """Return the cells of the first line that begins with ``name``."""
    line = next(line for line in output.splitlines() if line.strip().startswith(name))
    return re.split(r" {2,}", line.strip())


@pytest.mark.parametrize("command", ["stat", "ls --limit 3", "evict --kind raw", "clear"])
def test_each_command_in_a_process_of_its_own(busy: str, command: str) -> None:
    done = run(*command.split(), "--address", busy)
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 110
    assert "…" not in done.stdout
    assert ("writer" in done.stdout) != (command == "evict --kind raw")


@pytest.mark.parametrize("command", ["stat", "ls --json"])
def test_output_into_a_closed_pipe_prints_no_error(busy: str, command: str) -> None:
    reader, pipe = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*AFFERENT, "store", *command.split(), "--address", busy],
            stdout=pipe,
            stderr=subprocess.PIPE,
            timeout=120,
            check=False,
        )
    finally:
        os.close(pipe)
    assert done.returncode in (1, 128 + signal.SIGPIPE)
    assert done.stderr == b""


@pytest.fixture(scope="module")
def busy() -> Iterator[str]:
    """The address of a store with a pinned object."""
    with (
        StoreServer(CAPACITY) as running,
        DaemonStore(running.address, name="writer", writable=True) as store,
    ):
        put(store, 1, nbytes=MiB)
        yield running.address


# stat


def test_stat_for_programs(server: StoreServer, holder: subprocess.Popen[str]) -> None:
    stat = ask_json(server, "stat")
    assert stat["address"] == server.address
    assert (stat["daemon_pid"], stat["owner_pid"]) == (server.pid, os.getpid())
    assert (stat["num_hits"], stat["num_misses"], stat["hit_rate"]) == (1, 3, 0.25)
    features, embeddings = stat["kinds"]["features"], stat["kinds"]["embeddings"]
    assert features["capacity_nbytes"] == 8 * MiB
    assert features["used_nbytes"] == 6 * MiB
    assert features["held_nbytes"] == 5 * MiB
    assert features["evictable_nbytes"] == MiB
    assert features["free_nbytes"] == features["largest_free_nbytes"] == 2 * MiB
    assert features["fragmentation"] == 0
    assert (features["num_objects"], features["num_held"]) == (3, 2)
    assert (embeddings["num_held"], embeddings["evictable_nbytes"]) == (1, 0)
    assert stat["kinds"]["raw"]["reserved_nbytes"] == MiB
    clients = {client["name"]: client for client in stat["clients"]}
    assert len(stat["clients"]) == stat["num_clients"] == 2, "the command itself is left out"
    assert clients["holder"]["pid"] == holder.pid
    assert (clients["holder"]["num_held"], clients["holder"]["held_nbytes"]) == (1, 2 * MiB)
    assert clients["writer"]["pid"] == os.getpid()
    assert (clients["writer"]["num_held"], clients["writer"]["held_nbytes"]) == (2, 4 * MiB)
    assert clients["writer"]["reserved_nbytes"] == MiB


def test_stat_for_people(server: StoreServer, holder: subprocess.Popen[str]) -> None:
    stat = ask(server, "stat")
    assert f"pid {server.pid}, started by {os.getpid()}" in stat
    assert row(stat, "used") == ["used", "0", "6.0 MiB", "1.0 MiB", "0"]
    assert row(stat, "held") == ["held", "0", "5.0 MiB", "1.0 MiB", "0"]
    assert row(stat, "evictable") == ["evictable", "0", "1.0 MiB", "0", "0"]
    assert row(stat, "reserved") == ["reserved", "1.0 MiB", "0", "0", "0"]
    assert "25.0 %  (1 hit, 3 missing, 0 in flight)" in stat
    assert row(stat, "writer")[2:] == ["connected", "2", "4.0 MiB", "1.0 MiB"]
    assert row(stat, "holder")[1:] == [str(holder.pid), "connected", "1", "2.0 MiB", "0"]


def test_fragmentation(server: StoreServer, writer: DaemonStore, content: None) -> None:
    """1 MiB is free before the remaining objects, and 2 MiB are free after them."""
    writer.delete([key(1)])
    assert ask_json(server, "stat")["kinds"]["features"]["fragmentation"] == pytest.approx(1 / 3)
    assert row(ask(server, "stat"), "fragmentation") == [
        "fragmentation",
        "0.0 %",
        "33.3 %",
        "0.0 %",
        "-",
    ]


def test_a_kind_without_a_share(server: StoreServer) -> None:
    with StoreServer(CAPACITY, shares={FEATURES: 1.0}) as other:
        assert ask_json(other, "stat")["kinds"]["raw"]["fragmentation"] is None
        stat = ask(other, "stat")
        assert row(stat, "fragmentation") == ["fragmentation", "-", "0.0 %", "-", "-"]
        assert row(stat, "hit rate")[1] == "-"


def test_a_client_that_is_lost(server: StoreServer, content: None) -> None:
    """The connection has ended, but the process still reads what it had pinned."""
    reader = DaemonStore(server.address, name="reader\x1b[2J [red]" + "x" * 45)
    (outcome,) = reader.acquire("r", [Join(key(3))])
    assert outcome.handle is not None
    block = reader.block(outcome.handle)
    reader.close()
    lost = ["lost", "1", "3.0 MiB", "0"]
    wait_until(lambda: row(ask(server, "stat"), "reader?[2J")[2:] == lost)
    del block


# ls


def test_ls(server: StoreServer, holder: subprocess.Popen[str]) -> None:
    listing = ask(server, "ls", "--limit", "3")
    lines = [line.split() for line in listing.splitlines() if "features" in line]
    assert [line[0] for line in lines] == [key(index).hex()[:12] for index in (3, 2, 1)]
    assert lines[0][1:5] == ["features", "sealed", "3.0", "MiB"]
    assert f"writer {os.getpid()}" in listing
    assert f"holder {holder.pid}" in listing
    assert lines[2][-1] == "-"
    assert listing.endswith("3 of 4 objects\n")
    listing = ask(server, "ls", "--kind", "embeddings")
    assert f"writer {os.getpid()} (writes)" in " ".join(listing.split())
    assert listing.endswith("1 of 1 object, embeddings only\n")
    assert ask(server, "ls", "--kind", "raw") == "0 of 0 objects, raw only\n"


def test_ls_for_programs(server: StoreServer, holder: subprocess.Popen[str]) -> None:
    third, second, first, fourth = ask_json(server, "ls")
    assert [first["key"], second["key"]] == [key(1).hex(), key(2).hex()]
    assert (third["kind"], third["state"], third["nbytes"]) == ("features", "sealed", 3 * MiB)
    assert (first["pins"], first["writer"], first["generation"]) == ([], None, 1)
    assert [(pin["name"], pin["pid"]) for pin in second["pins"]] == [("holder", holder.pid)]
    assert (fourth["state"], fourth["writer"]["pid"]) == ("created", os.getpid())
    assert ask_json(server, "ls", "--kind", "raw") == []


# evict and clear


def test_evict_a_kind(server: StoreServer, writer: DaemonStore, content: None) -> None:
    put(writer, 5, nbytes=MiB)
    writer.release("r5")
    said = ask(server, "evict", "--kind", "features", "--nbytes", "1MiB")
    assert "features: evicted 1 object, 1.0 MiB\n" in said, "the oldest, and not more than asked"
    assert "left: 3 objects, 6.0 MiB; of these 1 held, 3.0 MiB" in said
    said = ask(server, "evict", "--kind", "features")
    assert "features: evicted 2 objects, 3.0 MiB\n" in said
    assert "left: 1 object, 3.0 MiB; of these 1 held, 3.0 MiB" in said
    assert "evicted 0 objects, 0\nnothing is left" in ask(server, "evict", "--kind", "raw")


def test_evict_keys(
    server: StoreServer, writer: DaemonStore, holder: subprocess.Popen[str]
) -> None:
    said = ask(server, "evict", "A1", key(2).hex(), "a4", "f" * 64)
    assert said.startswith("deleted 1 object, 1.0 MiB\n")
    flat = " ".join(said.split())
    second, fourth = key(2).hex()[:12], key(4).hex()[:12]
    assert (
        f"{second} is no longer in the index; its 2.0 MiB are free once it is released by holder "
        f"{holder.pid}" in flat
    )
    assert f"{fourth} stays: writer {os.getpid()} writes it" in flat
    assert "ffffffffffff is not there" in flat
    states = {item["key"]: item["state"] for item in ask_json(server, "ls")}
    assert states == {
        key(2).hex(): "pending_deletion",
        key(3).hex(): "sealed",
        key(4).hex(): "created",
    }
    kill(holder)
    wait_until(lambda: writer.stat().kinds[FEATURES].used_nbytes == 3 * MiB)


def kill(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait(60)


def test_keys_that_name_nothing() -> None:
    keys = [key(1), key(2), bytes.fromhex("a1" * 32)]
    assert resolve("A2", keys) == key(2)
    assert resolve("cd" * 32, keys) == bytes.fromhex("cd" * 32), "it may be one that is not listed"
    for text, problem in (
        ("a1", "2 objects have a key that begins with 'a1'"),
        ("b", "no object has a key that begins with 'b'"),
        ("", "'' is not a key"),
        ("xyz", "'xyz' is not a key"),
        ("a" * 65, "is not a key"),
    ):
        with pytest.raises(ConfigError, match=problem):
            resolve(text, keys)
    with pytest.raises(ConfigError, match="no object among the 4096 largest"):
        resolve("b", [key(1)] * MAX_ITEMS)


def test_a_key_that_names_several_deletes_nothing(server: StoreServer, content: None) -> None:
    assert "begins with 'a'" in refuse("evict", "a1", "a", "--address", server.address)
    assert ask_json(server, "stat")["num_objects"] == 4


def test_clear(server: StoreServer, writer: DaemonStore, holder: subprocess.Popen[str]) -> None:
    put(writer, 6, nbytes=100, kind=RAW)
    writer.release("r6")
    said = ask(server, "clear")
    assert "raw: evicted 1 object, 128 B\n" in said
    assert "features: evicted 1 object, 1.0 MiB\n" in said
    assert "left: 3 objects, 6.0 MiB; of these 3 held, 6.0 MiB" in said
    assert row(said, "holder")[1:5] == [str(holder.pid), "connected", "1", "2.0 MiB"]
    assert row(said, "writer")[1:5] == [str(os.getpid()), "connected", "2", "4.0 MiB"]
    kill(holder)
    writer.release("r3")
    writer.release("r4")
    wait_until(lambda: writer.stat().held_nbytes == 0)
    assert "nothing is left" in ask(server, "clear")
    assert writer.stat().used_nbytes == 0


# The choice of a daemon


def test_several_daemons(server: StoreServer) -> None:
    with StoreServer(CAPACITY) as other:
        done = run("stat")
        assert (done.returncode, done.stdout) == (2, "")
        error = done.stderr
        assert error.startswith("error: several stores run; choose one with --address:\n")
        for one in (server, other):
            assert f"{one.address}  pid {one.pid}, started by {os.getpid()}\n" in error
            digits = daemons.short(one.address)
            assert digits in one.address
            for name in (one.address, digits, digits[:7]):
                running = daemons.choose(daemons.find(), name)
                assert (running.address, running.daemon_pid) == (one.address, one.pid)
        assert ask_json(other, "stat")["daemon_pid"] == other.pid
        error = refuse("ls", "--address", "nobody")
        assert error.startswith("error: no store has the address 'nobody'; these run:\n")
        assert server.address in error


def address_of(digits: str) -> str:
    return f"/run/user/1000/afferent-sockets-0abc_123/store-{digits}.sock"


def test_a_store_at_a_path_that_was_chosen(tmp_path: Path) -> None:
    path = tmp_path / "store.sock"
    command = [*AFFERENT, "serve", "--port", "0", "--arena-nbytes", "16MiB"]
    with subprocess.Popen([*command, "--store-path", str(path)], stderr=subprocess.DEVNULL) as run:
        wait_until(lambda: any(one.daemon_pid for one in at(path)))
        (found,) = at(path)
        assert found.owner_pid == run.pid
        assert daemons.choose(daemons.find(), str(path)) == found
        run.terminate()
        assert run.wait(60) == 0
    assert not list(tmp_path.iterdir()), "the socket is gone"


def at(path: Path) -> list[Running]:
    return [one for one in daemons.find() if one.address == str(path)]


def test_which_of_those_that_run() -> None:
    one, two = (Running(address_of(digit * 8), 1, None) for digit in "ab")
    three = Running(address_of(f"{'a' * 7}f"), None, 7)
    assert daemons.choose([one], None) == one
    assert daemons.choose([one, two], "b") == two
    with pytest.raises(ConfigError, match="several stores have an address that begins with 'aa'"):
        daemons.choose([one, two, three], "aa")
    with pytest.raises(ConfigError, match="restarting, started by 7"):
        daemons.choose([one, three], None)
    for name in (None, "a"):
        with pytest.raises(StoreUnavailable, match="you run no store"):
            daemons.choose([], name)


ALONE = """
import subprocess, sys
from afferent.store.daemon.server import StoreServer
command = [sys.executable, "-m", "afferent.cli", "store", "stat"]
print(subprocess.run(command, stderr=subprocess.STDOUT).returncode, flush=True)
with StoreServer(1 << 24) as server:
    print(server.address, subprocess.run(command).returncode, flush=True)
"""


def test_none_and_one() -> None:
    """The test uses a network namespace of its own, in which there is no other store."""
    apart = ["unshare", "--user", "--map-current-user", "--net"]
    if (
        not Path("/usr/bin/unshare").exists()
        or subprocess.run([*apart, "true"], check=False).returncode
    ):
        pytest.skip("this machine gives nobody a network namespace")
    done = subprocess.run(
        [*apart, sys.executable, "-c", ALONE],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    none, status, *one = done.stdout.splitlines()
    assert none.startswith("error: you run no store; ")
    assert status == "2"
    address, status = one[-1].split()
    assert status == "0"
    assert one[0].startswith(f"{address} ")


# A daemon that goes away


def test_stat_of_a_daemon_that_ends_after_the_connection_is_refused(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = Running.connect

    def connect_and_end(running: Running) -> DaemonStore:
        store = connect(running)
        server.close()
        return store

    monkeypatch.setattr(Running, "connect", connect_and_end)
    error = refuse("stat", "--address", server.address)
    assert re.fullmatch(r"error: the store .*\n", error)


def test_the_daemon_dies_while_it_is_asked(server: StoreServer) -> None:
    """The daemon is stopped, so the command is waiting for its welcome when the daemon dies."""
    daemon = server.pid
    os.kill(daemon, signal.SIGSTOP)
    command = [*AFFERENT, "store", "stat", "--address", server.address]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        wait_until(lambda: num_sockets(server) == 2)
        server.close()
        _, error = child.communicate(timeout=60)
        assert child.returncode == 2
        assert re.match(rf"error: no store answers at .*pid {daemon}.*\n", error)
        assert error.count("\n") == 1


def test_stat_interrupted_while_it_waits_ends_quietly(server: StoreServer) -> None:
    """The daemon is stopped, so Ctrl-C comes while the command is waiting for its welcome."""
    os.kill(server.pid, signal.SIGSTOP)
    with subprocess.Popen(
        [*AFFERENT, "store", "stat", "--address", server.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # a background process may have inherited that the signal is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as child:
        wait_until(lambda: num_sockets(server) == 2)
        child.send_signal(signal.SIGINT)
        output, error = child.communicate(timeout=60)
        assert (child.returncode, output, error) == (130, b"", b"")


def num_sockets(server: StoreServer) -> int:
    """Return the number of sockets: one that listens, and the connections."""
    return Path("/proc/net/unix").read_text().count(server.address)


def test_a_daemon_that_was_replaced(server: StoreServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    assert ask_json(server, "stat")["segment"] == 2


# run


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_run(signum: int) -> None:
    command = [*AFFERENT, "store", "run", "--arena-nbytes", "16MiB", "--embeddings-share", "0.25"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        said = "".join(iter(child.stdout.readline, "Ctrl-C ends it.\n"))
        shares = "25.0 % embeddings, 75.0 % features"
        assert f"A store of 16.0 MiB ({shares})" in said
        program = "".join(re.findall(r"^    (.*\n)", said, re.MULTILINE))
        names: dict[str, Any] = {}
        exec(program, names)  # noqa: S102
        with names["store"] as store:
            statistics = store.stat()
            assert statistics.kinds[EMBEDDINGS].capacity_nbytes == 4 * MiB
            assert statistics.kinds[RAW].capacity_nbytes == 0
        stat = re.search(r"afferent (store stat --address \w+)", said)
        assert stat is not None
        assert cli.main(stat[1].split()) == 0
        child.send_signal(signum)
        rest, error = child.communicate(timeout=60)
        assert (child.returncode, rest, error) == (0, "The store has ended.\n", "")
    assert names["ADDRESS"] not in Path("/proc/net/unix").read_text()


def test_a_store_that_cannot_be() -> None:
    assert "at most 1 in all" in refuse("run", "--raw-share", "0.5", "--features-share", "0.6")
    assert "does not fit in 90% of" in refuse("run", "--arena-nbytes", "100000GiB")


# Arguments


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "explode",
        "ls --limit 0",
        "ls --limit 5000",
        "ls --kind pictures",
        "evict --kind raw --nbytes many",
        "evict --kind raw --nbytes 0",
        "run --raw-share 2",
        "run --raw-share nan",
        "run --arena-nbytes 0",
    ],
)
def test_typing_errors(arguments: str) -> None:
    assert len(refuse(*arguments.split()).splitlines()) == 1


def test_what_is_removed_from_a_store_that_nobody_has_named(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even the only store may not be the intended one."""
    (running,) = [one for one in daemons.find() if one.address == server.address]
    with pytest.raises(ConfigError, match=f"--address {daemons.short(server.address)}"):
        daemons.confirm(running, "afferent store clear")
    keyboard, terminal = os.openpty()
    with os.fdopen(terminal, "r+b", buffering=0) as ends, os.fdopen(keyboard, "wb") as keys:
        screen = io.TextIOWrapper(ends, write_through=True)
        monkeypatch.setattr("sys.stdin", screen)
        monkeypatch.setattr("sys.stdout", screen)
        keys.write(b"y\n\n")
        keys.flush()
        daemons.confirm(running, "afferent store clear")
        with pytest.raises(ConfigError, match="nothing was removed"):
            daemons.confirm(running, "afferent store clear")
        screen.detach()


def test_what_to_evict(server: StoreServer) -> None:
    for arguments in ("", "a1 --kind raw", "a1 --nbytes 1MiB", "--nbytes 1MiB"):
        assert "--kind" in refuse("evict", *arguments.split(), "--address", server.address)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 1024, "1.5 MiB"),
        (100 * MiB, "100 MiB"),
        (MiB - 1, "1,024 KiB"),
        (5 << 40, "5.0 TiB"),
        (1 << 51, "2,048 TiB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert tables.size(nbytes) == text
