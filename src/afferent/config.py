"""Settings of the server: frozen, and read from flags, the environment and a TOML file only here.

The order is flag, environment (``AFFERENT_PORT=9000``), file, default; `Loaded.sources` remembers
where each value came from. An unknown key is an error, and so is a value of the wrong type.
"""

from __future__ import annotations

import functools
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from afferent.errors import ConfigError
from afferent.types import GiB, KiB, MiB, Modality, ObjectKind

ENV_PREFIX = "AFFERENT_"

_Positive = Meta(gt=0)

_API_KEY = r"^[!-~]{16,256}\Z"
ApiKey = Annotated[str, Meta(pattern=_API_KEY)]
"""Printable, without blanks, and too long to be guessed."""


def _help(text: str) -> Meta:
    return Meta(description=text)


class ModalityLimits(NamedTuple):
    """The limits that each modality has of its own."""

    max_items: int
    max_nbytes: int
    fetch_timeout_s: float


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request's media may be. Every refusal names its limit."""

    max_images: Annotated[int, Meta(ge=1, le=4096), _help("most images in a request")] = 128
    max_image_nbytes: Annotated[int, _Positive, _help("largest image file")] = 32 * MiB
    max_image_pixels: Annotated[int, _Positive, _help("most pixels of an image")] = 64_000_000
    max_image_side: Annotated[int, _Positive, _help("longest side of an image")] = 16_384
    max_image_aspect: Annotated[int, _Positive, _help("largest ratio of its sides")] = 200
    max_videos: Annotated[int, Meta(ge=0, le=256), _help("most videos in a request")] = 8
    max_video_nbytes: Annotated[int, _Positive, _help("largest video file")] = 512 * MiB
    max_video_s: Annotated[float, _Positive, _help("longest video")] = 3600.0
    max_video_frames: Annotated[int, _Positive, _help("most frames that a video may have")] = 36_000
    max_sampled_frames: Annotated[int, _Positive, _help("most frames taken from a video")] = 768
    max_frame_pixels: Annotated[int, _Positive, _help("most pixels of a video's frame")] = 8_800_000
    max_video_decoded_nbytes: Annotated[int, _Positive, _help("most pixels of a video, as RGB")] = (
        GiB
    )
    max_audio_clips: Annotated[int, Meta(ge=0, le=256), _help("most audio clips in a request")] = 16
    max_audio_nbytes: Annotated[int, _Positive, _help("largest audio file")] = 64 * MiB
    max_audio_s: Annotated[float, _Positive, _help("longest audio clip")] = 600.0
    max_audio_channels: Annotated[int, _Positive, _help("most channels of an audio clip")] = 8
    max_audio_rate_hz: Annotated[int, _Positive, _help("highest sampling rate of audio")] = 192_000
    fetch_connect_timeout_s: Annotated[float, _Positive, _help("to connect to a media host")] = 3.0
    fetch_idle_timeout_s: Annotated[float, _Positive, _help("without a byte from it")] = 5.0
    fetch_total_timeout_s: Annotated[float, _Positive, _help("for one image in all")] = 10.0
    fetch_audio_timeout_s: Annotated[float, _Positive, _help("for one audio clip in all")] = 15.0
    fetch_video_timeout_s: Annotated[float, _Positive, _help("for one video in all")] = 30.0
    fetch_min_nbytes_per_s: Annotated[
        int, Meta(ge=0), _help("slowest rate at which a media host may deliver, after a while")
    ] = 64 * KiB
    fetch_max_per_host: Annotated[
        int, _Positive, _help("most fetches from one media host at a time, by each frontend")
    ] = 8
    fetch_allow: Annotated[
        tuple[str, ...],
        _help("HOST:PORT of your own media hosts that may be fetched from though they are private"),
    ] = ()
    file_roots: Annotated[
        tuple[str, ...], _help("folders whose files may be named by file: URLs; none by default")
    ] = ()

    def of(self, modality: Modality) -> ModalityLimits:
        match modality:
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


