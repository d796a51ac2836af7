"""Settings of servers that speak OpenAI's chat completions."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Final, Literal

from msgspec import Meta

from afferent.config import Group, Settings, setting
from afferent.engines.http_upstream.sources import Source, source
from afferent.errors import ConfigError
from afferent.media.families.reencoded import FileFormat

Namers = Literal["none", "afferent", "vllm"]
"""Kinds of servers that find an item by its name."""
_FORMAT: Final = r"^[a-z0-9]{1,16}\Z"
_HEADER: Final = r"^([A-Za-z0-9!#$%&'*+.^_`|~-]{1,64})?\Z"
_TAKEN: Final = frozenset(
    {
        *("host", "content-length", "content-type", "transfer-encoding", "connection"),
        *("authorization", "x-api-key"),
    }
)
"""Headers with a meaning of their own."""


class OpenAISettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Addresses of the servers, and what they read."""

    engine_url: tuple[str, ...] = setting(
        (),
        "unix:PATH, http://HOST:PORT or https://HOST:PORT[#sha256=DIGEST of its certificate] of "
        "each server; dns+http://NAME:PORT for all addresses of a name; file:/PATH for a file with "
        "an address in each line",
        Group.COMMON,
        unit="URL,...",
    )
    engine_api_key: tuple[str, ...] = setting(
        (),
        "key that the servers ask for: one for all, or one for each of --engine-url; without it, "
        "what clients send is passed on",
        Group.ENGINE,
        unit="KEY,...",
        is_secret=True,
    )
    engine_ca: str = setting(
        "",
        "file with the certificate authorities of https servers; default: those of the system",
        Group.ENGINE,
        unit="FILE",
    )
    engine_image_formats: tuple[Annotated[str, Meta(pattern=_FORMAT)], ...] = setting(
        ("jpeg", "png"),
        "formats of images that the engine reads; others are converted",
        Group.ENGINE,
        unit="FORMAT,...",
    )
    engine_max_pixels: int = setting(
        0, "larger images are made smaller, such as the model would do; 0: none", Group.ENGINE, ge=0
    )
    engine_convert_to: FileFormat = setting(
        "png", "format of converted images: without loss, or fast and small", Group.ENGINE
    )
    engine_video_frames: bool = setting(
        False,
        "the model takes images and no videos: frames of a video are sent as images",
        Group.ENGINE,
    )
    engine_cache_salt: bool = setting(
        False,
        "the engine knows cache_salt, as vLLM does, so that tenants share no prefix cache",
        Group.ENGINE,
    )
    engine_names: Namers = setting(
        "none",
        "send an item that a server has got before by its name (uuid) alone: afferent, if all "
        "servers are Afferent; vllm, if all are stock vLLM and no other client reaches them, since "
        "vLLM believes any client's names",
        Group.ENGINE,
    )
    engine_stream_nbytes: int = setting(
        0,
        "bodies of at least so many bytes are sent to the engine while they arrive, if their media "
        "are sent as they came; 0: none",
        Group.ENGINE,
        ge=0,
    )
    route_header: str = setting(
        "",
        "header that gets the digest of a request's first media, or of its conversation, for a "
        "router behind this server",
        Group.ENGINE,
        pattern=_HEADER,
        unit="NAME",
    )

    engine_events_port: int = setting(
        0,
        "port at which each server that is Afferent publishes its item events (--item-events), so "
        "that a request goes to a server that has its media; 0: none",
        Group.ENGINE,
        ge=0,
        le=65534,
    )
    engine_events_key: str = setting(
        "", "key that the item events ask for", Group.ENGINE, unit="KEY", is_secret=True
    )

    def check(self) -> None:
        """See `Settings.check`."""
        if len(self.engine_api_key) not in (0, 1, len(self.engine_url)):
            raise ConfigError(
                f"--engine-api-key has {len(self.engine_api_key)} keys, and --engine-url "
                f"{len(self.engine_url)} addresses: give one key, or one for each address"
            )
        if self.route_header.lower() in _TAKEN:
            raise ConfigError(f"--route-header {self.route_header}: choose another header")
        if self.engine_convert_to not in self.engine_image_formats:
            raise ConfigError(
                f"--engine-convert-to {self.engine_convert_to}: must be one of "
                "--engine-image-formats"
            )
        if self.engine_stream_nbytes and self.engine_names != "none":
            raise ConfigError(
                "--engine-stream-nbytes and --engine-names are mutually exclusive: the name of an "
                "item is known at its end"
            )
        if self.engine_events_port and find_spec("zmq") is None:
            raise ConfigError(
                "--engine-events-port needs ZeroMQ: pip install 'afferent-mm[events]'"
            )
        self.sources()

    def sources(self) -> list[Source]:
        """Return the sources of the servers' addresses.

        Raises:
            ConfigError: One is malformed.
        """
        keys = self.engine_api_key or ("",)
        found: list[Source] = []
        for index, url in enumerate(self.engine_url):
            try:
                found.append(source(url, api_key=keys[index % len(keys)]))
            except ConfigError as error:
                raise ConfigError(f"--engine-url {url}: {error.message}") from error
        return found
