"""Versions of the protocols between processes: found in a message of any version, and compared."""

from __future__ import annotations

import msgspec


def version_behind(frame: bytes, *leading: str) -> int | None:
    """Return the version in a peer's first message, which this process may not understand.

    A message with a version is an array in every version: ``leading``, then the number. Return
    `None` for a message without one.
    """
    try:
        message = msgspec.msgpack.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(message, list) or message[: len(leading)] != list(leading):
        return None
    found = message[len(leading) :]
    return found[0] if found and type(found[0]) is int else None


def mismatch(*, us: str, ours: int, them: str, theirs: int | None) -> str:
    """Return the message for two processes with different versions, with the next step."""
    if theirs is None:
        step = "run both with the same version of Afferent, and restart them"
    else:
        older = us if ours < theirs else them
        step = f"upgrade Afferent where {older} runs, and restart {older}"
    version = "an unknown version" if theirs is None else f"version {theirs}"
    return f"{them} speaks {version} of the protocol, {us} version {ours}: {step}"