class RequestLimits(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What its body may be besides, and how long it may wait for room."""

    max_body_nbytes: Annotated[int, _Positive, _help("longest request body")] = 64 * MiB
    max_json_nbytes: Annotated[int, _Positive, _help("longest body, media left out")] = MiB
    body_idle_timeout_s: Annotated[float, _Positive, _help("without a byte from the client")] = 10.0
    body_timeout_s: Annotated[float, _Positive, _help("for a body to arrive in all")] = 60.0
    admission_timeout_s: Annotated[
        float, _Positive, _help("for room in the arena, before a 503 is sent")
    ] = 30.0


class Tenant(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Somebody with API keys of its own. What it has cached, no other tenant can hit."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,31}\Z")]
    api_keys: Annotated[tuple[ApiKey, ...], Meta(min_length=1, max_length=64)]
    max_requests: Annotated[int, Meta(ge=0, le=65536)] = 0
    """At a time, over all frontends; 0: no limit of its own."""


class ServeConfig(RequestLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of ``afferent serve``."""

    model: Annotated[str, _help("folder of a transformers image-text model, or 'shapes'")] = (
        "shapes"
    )
    served_model_name: Annotated[str, _help("its name in the API; default: the folder's name")] = ""
    host: Annotated[str, _help("address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), _help("port to listen on; 0 takes a free one")] = (
        8000
    )
    api_key: Annotated[
        str,
        Meta(pattern=rf"{_API_KEY}|^\Z"),
        _help("key that clients must send, best from the environment; none: no key is asked for"),
    ] = ""
    tenants: Annotated[
        tuple[Tenant, ...],
        _help("[[tenants]] of the file: name, api_keys and max_requests of each"),
    ] = ()
    arena_nbytes: Annotated[
        int,
        Meta(ge=0),
        _help("shared memory for media, features and embeddings; 0: what suits the memory"),
    ] = 0
    raw_share: Annotated[
        float, Meta(gt=0.0, lt=1.0), _help("part of the arena for media as they came")
    ] = 0.25
    embeddings_share: Annotated[
        float,
        Meta(ge=0.0, lt=1.0),
        _help("part for embeddings; features get the rest"),
    ] = 0.0
    alloc_workers: Annotated[
        int,
        Meta(ge=0, le=64),
        _help("threads that hash a request's media before they are allocated; 0: one by one"),
    ] = 1
    processor: Annotated[
        Literal["fast", "reference"],
        _help("how features are made: fast, or by the model's own processor in transformers"),
    ] = "fast"
    frontends: Annotated[
        int, Meta(ge=1, le=64), _help("processes that answer HTTP, all on the one port")
    ] = 1
    max_mm_preprocess_concurrency: Annotated[
        int,
        Meta(ge=0, le=2**31),
        _help("requests whose media are made at a time, over all frontends; 0: as many as fit"),
    ] = 0
    preprocess_workers: Annotated[
        int, Meta(ge=0, le=1024), _help("processes that decode and process; 0: one for each core")
    ] = 0
    preprocess_memory_nbytes: Annotated[
        int, Meta(ge=64 * MiB), _help("what one of them may allocate, the arena apart")
    ] = GiB
    preprocess_timeout_s: Annotated[
        float, _Positive, _help("for one item; a worker that takes longer is killed")
    ] = 60.0
    engine_workers: Annotated[
        int, Meta(ge=1, le=64), _help("processes that the model's heads are divided among")
    ] = 1
    engine_step_timeout_s: Annotated[
        float, _Positive, _help("for one step; engine workers that take longer are killed")
    ] = 120.0
    max_num_seqs: Annotated[int, _Positive, _help("requests that the engine runs at a time")] = 16
    max_step_tokens: Annotated[
        int, _Positive, _help("tokens computed in a step: longer prompts are done in chunks")
    ] = 2048
    max_step_embeds: Annotated[
        int, _Positive, _help("rows of embeddings encoded in a step; no item may have more")
    ] = 32_768
    encoder_cache_nbytes: Annotated[
        int, Meta(ge=MiB), _help("embeddings that each engine worker keeps for the next request")
    ] = 256 * MiB
    kv_cache_tokens: Annotated[
        int,
        Meta(ge=0),
        _help("tokens that running requests may hold in all; 0: what suits the memory"),
    ] = 0
    max_model_len: Annotated[
        int, Meta(ge=0), _help("longest prompt and answer, in tokens; 0: what the model allows")
    ] = 0
    request_timeout_s: Annotated[float, _Positive, _help("for one request in all")] = 300.0
    drain_timeout_s: Annotated[float, _Positive, _help("for running requests after SIGTERM")] = 30.0
    explain: Annotated[bool, _help("print an account of each request")] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], _help("least severe events to log")
    ] = "warning"
    log_format: Annotated[Literal["text", "json"], _help("form of the log lines")] = "text"

    @property
    def limits(self) -> Limits:
        """Only the limits, for processes that need no more."""
        return Limits(**{name: getattr(self, name) for name in Limits.__struct_fields__})

    @property
    def request_limits(self) -> RequestLimits:
        names = RequestLimits.__struct_fields__
        return RequestLimits(**{name: getattr(self, name) for name in names})

    @property
    def num_preprocess_workers(self) -> int:
        return self.preprocess_workers or len(os.sched_getaffinity(0))

    @property
    def shares(self) -> dict[ObjectKind, float]:
        """What part of the arena each kind of object has."""
        return {
            ObjectKind.RAW: self.raw_share,
            ObjectKind.FEATURES: 1.0 - self.raw_share - self.embeddings_share,
            ObjectKind.EMBEDDINGS: self.embeddings_share,
        }


