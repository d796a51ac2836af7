"""Settings of the server: frozen, each declared in one line."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from afferent.config.declaring import Group, Settings, setting
from afferent.config.sizes import format_nbytes
from afferent.errors import ConfigError
from afferent.types import DocumentKind, FileKind, GiB, KiB, MiB, Modality, ObjectKind

LEAST_RECORDS_NBYTES = MiB
MOST_PARTS = 1 << 17
"""Above this, the messages of a request would take seconds of a frontend that serves others."""
LEAST_FROZEN_TIMEOUT_S = 3.0
"""Below this, a moment of overload would be mistaken for a hang."""
_LEAST_WORKER_NBYTES = 64 * MiB
_TIMEOUT_S, _UPSTREAM_TIMEOUT_S = 300.0, 86_400.0

_API_KEY = r"^[!-~]{16,256}\Z"
_OPTIONAL_API_KEY = rf"{_API_KEY}|^\Z"
_TENANT_NAME = r"^[a-z0-9][a-z0-9-]{0,31}\Z"
_HOST_PORT = r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5}\Z"
_ORIGIN = r"^(\*|https?://[A-Za-z0-9.:\[\]-]+)\Z"
_HOST_NAME = r"^[A-Za-z0-9._-]+\Z"
_FOLDER = r"^/"
_ADDRESS = r"^[A-Za-z0-9.:_%-]+\Z"
_NAME = r"^\S*\Z"
_EVENTS = r"^(tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._*-]{1,253}):[0-9]{1,5}|ipc:///\S{1,90})?\Z"
_FLEET_SECRET = r"^([!-~]{16,256})?\Z"  # noqa: S105 a pattern
_KEYS = "an API key needs 16 to 256 printable characters, none of them blank or beyond ASCII"
IN_WORDS = {
    _API_KEY: _KEYS,
    _OPTIONAL_API_KEY: _KEYS,
    _TENANT_NAME: "1 to 32 characters of a-z, 0-9 and -, no dash first",
    _HOST_PORT: "each must be HOST:PORT, such as media.internal:8080",
    _ORIGIN: "each must be an origin such as https://example.org, without a path, or *",
    _HOST_NAME: "each must be a name such as llm.example.org, without a port or a scheme",
    _FOLDER: "each must be an absolute path of a folder",
    _ADDRESS: "must be an address or a name, such as 0.0.0.0, without a port or a scheme",
    _NAME: "must have no blanks",
    _EVENTS: "must be tcp://HOST:PORT or ipc:///PATH, with a path of at most 90 characters",
    _FLEET_SECRET: "needs 16 to 256 printable characters, none of them blank or beyond ASCII",
}
"""Explanations of the patterns."""

ApiKey = Annotated[str, Meta(pattern=_API_KEY)]
"""Printable, without blanks, and too long to guess."""
_HostPort = Annotated[str, Meta(pattern=_HOST_PORT)]
_Origin = Annotated[str, Meta(pattern=_ORIGIN)]
_HostName = Annotated[str, Meta(pattern=_HOST_NAME)]
_Name = Annotated[str, Meta(pattern=_NAME)]
_Folder = Annotated[str, Meta(pattern=_FOLDER)]


class ModalityLimits(NamedTuple):
    """Limits that each kind of file has of its own."""

    max_items: int
    max_nbytes: int
    fetch_timeout_s: float


class Limits(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one request's media. Every refusal names its limit."""

    max_images: int = setting(128, "most images in a request", Group.LIMITS, ge=1, le=MOST_PARTS)
    max_image_nbytes: int = setting(32 * MiB, "largest image file", Group.LIMITS, gt=0)
    max_image_pixels: int = setting(64_000_000, "most pixels of an image", Group.LIMITS, gt=0)
    max_image_side: int = setting(16_384, "longest side of an image", Group.LIMITS, gt=0)
    max_image_aspect: int = setting(200, "largest ratio of its sides", Group.LIMITS, gt=0)
    max_videos: int = setting(8, "most videos in a request", Group.LIMITS, ge=0, le=256)
    max_video_nbytes: int = setting(512 * MiB, "largest video file", Group.LIMITS, gt=0)
    max_video_s: float = setting(3600.0, "longest video", Group.LIMITS, gt=0)
    max_video_frames: int = setting(36_000, "most frames that a video has", Group.LIMITS, gt=0)
    max_sampled_frames: int = setting(768, "most frames taken from a video", Group.LIMITS, gt=0)
    max_frame_pixels: int = setting(8_800_000, "most pixels of a video's frame", Group.LIMITS, gt=0)
    max_video_decoded_nbytes: int = setting(GiB, "most of a video as RGB", Group.LIMITS, gt=0)
    max_audio_clips: int = setting(16, "most audio clips in a request", Group.LIMITS, ge=0, le=256)
    max_audio_nbytes: int = setting(64 * MiB, "largest audio file", Group.LIMITS, gt=0)
    max_audio_s: float = setting(600.0, "longest audio clip", Group.LIMITS, gt=0)
    max_audio_channels: int = setting(8, "most channels of an audio clip", Group.LIMITS, gt=0)
    max_audio_rate_hz: int = setting(192_000, "highest rate of an audio clip", Group.LIMITS, gt=0)
    max_documents: int = setting(8, "most documents in a request", Group.LIMITS, ge=0, le=256)
    max_document_nbytes: int = setting(32 * MiB, "largest document file", Group.LIMITS, gt=0)
    max_document_pages: int = setting(
        100,
        "most pages of documents, and frames of videos as images, in a request",
        Group.LIMITS,
        ge=1,
        le=4096,
    )
    max_page_pixels: int = setting(
        4_000_000,
        "most pixels of a document's page, or of a video's frame as an image; a larger one is made "
        "smaller",
        Group.LIMITS,
        ge=10_000,
    )
    max_page_s: float = setting(
        10.0, "longest time of a processor to render a document's page", Group.LIMITS, gt=0
    )
    document_dpi: int = setting(
        144,
        "dots per inch at which pages of documents are rendered",
        Group.PREPROCESSING,
        ge=18,
        le=1200,
        unit="DPI",
    )
    document_content: Literal["both", "images", "text", "forward"] = setting(
        "both",
        "content of a document's page for the model: its image and its text, or one of these; with "
        "forward, an engine behind this server gets the document as it came",
        Group.PREPROCESSING,
    )

    fetch_connect_timeout_s: float = setting(
        3.0, "to connect to a media host", Group.FETCHING, gt=0
    )
    fetch_idle_timeout_s: float = setting(5.0, "without a byte from it", Group.FETCHING, gt=0)
    fetch_total_timeout_s: float = setting(10.0, "for one image in all", Group.FETCHING, gt=0)
    fetch_audio_timeout_s: float = setting(15.0, "for one audio clip in all", Group.FETCHING, gt=0)
    fetch_video_timeout_s: float = setting(30.0, "for one video in all", Group.FETCHING, gt=0)
    fetch_document_timeout_s: float = setting(30.0, "for one document in all", Group.FETCHING, gt=0)
    fetch_min_nbytes_per_s: int = setting(
        64 * KiB,
        "slowest rate at which a media host may deliver, after a while",
        Group.FETCHING,
        ge=0,
        unit="BYTES",
    )
    fetch_max_per_host: int = setting(
        8, "most fetches from one media host at a time, by each frontend", Group.FETCHING, gt=0
    )
    fetch_fresh_s: float = setting(
        10.0,
        "for so long what a URL led to is not fetched again, where its host says nothing of it",
        Group.FETCHING,
        ge=0,
    )
    fetch_allow: tuple[_HostPort, ...] = setting(
        (),
        "your own media hosts that may be fetched from though they are private",
        Group.FETCHING,
        unit="HOST:PORT,...",
    )
    file_roots: tuple[_Folder, ...] = setting(
        (),
        "folders whose files may be named by file: URLs; none by default",
        Group.FETCHING,
        unit="FOLDER,...",
    )

    def of(self, kind: FileKind) -> ModalityLimits:
        match kind:
            case Modality.IMAGE:
                return ModalityLimits(
                    self.max_images, self.max_image_nbytes, self.fetch_total_timeout_s
                )
            case Modality.AUDIO:
                return ModalityLimits(
                    self.max_audio_clips, self.max_audio_nbytes, self.fetch_audio_timeout_s
                )
            case Modality.VIDEO:
                return ModalityLimits(
                    self.max_videos, self.max_video_nbytes, self.fetch_video_timeout_s
                )
            case DocumentKind.DOCUMENT:
                return ModalityLimits(
                    self.max_documents, self.max_document_nbytes, self.fetch_document_timeout_s
                )


