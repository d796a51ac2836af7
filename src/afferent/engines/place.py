"""Discovery of the store and of the secret of references, from the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from afferent.errors import ConfigError

STORE: Final = "AFFERENT_STORE_PATH"
"""The store's address: a path."""
SECRET: Final = "AFFERENT_STORE_SECRET"  # noqa: S105 - its name
"""Secret in hexadecimal; without it, the secret is in the file beside the store's path."""
OFFLINE: Final = "AFFERENT_OFFLINE"
"""Set in a program with an engine of its own: vLLM also takes media that are no references."""
SUPERVISED: Final = "AFFERENT_SUPERVISED"
"""Set where the server started vLLM: its processes then end with one another."""
SECRET_SUFFIX: Final = ".secret"  # noqa: S105 - of its file's name


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a store."""

    address: str

    def secret(self) -> bytes:
        """Return the present secret: a secret in a file changes with each start of the server.

        Raises:
            ConfigError: There is none.
        """
        given = os.environ.get(SECRET)
        try:
            text = given or Path(self.address + SECRET_SUFFIX).read_text(encoding="ascii")
            secret = bytes.fromhex(text.strip())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"no secret: neither in {SECRET} nor beside {self.address}"
            ) from error
        if len(secret) < 16:
            raise ConfigError(f"the secret of {self.address} is too short")
        return secret


def required_store() -> Place:
    """Return the location of the store.

    Raises:
        ConfigError: The environment does not name it.
    """
    if (where := find_store()) is None:
        raise ConfigError(f"{STORE} is not set")
    return where


def is_offline() -> bool:
    """Whether this process is a program with an engine of its own, or belongs to one."""
    return bool(os.environ.get(OFFLINE))


def find_store() -> Place | None:
    """Return the location of the store; ``None`` in a vLLM that does not use Afferent."""
    where = os.environ.get(STORE, "")
    return Place(where) if where else None
