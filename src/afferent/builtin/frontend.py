"""Frontend process with Afferent's own APIs, over an engine that takes tokens.

python -m afferent.builtin.frontend FD      (started by the supervisor)
"""

from __future__ import annotations

from functools import partial

from afferent.builtin.apis.realtime.events import REALTIME
from afferent.builtin.http.app import Frontend
from afferent.builtin.pipeline.pipeline import Pipeline
from afferent.builtin.pipeline.prompt import PromptBuilder, sampling_defaults
from afferent.engines import registry
from afferent.engines.contract import EngineKind
from afferent.engines.protocol import Engine, check_engine
from afferent.engines.render import Renderer
from afferent.errors import ConfigError, InternalError
from afferent.items.item import Processor
from afferent.media.families.registry import fingerprint
from afferent.media.headers.probe import Accepted
from afferent.proxy.frontend import Made, Parts, caller_of, link_of, main, serve
from afferent.proxy.launch import FrontendSettings
from afferent.proxy.tenancy import Tenancy
from afferent.runtime.process import ChildProcess


async def _run(child: ChildProcess, settings: FrontendSettings) -> None:
    kind = registry.find(settings.config.engine)
    if not isinstance(kind, EngineKind):
        raise ConfigError(f"the engine {settings.config.engine!r} takes no tokens")
    async with kind.connect(link_of(kind, settings), caller_of(child, settings)) as engine:
        check_engine(engine)
        await serve(child, settings, partial(_with_engine, engine), is_upstream=False)


def _with_engine(engine: Engine, base: Parts) -> Made:
    """Make the application with Afferent's APIs, over an engine that takes tokens."""
    folder, family = base.folder, base.settings.family
    if family is None:
        raise InternalError("an engine that takes features has no family")
    secret = base.settings.config.fleet_secret.encode()
    as_vllm = isinstance(engine, Renderer) and engine.is_for_vllm
    pipeline = Pipeline(
        store=base.store,
        engine=engine,
        builder=PromptBuilder(folder, family, as_vllm=as_vllm),
        items=base.items(
            Processor(family, fingerprint(folder, family)),
            accepted=Accepted.MEASURED if as_vllm else Accepted.DECODED,
            tenant_secret=secret,
        ),
        sampling=sampling_defaults(folder),
    )
    app = Frontend(
        *(pipeline, base.gate, base.app_settings),
        access=base.access,
        board=base.board,
        tenancy=_tenancy(engine, base, secret),
        files=base.files,
    ).app()
    return Made(
        *(app, pipeline.close, engine.stats, lambda: engine.info is not None),
        websocket_paths=frozenset({REALTIME.path}),
    )


def _tenancy(engine: Engine, base: Parts, secret: bytes) -> Tenancy | None:
    """Return what makes the salts that servers in front of vLLM write; ``None`` if none do."""
    has_salts = isinstance(engine, Renderer) and engine.is_for_afferent
    if not (has_salts and secret and base.access.has_tenants):
        return None
    return Tenancy(has_tenants=True, secret=secret)


if __name__ == "__main__":
    main(_run)
