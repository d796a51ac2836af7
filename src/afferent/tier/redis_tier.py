"""Tier on Valkey or Redis: ``redis://``, ``rediss://`` (TLS), ``valkey://``, ``valkeys://``.

A value is a header and parts of 1 MiB, each a separate string. So no single command blocks the
server for long, and a part goes from the socket directly into the arena. The header is written
last, or together with the only part, and found first. If the server evicts any part of a value, the
whole value is absent.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from redis.backoff import NoBackoff
from redis.connection import Connection, parse_url
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from afferent.errors import ConfigError, TierUnavailable, in_a_line
from afferent.tier.bounded_calls import BoundedCalls
from afferent.tier.protocol import (
    MAX_BODY_NBYTES,
    MAX_HEAD_NBYTES,
    NAME_NBYTES,
    Found,
    Health,
    Value,
    Wanted,
    num_parts,
    part,
)
from afferent.tier.redis_replies import Reply, ReplyReader, is_wrong_type

_SCHEMES = {"valkey": "redis", "valkeys": "rediss"}
_GETS_AHEAD, _SETS_AHEAD = 8, 4
_NBYTES = struct.Struct("<Q")
_RELEASE = (
    "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('del',KEYS[1]) else return 0 end"
)
_CONNECT_TIMEOUT_S = 2.0
_TOO_MANY_IDLE = 8
_PAGE, _PAGE_OF_PARTS = 512, 64
_LONGEST_HEAD = _NBYTES.size + MAX_HEAD_NBYTES
_MAX_SHOWN = 80
"""Limit of characters shown of a server's own description."""
_MAX_DIGITS = 20


