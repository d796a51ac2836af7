"""Settings of vLLM: the address of an external one, or the arguments of a started one."""

from __future__ import annotations

from typing import Literal

from afferent.config import Group, setting
from afferent.engines.http_upstream.settings import HttpSettings
from afferent.engines.vllm_hash import Hashes
from afferent.errors import ConfigError


class VllmSettings(HttpSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Either ``engine_url``, or arguments of ``vllm serve``; without both, a vLLM is started."""

    engine_args: str = setting(
        "", "arguments for a vllm serve that is started here", Group.COMMON, unit="ARGUMENTS"
    )
    engine_python: str = setting(
        "", "its interpreter, where vLLM is installed; default: this one", Group.COMMON, unit="FILE"
    )
    engine_video_bytes: bool = setting(
        False,
        "give vLLM videos as they came; for one that is started separately with --media-io-kwargs "
        "or --video-pruning-rate",
        Group.ENGINE,
    )
    engine_hashes: Hashes = setting(
        "afferent",
        "names of images in vLLM's caches: by Afferent, or as a stock vLLM computes them (by its "
        "VLLM_MM_HASHER_ALGORITHM), for caches that are shared with vLLMs without Afferent",
        Group.ENGINE,
    )
    engine_hashes_model: str = setting(
        "",
        "model as those vLLMs were told it, which is a part of their hashes; default: MODEL",
        Group.ENGINE,
        unit="NAME",
    )
    media_formats: Literal["known", "all"] = setting(
        "known",
        "image files that vLLM is given: those whose sides can be read from a header here, or all, "
        "which vLLM then decodes with no limit on pixels but its own",
        Group.ENGINE,
    )

    def check(self) -> None:
        """See `Settings.check`."""
        if self.engine_url and (self.engine_args or self.engine_python):
            raise ConfigError(
                "--engine-url is a vLLM that runs elsewhere: --engine-args and --engine-python "
                "are for one that is started here"
            )
        super().check()