class Loaded(Struct, frozen=True):
    """A configuration, and for each key which of flag, environment, file or default set it."""

    config: ServeConfig
    sources: dict[str, str]


_UNITS = {"": 1, "kib": KiB, "mib": MiB, "gib": GiB, "k": KiB, "m": MiB, "g": GiB}


def parse_nbytes(text: str) -> int:
    """``"512MiB"``, ``"2 GiB"`` or ``"1048576"`` as bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{text!r} is not a size such as 512MiB")
    return int(float(match[1]) * unit)


def load(
    flags: Mapping[str, str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Loaded:
    """Read the settings.

    Raises:
        ConfigError: An unknown key or a bad value; the message says which, and where it came from.
    """
    values: dict[str, Any] = {}
    sources = dict.fromkeys(field_names(), "default")
    for origin, layer in (
        (str(file), _read_file(file) if file is not None else {}),
        ("environment", _read_environment(os.environ if environ is None else environ)),
        ("flag", dict(flags or {})),
    ):
        for key, value in layer.items():
            if key not in sources:
                raise ConfigError(f"there is no setting {key!r} ({origin})")
            if is_table(key) and isinstance(value, str):
                raise ConfigError(f"{key} are tables of the file ({origin})")
            values[key] = _convert(key, value, origin)
            sources[key] = origin
    config = msgspec.convert(values, ServeConfig)
    if 0 < config.arena_nbytes < MiB:
        raise ConfigError(f"arena_nbytes = {config.arena_nbytes}: at least 1 MiB, or 0")
    if config.raw_share + config.embeddings_share >= 1:
        raise ConfigError("raw_share and embeddings_share leave nothing of the arena for features")
    _check_tenants(config)
    return Loaded(config, sources)


def _check_tenants(config: ServeConfig) -> None:
    names = [tenant.name for tenant in config.tenants]
    keys = [key for tenant in config.tenants for key in tenant.api_keys]
    keys += [config.api_key] if config.api_key else []
    for what, values in (("tenant's name", names), ("API key", keys)):
        if len(set(values)) < len(values):  # which key it is, is not for a log
            raise ConfigError(f"a {what} stands twice in the settings")


def field_names() -> tuple[str, ...]:
    return ServeConfig.__struct_fields__


@functools.cache  # each look at them evaluates every annotation
def _hints() -> dict[str, Any]:
    return get_type_hints(ServeConfig, include_extras=True)


def describe(key: str) -> tuple[str, object]:
    """A setting's help text and its default."""
    texts = [meta.description for meta in get_args(_hints()[key])[1:] if meta.description]
    index = ServeConfig.__struct_fields__.index(key)
    return texts[0], ServeConfig.__struct_defaults__[index]


def is_switch(key: str) -> bool:
    return isinstance(describe(key)[1], bool)


def is_table(key: str) -> bool:
    """Too much for a flag or a variable: it is read from the file alone."""
    return key == "tenants"


def is_secret(key: str) -> bool:
    return key in ("api_key", "tenants")


def _read_file(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} can't be read: {error}") from error


def _read_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Our part of the environment.

    A Kubernetes service called ``afferent`` puts variables of the same names there, which are not
    meant for us: ``AFFERENT_SERVICE_HOST`` gives them away.
    """
    ours = {k.removeprefix(ENV_PREFIX): v for k, v in environ.items() if k.startswith(ENV_PREFIX)}
    if "SERVICE_HOST" in ours:
        ours = {
            key: value
            for key, value in ours.items()
            if not key.startswith(("SERVICE_", "PORT_")) and not value.startswith("tcp://")
        }
    return {key.lower(): value for key, value in ours.items()}


def _convert(key: str, value: Any, origin: str) -> Any:
    """A value of any origin in the type of its field."""
    hint = _hints()[key]
    try:
        if isinstance(value, str):
            if key.endswith("_nbytes"):
                value = parse_nbytes(value)
            elif get_origin(get_args(hint)[0]) is tuple:
                value = [part for part in value.split(",") if part]
        return msgspec.convert(value, hint, strict=not isinstance(value, str))
    except (msgspec.ValidationError, ConfigError) as error:
        shown = "" if is_secret(key) else f" = {value!r}"
        raise ConfigError(f"{key}{shown} ({origin}): {error}") from error
