"""Description of servers that speak OpenAI's chat completions, and know nothing of Afferent."""

from __future__ import annotations

import secrets
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from msgspec import Struct

from afferent.engines.contract import Caller, EnginePlan, EngineSite, UpstreamKind
from afferent.engines.http_upstream.sources import Sources
from afferent.engines.openai.settings import OpenAISettings
from afferent.engines.upstream import Upstream
from afferent.errors import ConfigError
from afferent.media.families.reencoded import ReencodedFamily
from afferent.media.families.registry import AnyFamily
from afferent.telemetry.trace import declare_stages

declare_stages("first_byte")


class OpenAILink(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Link from frontends to the servers; ``secret`` is the key of salts."""

    settings: OpenAISettings
    secret: bytes


class OpenAIUpstream(UpstreamKind[OpenAISettings, OpenAILink]):
    """Servers that run already, here or elsewhere, and get media in the bodies of requests."""

    name = "openai"
    title = "the engine server"
    summary = "any server with OpenAI's chat completions, with media in the body"
    settings_type = OpenAISettings
    link_type = OpenAILink

    def own_family(self, settings: OpenAISettings) -> AnyFamily | None:
        """See `UpstreamKind.own_family`: the engine knows the model, and gets files."""
        return ReencodedFamily(
            format=settings.engine_convert_to, max_pixels=settings.engine_max_pixels
        )

    def takes_features(self, model_folder: Path, settings: OpenAISettings) -> bool:
        """See `UpstreamKind.takes_features`."""
        return True

    def needs_weights(self, settings: OpenAISettings) -> bool:
        """See `Backend.needs_weights`."""
        return False

    def check(self, model_folder: Path, settings: OpenAISettings) -> None:
        """See `Backend.check`."""
        from afferent.engines.http_upstream.server import trust_of

        if not settings.engine_url:
            raise ConfigError("--engine openai needs --engine-url: the address of a server")
        trust_of(settings.engine_ca)

    def reserved_nbytes(self, model_folder: Path, settings: OpenAISettings) -> int:
        """See `Backend.reserved_nbytes`."""
        return 0

    def plan(self, site: EngineSite, settings: OpenAISettings) -> EnginePlan[OpenAILink]:
        """See `Backend.plan`."""
        return EnginePlan(
            processes=(),
            link=OpenAILink(settings=settings, secret=secrets.token_bytes(32)),
            notes=(f"{self.title} at {', '.join(settings.engine_url)}",),
        )

    def connect(self, link: OpenAILink, caller: Caller) -> AbstractAsyncContextManager[Upstream]:
        """See `UpstreamKind.connect`."""
        # The supervisor needs none of these.
        from afferent.engines.http_upstream.client import HttpClient, ItemEvents
        from afferent.engines.http_upstream.server import trust_of
        from afferent.engines.openai.traits import OpenAITraits

        settings, events = link.settings, None
        if settings.engine_events_port:
            events = ItemEvents(settings.engine_events_port, settings.engine_events_key)
        return HttpClient.over(
            Sources(settings.sources()),
            title=self.title,
            secret=link.secret,
            traits=OpenAITraits(settings),
            trust=trust_of(settings.engine_ca) if settings.engine_ca else None,
            route_header=settings.route_header,
            events=events,
        )
