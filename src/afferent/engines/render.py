"""Renderer: a description of a server that renders prompts and runs no model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from msgspec import Struct

from afferent.config import Group, Settings, setting
from afferent.engines import registry
from afferent.engines.contract import Caller, EngineKind, EnginePlan, EngineSite
from afferent.engines.protocol import Engine, EngineEvent, EngineInfo, EngineRequest, EngineStats
from afferent.engines.vllm_hash import ALGORITHMS, Hashes, image_hash
from afferent.errors import ConfigError, NotServed
from afferent.media.families import mistral
from afferent.media.families.family import longest_prompt, read_json
from afferent.media.transforms.resize import ResizeRule
from afferent.types import Modality

_UNKNOWN_LEN: Final = 1 << 20
"""Longest prompt if neither a setting nor the model's config limits it."""


class RenderSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the renderer."""

    max_model_len: int = setting(
        0, "longest prompt and answer, in tokens; 0: what the model allows", Group.COMMON, ge=0
    )
    render_for: str = setting(
        "vllm",
        "engine of the servers behind the router: their items have the same names as here",
        Group.COMMON,
        unit="ENGINE",
    )
    render_hashes: Hashes = setting(
        "afferent",
        "hashes of items: their names in vLLM behind Afferent, or those that a stock vLLM computes "
        "(by its VLLM_MM_HASHER_ALGORITHM)",
        Group.COMMON,
    )
    render_model: str = setting(
        "",
        "model as the stock vLLM was told it, which is a part of its hashes; default: MODEL",
        Group.COMMON,
        unit="NAME",
    )
    exclude_tools_when_tool_choice_none: bool = setting(
        False,
        "tools are not in the prompt of a request with the tool_choice none, as in a vLLM with the "
        "flag of this name",
        Group.COMMON,
    )


class RenderLink(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Link to the renderer, which is in each frontend."""

    max_model_len: int
    hashes: Hashes = "afferent"
    model: str = ""
    is_for_vllm: bool = False
    excludes_unused_tools: bool = False


class Renderer:
    """Engine that takes no requests; see `afferent.Engine`."""

    def __init__(self, link: RenderLink) -> None:
        self._info = EngineInfo(link.max_model_len, [], generates=False)
        self._link = link

    @property
    def is_for_vllm(self) -> bool:
        """Whether prompts are those of vLLM, also where special tokens are spelled out in text."""
        return self._link.is_for_vllm

    @property
    def is_for_afferent(self) -> bool:
        """Whether the prompts are for vLLM behind Afferent, which names its items."""
        return self._link.is_for_vllm and self._link.hashes == "afferent"

    @property
    def excludes_unused_tools(self) -> bool:
        """Whether tools are left out of a prompt if the request's ``tool_choice`` is ``none``."""
        return self._link.excludes_unused_tools

    def hash_of(
        self, modality: Modality, key: bytes, file: bytes | memoryview | None, uuid: str
    ) -> str:
        """Return the hash of an item that has no options.

        Args:
            modality: Modality of the item.
            key: Its content key.
            file: Its encoded bytes; ``None`` if they are not here.
            uuid: The client's id of it; empty for none.
        """
        if self._link.hashes == "afferent":
            return key.hex()
        if uuid:
            return uuid
        if modality is not Modality.IMAGE or file is None:
            return key.hex()
        algorithm = ALGORITHMS[self._link.hashes]
        return image_hash(file, model=self._link.model, algorithm=algorithm) or key.hex()

    @property
    def info(self) -> EngineInfo | None:
        return self._info

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        raise NotServed("this server renders prompts and runs no model")
        yield  # type: ignore[unreachable]  # makes it a generator

    async def stats(self) -> EngineStats | None:
        return None


class RenderKind(EngineKind[RenderSettings, RenderLink]):
    """Prompts alone: no weights, no process."""

    name = "render"
    summary = "prompts for routers; no model runs"
    settings_type = RenderSettings
    link_type = RenderLink

    def resize_rule_of(self, settings: RenderSettings) -> ResizeRule:
        """See `Backend.resize_rule_of`: it is a part of the items' keys."""
        return registry.find(settings.render_for).resize_rule

    def check(self, model_folder: Path, settings: RenderSettings) -> None:
        """See `Backend.check`."""
        if settings.render_for == "vllm" and mistral.has_format(model_folder):
            raise ConfigError(
                f"{model_folder} is in Mistral's own format, which vLLM prefers; prompts are "
                "rendered for the format of transformers only"
            )

    def needs_weights(self, settings: RenderSettings) -> bool:
        """See `Backend.needs_weights`."""
        return False

    def reserved_nbytes(self, model_folder: Path, settings: RenderSettings) -> int:
        """See `Backend.reserved_nbytes`."""
        return 0

    def plan(self, site: EngineSite, settings: RenderSettings) -> EnginePlan[RenderLink]:
        """See `Backend.plan`."""
        limit = longest_prompt(read_json(site.model_folder / "config.json"))
        length = settings.max_model_len or limit or _UNKNOWN_LEN
        link = RenderLink(
            max_model_len=length,
            hashes=settings.render_hashes,
            model=settings.render_model or str(site.model_folder),
            is_for_vllm=settings.render_for == "vllm",
            excludes_unused_tools=settings.exclude_tools_when_tool_choice_none,
        )
        return EnginePlan(processes=(), link=link)

    @asynccontextmanager
    async def connect(self, link: RenderLink, caller: Caller) -> AsyncIterator[Engine]:
        """See `EngineKind.connect`."""
        yield Renderer(link)