class RequestLimits(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a request's body, and of its wait for space, in addition to `Limits`."""

    max_body_nbytes: int = setting(
        64 * MiB, "longest request body, without media that are known", Group.LIMITS, gt=0
    )
    max_json_nbytes: int = setting(
        MiB, "longest body, media left out; of one that is passed on, all of it", Group.LIMITS, gt=0
    )
    max_parts: int = setting(
        4096,
        "most parts in a request's messages, where a message without any counts as one; its JSON "
        "may have 16 strings, lists and objects for each",
        Group.LIMITS,
        ge=16,
        le=MOST_PARTS,
    )

    body_idle_timeout_s: float = setting(
        10.0, "without a byte from the client", Group.TIMEOUTS, gt=0
    )
    body_timeout_s: float = setting(60.0, "for a body to arrive in all", Group.TIMEOUTS, gt=0)
    admission_timeout_s: float = setting(
        30.0, "for room in the arena, before a 503 is sent", Group.TIMEOUTS, gt=0
    )


_LIMITS_OF_TENANTS = ("max_images", "max_image_pixels", "max_body_nbytes")


class Tenant(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tenant with API keys of its own. Other tenants never hit its cache entries."""

    name: Annotated[str, Meta(pattern=_TENANT_NAME)]
    api_keys: Annotated[tuple[ApiKey, ...], Meta(min_length=1, max_length=64)]
    max_requests: Annotated[int, Meta(ge=0, le=65536)] = 0
    """Concurrent requests, over all frontends; 0: no limit of its own."""
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """Weight of its share of scarce resources; 1 is usual."""
    max_images: Annotated[int, Meta(ge=0, le=MOST_PARTS)] = 0
    """Images in a request; 0: the server's limit, which a higher number does not raise."""
    max_image_pixels: Annotated[int, Meta(ge=0)] = 0
    """Pixels of an image; likewise."""
    max_body_nbytes: Annotated[int, Meta(ge=0)] = 0
    """Bytes of a request's body; likewise."""
    tier_nbytes: Annotated[int, Meta(ge=0)] = 0
    """Bytes that a node stores for it in a tier; 0: the server's limit."""
    files_nbytes: Annotated[int, Meta(ge=0)] = 0
    """Bytes of its files; 0: the server's limit."""
    files_count: Annotated[int, Meta(ge=0)] = 0
    """Number of its files; 0: the server's limit."""

    def within(self, limits: RequestLimits) -> RequestLimits:
        """Return these limits, with its own where they are stricter."""
        own = {name: getattr(self, name) for name in _LIMITS_OF_TENANTS}
        closer = {name: min(most, getattr(limits, name)) for name, most in own.items() if most}
        return msgspec.structs.replace(limits, **closer) if closer else limits


class ServeConfig(RequestLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of ``afferent serve``, except the engine's own."""

    model: str = setting("shapes", "a model's folder, or its name on the hub", Group.COMMON)
    revision: str = setting(
        "", "branch, tag or commit of a model that is on the hub", Group.COMMON, unit="NAME"
    )
    served_model_name: tuple[_Name, ...] = setting(
        (),
        "its names in the API, such as a,b; default: its own",
        Group.COMMON,
        unit="NAME",
    )
    engine: str = setting(
        "reference",
        "what runs the model, with its own settings: the built-in one (for tests), vllm, openai, "
        "an installed one, or MODULE:FACTORY",
        Group.COMMON,
        unit="NAME",
    )
    host: str = setting(
        "127.0.0.1", "address to listen on", Group.COMMON, pattern=_ADDRESS, unit="ADDRESS"
    )
    port: int = setting(8000, "port to listen on; 0 takes a free one", Group.COMMON, ge=0, le=65535)
    api_key: str = setting(
        "",
        "key that clients must send, best by the environment; none: no key is asked for",
        Group.COMMON,
        pattern=_OPTIONAL_API_KEY,
        unit="KEY",
        is_secret=True,
    )
    tenants: tuple[Tenant, ...] = setting(
        (),
        "[[tenants]] of the file: name, api_keys, weight and limits of each",
        Group.COMMON,
        is_secret=True,
        is_table=True,
    )
    frontends: int = setting(
        0,
        "processes that answer HTTP; 0: one for each 8 cores",
        Group.COMMON,
        ge=0,
        le=64,
    )
    preprocess_workers: int = setting(
        0,
        "processes that decode; 0: one a core, or what fits",
        Group.COMMON,
        ge=0,
        le=1024,
    )
    arena_nbytes: int = setting(
        0,
        "shared memory for media and features; 0: what fits",
        Group.COMMON,
        ge=0,
    )
    explain: bool = setting(False, "print a trace of each request", Group.COMMON)
    ui: int = setting(
        -1,
        "port of the live page; 0: a free one, -1: none",
        Group.COMMON,
        ge=-1,
        le=65535,
        unit="PORT",
    )

    unknown_fields: Literal["ignore", "refuse"] = setting(
        "ignore",
        "unknown parameters of a request are ignored or refused; one that is nearly a known one is "
        "refused in any case, and an upstream such as vLLM decides for itself",
        Group.LIMITS,
    )
    cors_origin: tuple[_Origin, ...] = setting(
        (),
        "origins whose pages may ask from a browser, such as https://example.org; * means all, and "
        "the default none; it replaces a setting of an upstream such as vLLM",
        Group.LIMITS,
        unit="ORIGIN,...",
    )
    allowed_hosts: tuple[_HostName, ...] = setting(
        (),
        "names, besides localhost, by which pages reach a server without keys, and on a loopback "
        "address all clients, such as that of a proxy on this machine",
        Group.LIMITS,
        unit="NAME,...",
    )

    preallocate_arena: bool = setting(
        False,
        "have the whole arena take its memory at the start, and not as it is filled; a GPU of the "
        "built-in engine then copies from it by itself",
        Group.MEMORY,
    )
    raw_share: float = setting(
        0.25, "part of the arena for media as they came", Group.MEMORY, gt=0, lt=1
    )
    embeddings_share: float = setting(
        0.0, "part for embeddings; features get the rest", Group.MEMORY, ge=0, lt=1
    )
    records_share: float = setting(
        0.02,
        "part for conversations, names and plans; 1 MiB at least, where there is that much",
        Group.MEMORY,
        gt=0,
        lt=1,
    )
    store_path: str = setting(
        "",
        "path of the store's socket, for processes of this user that are started elsewhere",
        Group.MEMORY,
        unit="FILE",
    )
    preprocess_memory_nbytes: int = setting(
        0,
        "what one preprocess worker may allocate, the arena apart; 0: 1 GiB, or less where memory "
        "is short",
        Group.MEMORY,
        ge=0,
    )

    processor: Literal["fast", "reference"] = setting(
        "fast",
        "how features are made: fast, or by the model's own processor in transformers",
        Group.PREPROCESSING,
    )
    max_mm_preprocess_concurrency: int = setting(
        0,
        "requests whose media are made at a time, over all frontends; 0: as many as fit",
        Group.PREPROCESSING,
        ge=0,
        le=2**31,
    )

    files_store: str = setting(
        "",
        "where files of clients are stored: a folder, shared by all frontends, or the URL of an "
        "object store that fsspec opens; none: no files are stored",
        Group.FETCHING,
        pattern=_NAME,
        unit="FOLDER|URL",
        is_secret=True,
    )
    files_max_nbytes: int = setting(512 * MiB, "largest file of a client", Group.FETCHING, gt=0)
    files_tenant_nbytes: int = setting(
        16 * GiB, "most bytes of the files of a tenant; 0: no limit", Group.FETCHING, ge=0
    )
    files_tenant_count: int = setting(
        10_000, "most files of a tenant; 0: no limit", Group.FETCHING, ge=0
    )

    tier: str = setting(
        "",
        "where nodes leave for one another what they have made: redis://HOST, rediss:// (TLS), "
        "valkey://, file:///FOLDER, or what fsspec opens; none: nowhere",
        Group.TIER,
        pattern=_NAME,
        unit="URL",
        is_secret=True,
    )
    fleet_secret: str = setting(
        "",
        "secret that the nodes of a fleet share, best set by the environment: it seals entries in "
        "the tier; with tenants it is the key of names and salts in vLLM's caches; and a gateway "
        "signs the tenants of its requests with it",
        Group.TIER,
        pattern=_FLEET_SECRET,
        unit="TEXT",
        is_secret=True,
    )
    gateway_tenants: bool = setting(
        False,
        "answer only gateways with the same --fleet-secret, and clients with a key of this server; "
        "the tenants of the gateways are those of this server",
        Group.TIER,
    )
    tier_timeout_s: float = setting(
        1.0,
        "for all that is requested of the tier for an item; then it is made here",
        Group.TIER,
        gt=0,
        le=60,
    )
    tier_wait_s: float = setting(
        5.0, "longest wait for what another node is making", Group.TIER, ge=0, le=60
    )
    tier_ttl_s: float = setting(
        86_400.0, "for so long what was made is kept there", Group.TIER, ge=1
    )
    tier_max_nbytes: int = setting(
        256 * MiB, "largest object that is kept there", Group.TIER, gt=0, le=4 * GiB
    )
    tier_write_nbytes_per_s: int = setting(
        0, "most that is written there in a second; 0: no limit", Group.TIER, ge=0, unit="BYTES"
    )
    tier_tenant_nbytes: int = setting(
        0, "most that this node keeps there for one tenant; 0: no limit", Group.TIER, ge=0
    )

    item_events: str = setting(
        "",
        "address for events of the items that are in the store: tcp://HOST:PORT, with requests at "
        "the next port, or ipc:///PATH; addresses other than loopback need a key; none: no events",
        Group.LOGGING,
        pattern=_EVENTS,
        unit="URL",
    )
    item_events_key: str = setting(
        "",
        "key that subscribers of item events send; none: no key is needed",
        Group.LOGGING,
        pattern=_OPTIONAL_API_KEY,
        unit="KEY",
        is_secret=True,
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "warning", "least severe events to log", Group.LOGGING
    )
    log_format: Literal["text", "json"] = setting("text", "form of the log lines", Group.LOGGING)
    ui_host: str = setting(
        "127.0.0.1",
        "address that the live page listens on; others than loopback need a key",
        Group.LOGGING,
        pattern=_ADDRESS,
        unit="ADDRESS",
    )
    ui_key: str = setting(
        "",
        "key that the live page asks for; default: --api-key; none: no key is asked for",
        Group.LOGGING,
        pattern=_OPTIONAL_API_KEY,
        unit="KEY",
        is_secret=True,
    )

    request_timeout_s: float = setting(
        0.0,
        "for one request in all; 0: 300 s with the built-in engine, a day in front of an upstream, "
        "which has no such limit",
        Group.TIMEOUTS,
        ge=0,
    )
    preprocess_timeout_s: float = setting(
        60.0, "for one item; a worker that takes longer is killed", Group.TIMEOUTS, gt=0
    )
    frozen_timeout_s: float = setting(
        15.0,
        "without a sign of life from a process, before it is killed and started again",
        Group.TIMEOUTS,
        ge=LEAST_FROZEN_TIMEOUT_S,
    )
    drain_timeout_s: float = setting(
        30.0, "for running requests after SIGTERM or SIGHUP", Group.TIMEOUTS, gt=0
    )

    def check(self) -> None:
        if 0 < self.arena_nbytes < MiB:
            raise ConfigError(f"--arena-nbytes {self.arena_nbytes}: must be at least 1MiB, or 0")
        if 0 < self.preprocess_memory_nbytes < _LEAST_WORKER_NBYTES:
            raise ConfigError(
                f"--preprocess-memory-nbytes {self.preprocess_memory_nbytes}: must be at least "
                f"{format_nbytes(_LEAST_WORKER_NBYTES)}, or 0"
            )
        if self.raw_share + self.embeddings_share + self.records_share >= 1:
            raise ConfigError(
                f"--raw-share {self.raw_share:g}, --embeddings-share {self.embeddings_share:g} and "
                f"--records-share {self.records_share:g} leave nothing of the arena for features: "
                "they must be below 1 in all"
            )
        if self.gateway_tenants and not self.fleet_secret:
            raise ConfigError(
                "--gateway-tenants needs the secret of the gateway: set AFFERENT_FLEET_SECRET "
                "(--fleet-secret) to the same value at both"
            )
        names = [tenant.name for tenant in self.tenants]
        keys = [key for tenant in self.tenants for key in tenant.api_keys]
        keys += [self.api_key] if self.api_key else []
        for what, values in (("tenant's name", names), ("API key", keys)):
            if len(set(values)) < len(values):  # the log must not show which key it is
                raise ConfigError(f"a {what} stands twice in the settings")

    def timeout_s(self, *, is_upstream: bool) -> float:
        """Return the timeout of a whole request.

        Args:
            is_upstream: Whether an upstream answers, and not an engine with Afferent's own APIs.
        """
        return self.request_timeout_s or (_UPSTREAM_TIMEOUT_S if is_upstream else _TIMEOUT_S)

    @property
    def has_tenants(self) -> bool:
        """Whether clients are tenants: of this server, or of a gateway in front of it."""
        return bool(self.tenants) or self.gateway_tenants

    @property
    def page_key(self) -> str:
        """Key that the live page requires; empty: none."""
        return self.ui_key or self.api_key

    @property
    def limits(self) -> Limits:
        """Limits alone, for processes that need no other settings."""
        return Limits(**{name: getattr(self, name) for name in Limits.__struct_fields__})

    @property
    def request_limits(self) -> RequestLimits:
        names = RequestLimits.__struct_fields__
        return RequestLimits(**{name: getattr(self, name) for name in names})

    @property
    def limits_by_tenant(self) -> dict[str, RequestLimits]:
        """Limits of the tenants that have limits of their own."""
        limits = self.request_limits
        within = {tenant.name: tenant.within(limits) for tenant in self.tenants}
        return {name: own for name, own in within.items() if own is not limits}

    @property
    def shares(self) -> dict[ObjectKind, float]:
        """Part of the arena of each kind of object.

        Records get at least `LEAST_RECORDS_NBYTES`, or a quarter of their common part with features
        if that is less: in a small arena, their share alone could not store one conversation.
        """
        left = 1.0 - self.raw_share - self.embeddings_share
        records = self.records_share
        if self.arena_nbytes:  # an automatic size is never that small
            records = max(records, min(LEAST_RECORDS_NBYTES / self.arena_nbytes, left / 4))
        return {
            ObjectKind.RAW: self.raw_share,
            ObjectKind.FEATURES: left - records,
            ObjectKind.EMBEDDINGS: self.embeddings_share,
            ObjectKind.RECORDS: records,
        }