class RedisTier:
    """Tier on a Redis server, thread-safe: each call takes a connection, which is reused."""

    def __init__(self, url: str, *, prefix: str = "afferent") -> None:
        """Create it without connecting.

        Raises:
            ConfigError: The URL does not lead to a server.
        """
        scheme, _, rest = url.partition("://")
        try:
            named = f"{_SCHEMES.get(scheme, scheme)}://{rest}"
            options: dict[str, Any] = dict(parse_url(named))  # type: ignore[no-untyped-call]
        except ValueError as error:
            raise ConfigError(f"--tier: {in_a_line(error)}") from error
        self._make = options.pop("connection_class", Connection)
        self._options = options
        self._prefix = prefix.encode()
        self._idle: list[_Link] = []
        self._calls = BoundedCalls(_TOO_MANY_IDLE, name="connect")
        try:
            self._link(_CONNECT_TIMEOUT_S)
        except TypeError as error:  # an option that a connection does not have
            raise ConfigError(f"--tier: {in_a_line(error)}") from error

    # Tier

    def exists_many(self, names: Sequence[bytes], *, deadline_s: float) -> list[Found | None]:
        """See `Tier`."""
        found: list[Found | None] = []
        if not names:
            return found
        with self._linked(deadline_s) as link:
            for at in range(0, len(names), _PAGE):
                page = names[at : at + _PAGE]
                # GETRANGE limits an entry of any length to the longest header and one byte.
                link.send([("GETRANGE", self._head(name), 0, _LONGEST_HEAD) for name in page])
                found += [_found(link.replies.read(max_nbytes=_LONGEST_HEAD + 1)) for _ in page]
        return found

    def get_many_into(self, wanted: Sequence[Wanted], *, deadline_s: float) -> list[bool]:
        """See `Tier`. Parts are requested ahead, so that the link is never idle."""
        are_good = [True] * len(wanted)
        to_ask = deque((i, p) for i, one in enumerate(wanted) for p in range(one.num_parts))
        asked: deque[tuple[int, int]] = deque()
        with self._linked(deadline_s) as link:
            while to_ask or asked:
                ahead: list[tuple[Any, ...]] = []
                while to_ask and len(asked) < _GETS_AHEAD:
                    index, number = to_ask.popleft()
                    if are_good[index]:
                        asked.append((index, number))
                        one, nbytes = wanted[index], len(wanted[index].part(number))
                        ahead.append(("GETRANGE", self._part(one.name, number), 0, nbytes))
                if ahead:
                    link.send(ahead)
                if asked:
                    index, number = asked.popleft()
                    one = wanted[index]
                    was_read = link.replies.read_into(one.part(number))
                    if was_read is False and are_good[index]:
                        one.refuse()
                    if are_good[index]:
                        are_good[index] = bool(was_read) and one.accept(number)
        return are_good

    def put_many(self, values: Sequence[Value], *, ttl_s: float, deadline_s: float) -> list[bool]:
        """See `Tier`."""
        ttl_ms = max(1, round(ttl_s * 1e3))
        with self._linked(deadline_s) as link:
            return [self._put(link, value, ttl_ms) for value in values]

    def delete_many(self, names: Sequence[bytes], *, deadline_s: float) -> int:
        """See `Tier`."""
        found = self.exists_many(names, deadline_s=deadline_s)
        there = [(name, one) for name, one in zip(names, found, strict=True) if one is not None]
        if not there:
            return 0
        with self._linked(deadline_s) as link:
            for name, one in there:
                self._unlink_parts(link, name, num_parts(min(one.nbytes, MAX_BODY_NBYTES)))
            for at in range(0, len(there), _PAGE):
                link.ask("UNLINK", *(self._head(name) for name, _ in there[at : at + _PAGE]))
        return len(there)

    def _unlink_parts(self, link: _Link, name: bytes, number: int) -> None:
        """Delete parts until none is left; their number is from a header, which is not trusted."""
        for at in range(0, number, _PAGE_OF_PARTS):
            page = range(at, min(at + _PAGE_OF_PARTS, number))
            if link.ask("UNLINK", *(self._part(name, index) for index in page)) == 0:
                return

    def names(self, *, deadline_s: float) -> Iterator[bytes]:
        """See `Tier`."""
        cursor, seen = b"0", set[bytes]()
        while True:
            with self._linked(deadline_s) as link:
                match link.ask("SCAN", cursor, "MATCH", self._prefix + b":*:head", "COUNT", _PAGE):
                    case [bytes(next_cursor), [*found]]:
                        cursor = next_cursor
                    case _:
                        raise TierUnavailable("the tier does not list what it has")
            for each in found:
                name = _name_in(each)
                if name is not None and name not in seen:
                    seen.add(name)
                    yield name
            if cursor == b"0":
                return

    def health(self, *, deadline_s: float) -> Health:
        """See `Tier`."""
        with self._linked(deadline_s) as link:
            if link.ask("PING") != b"PONG":
                raise TierUnavailable("the tier does not answer a PING")
            try:
                about = link.ask("INFO")
            except ResponseError:  # a user with read and write rights only may not see this
                return Health(about="a server that says nothing of itself")
        return _health(about if isinstance(about, bytes) else b"")

    def close(self) -> None:
        """See `Tier`."""
        self._calls.close()
        while self._idle:
            self._idle.pop().close()

    # Claims

    def claim_many(
        self, names: Sequence[bytes], *, holder: bytes, ttl_s: float, deadline_s: float
    ) -> list[bool]:
        """See `Claims`."""
        ttl_ms = max(1, round(ttl_s * 1e3))
        with self._linked(deadline_s) as link:
            link.send([("SET", self._lease(name), holder, "NX", "PX", ttl_ms) for name in names])
            replies = [link.replies.read() for _ in names]
        # Only "nothing was set" means another node's claim. On an error, this node makes it.
        return [reply is not None for reply in replies]

    def release_many(self, names: Sequence[bytes], *, holder: bytes, deadline_s: float) -> None:
        """See `Claims`."""
        with self._linked(deadline_s) as link:
            link.send([("EVAL", _RELEASE, 1, self._lease(name), holder) for name in names])
            replies = [link.replies.read() for _ in names]
        refused = [reply for reply in replies if isinstance(reply, ResponseError)]
        if refused:  # the Redis user may not run scripts, for example: the claims have to expire
            raise TierUnavailable(in_a_line(refused[0]))

    # Inner steps

    def _put(self, link: _Link, value: Value, ttl_ms: int) -> bool:
        """Write the parts, then the header; if one of them has no space, delete all of them."""
        number = num_parts(len(value.body))
        if number == 1:
            return self._put_at_once(link, value, ttl_ms)
        num_sent = num_read = 0
        are_good = True
        while num_read < (number if are_good else num_sent):
            if are_good and num_sent < number and num_sent - num_read < _SETS_AHEAD:
                body = part(value.body, num_sent)
                link.send([("SET", self._part(value.name, num_sent), body, "PX", ttl_ms)])
                num_sent += 1
                continue
            are_good &= _is_done(link.replies.read())
            num_read += 1
        if are_good:
            head = _NBYTES.pack(len(value.body)) + value.head
            are_good = _is_done(link.try_ask("SET", self._head(value.name), head, "PX", ttl_ms))
        if not are_good:
            link.try_ask("UNLINK", *(self._part(value.name, index) for index in range(num_sent)))
        return are_good

    def _put_at_once(self, link: _Link, value: Value, ttl_ms: int) -> bool:
        """Write a value of one part by one command.

        Nodes replace the record of one URL at the same time: the header of one must not meet the
        body of another. ``MSET`` sets no lifetime, and a transaction needs a right that a user with
        read and write rights does not have.
        """
        names = self._part(value.name, 0), self._head(value.name)
        head = _NBYTES.pack(len(value.body)) + value.head
        link.send(
            [
                ("MSET", names[0], value.body, names[1], head),
                *(("PEXPIRE", name, ttl_ms) for name in names),
            ]
        )
        written, *expiring = [link.replies.read() for _ in range(1 + len(names))]
        refused = [reply for reply in expiring if isinstance(reply, ResponseError)]
        if refused:
            link.try_ask("UNLINK", *names)  # they would stay for ever
            raise refused[0]
        return _is_done(written)

    @contextlib.contextmanager
    def _linked(self, deadline_s: float) -> Iterator[_Link]:
        """Yield a connection for one exchange.

        After any error it is closed: a late reply could be taken for the answer to another command.
        """
        link = self._take_idle() or self._link(deadline_s - time.monotonic())
        link.replies.deadline_s = deadline_s
        try:
            if not link.is_connected:
                self._connect(link, deadline_s)
            yield link
        except (RedisError, OSError) as error:
            link.close()
            raise TierUnavailable(in_a_line(error)) from error
        except BaseException:
            link.close()
            raise
        if len(self._idle) < _TOO_MANY_IDLE:
            self._idle.append(link)
        else:
            link.close()

    def _connect(self, link: _Link, deadline_s: float) -> None:
        """Connect by the deadline; name resolution and each address take an unbounded time."""
        connecting = self._calls.submit(link.connect)
        try:
            self._calls.result(connecting, deadline_s)
        except TierUnavailable:
            connecting.add_done_callback(lambda _: link.close())
            raise

    def _take_idle(self) -> _Link | None:
        while self._idle:
            try:
                link = self._idle.pop()
            except IndexError:  # another thread was faster
                return None
            if link.replies.is_clean:
                return link
            link.close()
        return None

    def _link(self, timeout_s: float) -> _Link:
        """Create a connection, to be connected within this time."""
        return _Link(self._make, self._options, max(0.001, min(timeout_s, _CONNECT_TIMEOUT_S)))

    def _head(self, name: bytes) -> bytes:
        return b"%s:{%s}:head" % (self._prefix, name.hex().encode())

    def _part(self, name: bytes, index: int) -> bytes:
        return b"%s:{%s}:%d" % (self._prefix, name.hex().encode(), index)

    def _lease(self, name: bytes) -> bytes:
        return b"%s:{%s}:lease" % (self._prefix, name.hex().encode())


