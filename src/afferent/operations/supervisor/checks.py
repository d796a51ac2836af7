"""Checks of the settings against the model's folder, the engine, memory and other folders."""

from __future__ import annotations

import importlib.util
import ipaddress
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from afferent.config import Loaded, ServeConfig, Settings
from afferent.config.sizes import format_nbytes
from afferent.engines import registry
from afferent.engines.contract import NO_MODEL, EngineKind, EngineSite, UpstreamKind
from afferent.errors import ConfigError, TierUnavailable
from afferent.files.file_store import FileLimits, open_store
from afferent.media.families import hub
from afferent.media.families.registry import AnyFamily, describe
from afferent.media.families.unknown import UnknownFamily
from afferent.media.fetch.files import FileRoots
from afferent.media.workers import sandbox
from afferent.media.workers.discover import refuse_unknown
from afferent.operations.supervisor import sizing
from afferent.runtime import shortage
from afferent.store import segment
from afferent.telemetry import spans
from afferent.tier.registry import open_tier, without_secrets
from afferent.types import MiB

_RAW_LIMITS = {
    "max_body_nbytes": 3 / 4,
    "max_image_nbytes": 1.0,
    "max_video_nbytes": 1.0,
    "max_audio_nbytes": 1.0,
}
"""Part of each limit that is in the arena at once: base64 in a body is decoded to less."""

_TIER_TIMEOUT_S = 3.0
BUILT_IN_MODELS = hub.BUILT_IN_MODELS


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Checked server: the model, and the division of memory."""

    config: ServeConfig
    """Settings, with the number of processes chosen for this machine."""
    folder: Path
    """Folder of the model."""
    family: AnyFamily | None
    """Family described by the folder; ``None``: only the model's own processor can determine it."""
    engine: registry.AnyKind
    engine_settings: Settings
    arena_nbytes: int
    left_nbytes: int
    """Memory left beside the arena and everything reserved."""

    @property
    def model_name(self) -> str:
        """Name of the model in the API."""
        config = self.config
        is_name = self.folder == NO_MODEL or hub.is_name(config.model)
        own = config.model if is_name else self.folder.name
        return config.served_model_name[0] if config.served_model_name else own

    def site(self, family: AnyFamily | None, *, store_address: str) -> EngineSite:
        """Return the engine's site."""
        return EngineSite(
            model_folder=self.folder,
            model_name=self.model_name,
            aliases=self.config.served_model_name[1:],
            family=family,
            store_address=store_address,
            shares=self.config.shares,
            left_nbytes=self.left_nbytes,
            has_tier=bool(self.config.tier),
        )


def check(loaded: Loaded, *, may_download: bool = False) -> Checked:
    """Check the model's folder, the engine, the memory, and all else that the settings name.

    A model on a hub must be in the cache, or is downloaded into it.

    Raises:
        ConfigError: These settings can't be served.
        UnsupportedModel: This model can't be served.
    """
    config = loaded.config
    shortage.check_files()
    _check_page(config)
    _check_item_events(config)
    FileRoots(config.file_roots).close()
    if config.files_store:
        open_store(config.files_store, FileLimits.of(config)).close()
    spans.check()
    engine = registry.find(config.engine)
    if config.tier:
        open_tier(config.tier).close()
        _check_fleet_secret(config, engine)
    settings: Settings = loaded.of(engine.settings_type)
    needs_weights = engine.needs_weights(settings)
    folder = model_folder(loaded, needs_weights=needs_weights, may_download=may_download)
    if folder == NO_MODEL and loaded.sources["model"] == "default":
        config = msgspec.structs.replace(config, model=engine.name)
    engine_nbytes = engine.reserved_nbytes(folder, settings)
    sizes = sizing.choose(config, sizing.Machine.here(), engine_nbytes=engine_nbytes)
    _check_raw_media(loaded, sizes.arena_nbytes)
    shortage.check_tasks(num_workers=sizes.preprocess_workers, num_frontends=sizes.frontends)
    segment.check_available(sizes.arena_nbytes)
    sandbox.check_machine()
    engine.check(folder, settings)
    family: AnyFamily | None = own_family(loaded) or describe(
        folder,
        engine.config_of(folder, settings),
        reference=config.processor == "reference",
        max_sampled_frames=config.max_sampled_frames,
        resize_rule=engine.resize_rule_of(settings),
    )
    if family is None and not isinstance(engine, UpstreamKind):
        refuse_unknown(folder)
    if isinstance(engine, EngineKind):
        _check_prompts(folder, family)
    return Checked(
        config=msgspec.structs.replace(
            config,
            frontends=sizes.frontends,
            preprocess_workers=sizes.preprocess_workers,
            preprocess_memory_nbytes=sizes.preprocess_memory_nbytes,
        ),
        folder=folder,
        family=family,
        engine=engine,
        engine_settings=settings,
        arena_nbytes=sizes.arena_nbytes,
        left_nbytes=sizes.left_nbytes,
    )


