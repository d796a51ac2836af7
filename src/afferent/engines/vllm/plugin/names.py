"""Names of our items in the caches of this process's engine."""

from __future__ import annotations

from typing import Any, Final

from afferent.engines.references import Of

CONNECTOR: Final = "AfferentConnector"
"""Name of our EC connector in vLLM's configuration."""


class _Names:
    are_stable = False
    are_shortened = False


def are_stable() -> bool:
    """Whether items are named by their content alone.

    The engine then has our EC connector, so that no result of lost features has a name. Otherwise a
    name contains the block of the features, too.
    """
    return _Names.are_stable


def are_shortened() -> bool:
    """Whether another cache of the engine compares only a part of a name: items of different
    tenants could be equal there.
    """
    return _Names.are_shortened


def check_tenants(of: Of) -> None:
    """
    Raises:
        ValueError: Tenants could get each other's results from this engine's caches.
    """
    if of.has_tenants and are_shortened():
        raise ValueError(
            "this vLLM has an LMCache connector, which compares 16 bits of an image's name: it "
            "can't be used by a server with tenants, which could get each other's answers"
        )


def describe_engine(*, has_connector: bool, kv_transfer_config: str) -> None:
    """Note what this process's engine does with names.

    Args:
        has_connector: Whether the engine has our EC connector.
        kv_transfer_config: Configuration of its KV connectors; LMCache's compares 16 bits of a
            name.
    """
    _Names.are_stable = has_connector
    _Names.are_shortened = "lmcache" in kv_transfer_config.lower()


def is_ours(ec_transfer_config: Any) -> bool:
    """Whether the configuration of an EC connector is that of ours."""
    return ec_transfer_config is not None and ec_transfer_config.ec_connector == CONNECTOR
