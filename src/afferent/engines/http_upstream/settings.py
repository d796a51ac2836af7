"""Settings of an upstream: the address of one that runs elsewhere, or limits of a started one."""

from __future__ import annotations

from afferent.config import Group, Settings, setting
from afferent.engines.http_upstream.addresses import parse
from afferent.errors import ConfigError
from afferent.types import GiB


class HttpSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """With ``engine_url``, the servers run elsewhere; without it, one is started."""

    engine_url: tuple[str, ...] = setting(
        (),
        "unix:PATH or http://HOST:PORT of an engine that runs elsewhere, with AFFERENT_STORE_PATH "
        "in its environment; several share the store",
        Group.COMMON,
        unit="URL,...",
    )
    engine_api_key: str = setting(
        "",
        "key that the engine asks for; without it, what clients send is passed on",
        Group.ENGINE,
        unit="KEY",
        is_secret=True,
    )
    engine_memory_nbytes: int = setting(
        4 * GiB, "main memory that an engine started here takes", Group.MEMORY, ge=0
    )
    engine_start_timeout_s: float = setting(
        1800.0, "for an engine started here until it answers", Group.TIMEOUTS, gt=0
    )

    def check(self) -> None:
        """See `Settings.check`."""
        for url in self.engine_url:
            if not url.startswith(("unix:", "http://")):
                raise ConfigError(f"--engine-url {url}: must be unix:PATH or http://HOST:PORT")
            try:
                parse(url)
            except ConfigError as error:
                raise ConfigError(f"--engine-url {url}: {error.message}") from error
