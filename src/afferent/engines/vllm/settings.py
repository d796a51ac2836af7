"""Settings of vLLM: the address of an external one, or the arguments of a started one."""

from __future__ import annotations

from typing import Literal

from afferent.config import Group, Settings, setting
from afferent.errors import ConfigError
from afferent.types import GiB


class VllmSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Either ``engine_url``, or arguments of ``vllm serve``; without both, a vLLM is started."""

    engine_url: tuple[str, ...] = setting(
        (),
        "unix:PATH or http://HOST:PORT of a vLLM that runs elsewhere, with AFFERENT_STORE_PATH in "
        "its environment; several share the store",
        Group.COMMON,
        unit="URL,...",
    )
    engine_args: str = setting(
        "", "arguments for a vllm serve that is started here", Group.COMMON, unit="ARGUMENTS"
    )
    engine_python: str = setting(
        "", "its interpreter, where vLLM is installed; default: this one", Group.COMMON, unit="FILE"
    )
    engine_api_key: str = setting(
        "",
        "key that vLLM asks for; without it, what clients send is passed on",
        Group.ENGINE,
        unit="KEY",
        is_secret=True,
    )
    engine_video_bytes: bool = setting(
        False,
        "give vLLM videos as they came; for one that --media-io-kwargs tells which frames to take",
        Group.ENGINE,
    )
    media_formats: Literal["known", "all"] = setting(
        "known",
        "image files that vLLM is given: those whose sides can be read from a header here, or all, "
        "which vLLM then decodes with no limit on pixels but its own",
        Group.ENGINE,
    )
    engine_memory_nbytes: int = setting(
        4 * GiB, "main memory that a vLLM started here takes", Group.MEMORY, ge=0
    )
    engine_start_timeout_s: float = setting(
        1800.0, "for a vLLM started here until it answers", Group.TIMEOUTS, gt=0
    )

    def check(self) -> None:
        """See `Settings.check`."""
        if self.engine_url and (self.engine_args or self.engine_python):
            raise ConfigError(
                "--engine-url is a vLLM that runs elsewhere: --engine-args and --engine-python "
                "are for one that is started here"
            )
        for url in self.engine_url:
            if not url.startswith(("unix:", "http://")):
                raise ConfigError(f"--engine-url {url}: must be unix:PATH or http://HOST:PORT")
