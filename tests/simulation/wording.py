"""Text form of messages in a replay."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.simulation.oracle import number_of

_MOST = 110


def words(what: str | bytes) -> str:
    """Return the text of a message, or of an event in the life of a process."""
    if isinstance(what, str):
        return what
    found, rest = [], what
    while len(rest) >= 4:
        nbytes = int.from_bytes(rest[:4], "little")
        if nbytes > len(rest) - 4:
            break
        found.append(_message(rest[4 : 4 + nbytes]))
        rest = rest[4 + nbytes :]
    if rest:
        found.append(f"... {len(rest)} bytes of a message")
    return "; ".join(found)[:_MOST]


def _message(data: bytes) -> str:
    try:
        said = msgspec.msgpack.decode(data)
    except msgspec.DecodeError:
        return f"{len(data)} bytes"
    match said:
        case [str(verb), int(seq), *rest] if verb not in ("hello", "bye"):
            number = f" #{seq}" if seq else ""
            return f"{verb}{number} {' '.join(map(_short, rest))}"
        case [str(verb), *_]:
            return verb
        case [int(), int(segment), int(client)]:
            return f"welcome, client {client} of epoch {segment}" if client else "goodbye"
        case [int(seq), result]:
            return f"reply to #{seq}: {_short(result)}"
        case [int(seq), _, [code, *_]]:
            return f"reply to #{seq}: {code}"
        case [int(seq), result, *_]:
            return f"reply to #{seq}: {_short(result)}"
    return _short(said)


def _short(value: Any) -> str:
    if isinstance(value, bytes):
        return f"k{number_of(value)}" if len(value) == 32 else f"{len(value)} bytes"
    if isinstance(value, list):
        if len(value) == 4 and all(isinstance(each, int) for each in value):
            return f"block {value[3]} at {value[1]} + {value[2]}"
        return "[" + ", ".join(_short(each) for each in value if each is not None) + "]"
    if isinstance(value, dict):
        return "{...}"
    return "" if value is None else str(value)
