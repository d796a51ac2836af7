"""The tiny engine as a plugin that a server can select.

    afferent serve --engine examples.tiny_plugin:Tiny --tiny-max-model-len 512

`Tiny` describes it. The supervisor and every frontend import this module, so it has no slow imports
at its top. The engine runs in its own process, with this module as its main module.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path

import uvloop
from msgspec import Struct

from afferent import AsyncDaemonStore, MiB, errors
from afferent.engines import (
    ChildProcess,
    EngineHost,
    EnginePlan,
    EngineProcess,
    EngineSite,
    Group,
    RemoteKind,
    RemoteLink,
    Settings,
    listening,
    run_until_terminated,
    setting,
)

MODULE = "examples.tiny_plugin"


class TinySettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tiny_max_model_len: int = setting(
        4096, "longest prompt and answer, in tokens", Group.ENGINE, gt=0
    )


class TinyProcess(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of the engine process."""

    store_address: str
    listener_fd: int
    max_model_len: int


class Tiny(RemoteKind[TinySettings]):
    name = "tiny"
    summary = "says the mean colour of each image; an example"
    settings_type = TinySettings

    def check(self, model_folder: Path, settings: TinySettings) -> None:
        config = json.loads((model_folder / "config.json").read_text())
        if not str(config.get("model_type")).startswith("qwen2"):
            raise errors.UnsupportedModel("the tiny engine knows the features of Qwen2-VL alone")

    def reserved_nbytes(self, model_folder: Path, settings: TinySettings) -> int:
        return 64 * MiB

    def plan(self, site: EngineSite, settings: TinySettings) -> EnginePlan[RemoteLink]:
        at = listening("tiny")
        told = TinyProcess(
            store_address=site.store_address,
            listener_fd=at.fd,
            max_model_len=settings.tiny_max_model_len,
        )
        process = EngineProcess(name="tiny", module=MODULE, settings=told, fds=(at.fd,))
        return EnginePlan(processes=(process,), link=at.link)


async def _run(child: ChildProcess, told: TinyProcess) -> None:
    from examples.tiny_engine import TinyEngine

    store = await AsyncDaemonStore.connect(told.store_address, name=child.name)
    host = EngineHost(TinyEngine(store, max_model_len=told.max_model_len))
    child.report(f"up to {told.max_model_len:,} tokens a request", ready=True)
    listener = socket.socket(fileno=told.listener_fd)
    await run_until_terminated(host.serve(listener), child.keep_beating())


def main() -> None:
    child = ChildProcess.start()
    uvloop.run(_run(child, child.settings(TinyProcess)))


if __name__ == "__main__":
    main()