class _Link:
    """One connection: `redis` creates it and packs commands; `ReplyReader` reads the replies."""

    def __init__(self, make: Any, options: dict[str, Any], timeout_s: float) -> None:
        self.replies = ReplyReader()
        ours = {
            "parser_class": lambda **_: self.replies,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "socket_connect_timeout": timeout_s,
            "socket_timeout": timeout_s,
            "driver_info": None,
        }
        self._connection = make(**{**options, **ours})
        self.is_connected = False

    def connect(self) -> None:
        """Connect and log in."""
        self._connection.connect()
        self.is_connected = True

    def send(self, commands: Sequence[tuple[Any, ...]]) -> None:
        packed = [
            piece for command in commands for piece in self._connection.pack_command(*command)
        ]
        if all(isinstance(piece, bytes) for piece in packed):
            packed = [b"".join(packed)]
        for piece in packed:
            self.replies.arm().sendall(piece)

    def ask(self, *command: Any) -> Reply:
        """Send a command and return its reply.

        Raises:
            ResponseError: The server refuses it.
        """
        reply = self.try_ask(*command)
        if isinstance(reply, ResponseError):
            raise reply
        return reply

    def try_ask(self, *command: Any) -> Reply:
        self.send([command])
        return self.replies.read()

    def close(self) -> None:
        with contextlib.suppress(RedisError, OSError):
            self._connection.disconnect()


def _is_done(reply: Reply) -> bool:
    """Whether a write succeeded; `False` if the server is full.

    Raises:
        ResponseError: The server refuses to write for another reason.
    """
    if isinstance(reply, ResponseError) and not str(reply).startswith("OOM"):
        raise reply
    return reply == b"OK"


def _found(reply: Reply) -> Found | None:
    """Parse the reply to a look-up.

    Raises:
        ResponseError: The server refuses it, and not because it is no string.
    """
    if not reply:
        return None
    if isinstance(reply, ResponseError) and not is_wrong_type(reply):
        raise reply
    if not isinstance(reply, bytes) or not _NBYTES.size <= len(reply) <= _LONGEST_HEAD:
        return Found(b"", 0)
    (nbytes,) = _NBYTES.unpack_from(reply)
    return Found(reply[_NBYTES.size :], nbytes)


def _name_in(key: Reply) -> bytes | None:
    if not isinstance(key, bytes):
        return None
    digits = key.partition(b"{")[2].partition(b"}")[0]
    try:
        return bytes.fromhex(digits.decode("ascii")) if len(digits) == 2 * NAME_NBYTES else None
    except ValueError:
        return None


def _health(info: bytes) -> Health:
    lines = info.decode("utf-8", errors="replace").splitlines()
    said = dict(line.split(":", 1) for line in lines if ":" in line)
    who = "valkey" if "valkey_version" in said else "redis"
    version = said.get("valkey_version") or said.get("redis_version", "of an unknown version")
    used, most = said.get("used_memory", ""), said.get("maxmemory", "")
    policy = said.get("maxmemory_policy", "")
    advice = []
    if most == "0":
        advice.append("set maxmemory: without it the server takes all memory there is")
    if policy == "noeviction":
        advice.append("set maxmemory-policy allkeys-lfu: a server that evicts nothing becomes full")
    return Health(
        about=f"{who} {version[:_MAX_SHOWN]}",
        used_nbytes=_number(used),
        max_nbytes=_number(most) or None,
        advice=tuple(advice),
    )


def _number(digits: str) -> int | None:
    return int(digits) if digits.isdecimal() and len(digits) <= _MAX_DIGITS else None