def _check_prompts(folder: Path, family: AnyFamily | None) -> None:
    """Read the tokenizer, the chat template and the sampling defaults, as each frontend does.

    Raises:
        ConfigError: One of them is missing or broken.
    """
    # Imported here and by name: nothing else in the supervisor needs a tokenizer.
    prompt: Any = importlib.import_module("afferent.builtin.pipeline.prompt")
    prompt.check_folder(folder, family or UnknownFamily())


def _check_raw_media(loaded: Loaded, arena_nbytes: int) -> None:
    """Refuse explicit limits that exceed the arena's space. Defaults are never refused.

    Raises:
        ConfigError: Media as large as one of them could never be in the arena.
    """
    config = loaded.config
    share_nbytes = int(arena_nbytes * config.raw_share)
    for key, part in _RAW_LIMITS.items():
        nbytes = getattr(config, key)
        if loaded.sources[key] == "default" or nbytes * part <= share_nbytes:
            continue
        raise ConfigError(
            f"--{key.replace('_', '-')} {format_nbytes(nbytes)}: media of such a size take up to "
            f"{math.ceil(nbytes * part / MiB):,} MiB of the arena, whose part for media as they "
            f"came has {share_nbytes / MiB:,.0f} MiB (--raw-share {config.raw_share:g} of "
            f"{arena_nbytes / MiB:,.0f} MiB); choose {int(share_nbytes / part / MiB)}MiB at most, "
            f"or --arena-nbytes {math.ceil(nbytes * part / config.raw_share / MiB)}MiB"
        )


def own_family(loaded: Loaded) -> AnyFamily | None:
    """Return the family of an upstream whose model is unknown here; ``None`` for all others.

    Raises:
        ConfigError: There is no such engine.
    """
    engine = registry.find(loaded.config.engine)
    if not isinstance(engine, UpstreamKind):
        return None
    settings: Settings = loaded.of(engine.settings_type)
    return engine.own_family(settings)


def model_folder(loaded: Loaded, *, needs_weights: bool = True, may_download: bool = False) -> Path:
    """Return the folder of a built-in model, a model on this machine, or one on a hub; `NO_MODEL`
    if only the engine knows the model.

    Args:
        loaded: Settings that name the model.
        needs_weights: Whether the weights of a model on a hub are needed.
        may_download: Whether missing files of a model on a hub may be downloaded.

    Raises:
        ConfigError: There is no such model.
    """
    if own_family(loaded) is not None:
        return NO_MODEL
    config = loaded.config
    return hub.find_model(
        config.model,
        revision=config.revision,
        needs_weights=needs_weights,
        takes_mistrals=registry.find(config.engine).takes_mistrals,
        from_cache_only=not may_download,
    )


def _check_fleet_secret(config: ServeConfig, engine: registry.AnyKind) -> None:
    """Check that nodes whose engines keep tenants apart by their keys have the same keys.

    Raises:
        ConfigError: Each node would have its own.
    """
    if isinstance(engine, UpstreamKind) and config.has_tenants and not config.fleet_secret:
        raise ConfigError(
            "with tenants, the servers of a tier need one secret for the keys of their items: set "
            "AFFERENT_FLEET_SECRET (--fleet-secret) to the same value at all of them"
        )


def _check_item_events(config: ServeConfig) -> None:
    """Check the address of item events, and the package that publishes them.

    Raises:
        ConfigError: It needs a key, or the package is missing.
    """
    if not config.item_events:
        return
    host = config.item_events.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    is_local = config.item_events.startswith("ipc://") or _is_loopback(host)
    if not is_local and not config.item_events_key:
        raise ConfigError(
            f"--item-events {config.item_events}: others can read the events there, so they need a "
            "key (--item-events-key)"
        )
    if importlib.util.find_spec("zmq") is None:
        raise ConfigError("--item-events needs pyzmq: pip install 'afferent-mm[events]'")


def _check_page(config: ServeConfig) -> None:
    """Check that the live page has a key if others can reach it, or if tenants have keys.

    Raises:
        ConfigError: It needs a key and has none.
    """
    if config.ui < 0 or config.page_key:
        return
    if not _is_loopback(config.ui_host):
        raise ConfigError(
            f"--ui-host {config.ui_host}: others can reach the live page there, so it needs a key "
            "(--ui-key)"
        )
    if config.has_tenants:
        raise ConfigError(f"--ui {config.ui}: tenants have keys, so the page needs one (--ui-key)")


def exposure(config: ServeConfig) -> str:
    """Return a warning for a server that others can reach without a key; empty if none."""
    if _is_loopback(config.host) or config.api_key or config.has_tenants:
        return ""
    return f"{config.host} can be reached by others, and no API key is asked for (--api-key)"


def silent_tier(config: ServeConfig) -> str:
    """Return a warning for a tier that can't be reached from here; empty if there is none.

    A server starts and runs without its tier.
    """
    if not config.tier:
        return ""
    tier = open_tier(config.tier)
    try:
        tier.health(deadline_s=time.monotonic() + _TIER_TIMEOUT_S)
    except TierUnavailable as error:
        where = without_secrets(config.tier)
        return f"the tier {where} can't be reached, and a server goes on without it: {error}"
    finally:
        tier.close()
    return ""


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name can have any address
        return False
