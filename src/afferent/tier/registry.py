"""Registry of tiers by URL scheme.

The scheme is the name of an entry point in the group `GROUP`, by which an installed package offers
a tier: a callable that takes the URL and returns a `Tier`. Other schemes go to `fsspec`, if it
knows them.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Final

from afferent.errors import AfferentError, ConfigError, in_a_line
from afferent.tier.protocol import Tier

GROUP: Final = "afferent.tiers"

_REDIS: Final = "afferent.tier.redis_tier:RedisTier"
_FOLDER: Final = "afferent.tier.folder_tier:FolderTier"

BUILT_IN: Final = {
    "redis": _REDIS,
    "rediss": _REDIS,
    "valkey": _REDIS,
    "valkeys": _REDIS,
    "file": _FOLDER,
}
"""Also declared as entry points, like engines."""


def open_tier(url: str) -> Tier:
    """Open the tier of a URL, without a call to it: it may be down.

    Raises:
        ConfigError: There is none, or it can't be used; one line gives the reason.
    """
    scheme, found, _ = url.partition("://")
    if not found:
        raise ConfigError(f"--tier: must be a URL such as {', '.join(f'{s}://' for s in BUILT_IN)}")
    path = BUILT_IN.get(scheme) or _installed().get(scheme, _FOLDER)
    module_name, _, attribute = path.partition(":")
    try:
        made = getattr(importlib.import_module(module_name), attribute)(url)
    except AfferentError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--tier {scheme}://... needs {error.name}: install the extra with "
            "pip install '.[tier]' in the clone of Afferent"
        ) from error
    except Exception as error:  # a third-party tier may raise anything
        raise ConfigError(f"--tier: {path} can't be used: {in_a_line(error)}") from error
    if not isinstance(made, Tier):
        raise ConfigError(f"--tier: {path} gives a {type(made).__name__}, which is no Tier")
    return made


def without_secrets(url: str) -> str:
    """Return the URL without user, password and options, to be shown."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}"


def _installed() -> dict[str, str]:
    return {point.name: point.value for point in metadata.entry_points(group=GROUP)}
