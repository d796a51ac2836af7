"""Stores of a Ray cluster: one for each node, started and owned by a named actor."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from afferent.batch.feature_maker import Features
from afferent.errors import ConfigError, StoreUnavailable, Unavailable
from afferent.types import MiB

if TYPE_CHECKING:
    from afferent.batch.media_model import Backend

_NAMESPACE: Final = "afferent"
_START_TIMEOUT_S: Final = 180.0
_RESTART_S: Final = 0.2
_END_TIMEOUT_S: Final = 30.0
_FOREVER: Final = -1


class NodeStores:
    """Pools of workers with their stores, one for each node of a Ray cluster.

    It is a place for `Features`: called on any node, it returns the address of that node's store.
    It can be sent to tasks and actors, as can a `Features` that uses it; each then uses the store
    of its own node.

    A store belongs to an actor with the resources of its workers: ``num_cpus`` and ``memory``. Ray
    restarts an actor that dies. The actors of all nodes belong to one actor, which starts them.
    Without a name, that one ends with this object, and with the program in any case; and all stores
    end with it.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        name: str | None = None,
        num_workers: int | None = None,
        backend: Backend | None = None,
        revision: str = "",
        arena_nbytes: int = 512 * MiB,
        limits: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the stores of all nodes that have CPUs; a later node gets one at its first use.

        Args:
            model: As for `Features`, on each node.
            name: Name by which other programs find the same stores. They survive this program, and
                end by `end`.
            num_workers: Workers for each node; ``None``: all CPUs of the node but one, at least 1.
                One CPU is left for other tasks of Ray.
            backend: As for `Features`.
            revision: As for `Features`.
            arena_nbytes: Shared memory of each node.
            limits: As for `Features`.

        Raises:
            ConfigError: Ray is not installed, a node has no resources for its workers, the model
                can't be used, or stores of this name have other settings. Stores that this call has
                begun to start end then.
        """
        ray = _ray()
        settings: dict[str, Any] = {"backend": backend, "revision": revision, "limits": limits}
        self._model, self._settings = os.fspath(model), settings
        self._name = f"afferent-{name or secrets.token_hex(8)}"
        given = {**settings, "model": self._model, "arena_nbytes": arena_nbytes}
        is_new = not self._exists()
        lifetime = None if name is None else "detached"
        self._owner = (
            ray.remote(_PoolOwner)
            .options(
                name=self._name,
                namespace=_NAMESPACE,
                get_if_exists=True,
                lifetime=lifetime,
                num_cpus=0,
                max_restarts=_FOREVER,
                max_task_retries=_FOREVER,
            )
            .remote(self._name, lifetime, num_workers, given)
        )
        if (found := self._ask("settings")) != {**given, "num_workers": num_workers}:
            raise ConfigError(f"the stores named {name} have other settings: {found}")
        try:
            self._ask("start")
        except ConfigError:
            if is_new:
                self.end()
            raise

    def __call__(self) -> str:
        """Return the address of the store of this node.

        Raises:
            ConfigError: The node has no resources for the workers, or the model can't be used.
            StoreUnavailable: The stores have ended, or this node's is restarted.
        """
        return str(self._ask("address_on", _ray().get_runtime_context().get_node_id()))

    def features(self) -> Features:
        """Return the features of the model, made by the workers of the node that uses them."""
        return Features(self._model, where=self, **self._settings)

    def end(self) -> None:
        """End the stores of all nodes; memory is freed with its last user."""
        ray = _ray()
        try:
            owner = ray.get_actor(self._name, namespace=_NAMESPACE)
            ray.get(owner.end.remote())
        except (ValueError, ray.exceptions.RayActorError):  # they have ended already
            return
        ray.kill(owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self._name, self._model, self._settings)

    def _exists(self) -> bool:
        try:
            _ray().get_actor(self._name, namespace=_NAMESPACE)
        except ValueError:
            return False
        return True

    def _ask(self, method: str, *arguments: Any) -> Any:
        ray = _ray()
        try:
            owner = ray.get_actor(self._name, namespace=_NAMESPACE)
            return ray.get(getattr(owner, method).remote(*arguments), timeout=_START_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError as error:
            raise ConfigError(
                f"a store of {self._name} did not start within {_START_TIMEOUT_S:.0f} s: its node "
                "has not as many free CPUs as num_workers, or not arena_nbytes of free memory; "
                "`ray status` shows both"
            ) from error
        except (ValueError, ray.exceptions.RayActorError) as error:
            raise StoreUnavailable(f"there are no stores named {self._name} any more") from error


def _again(name: str, model: str, settings: dict[str, Any]) -> NodeStores:
    found = NodeStores.__new__(NodeStores)
    found._name, found._model, found._settings = name, model, settings
    return found


def _ray() -> Any:
    """Import Ray.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise ConfigError("Ray is missing: pip install 'afferent-mm[ray]'") from error


class _PoolOwner:
    """Actor that starts the actors of all nodes, and owns them, so that they end with it.

    Actors with a name in the program's place ("detached") have no owner: after a restart, this
    actor finds them by their names.
    """

    def __init__(
        self, name: str, lifetime: str | None, num_workers: int | None, settings: dict[str, Any]
    ) -> None:
        self._name, self._lifetime = name, lifetime
        self._num_workers, self._settings = num_workers, settings
        self._pools: dict[str, Any] = {}

    async def settings(self) -> dict[str, Any]:
        """Return the settings of all stores."""
        return {**self._settings, "num_workers": self._num_workers}

    async def start(self) -> None:
        """Start the stores of all nodes that have CPUs."""
        nodes = [each for each in _ray().nodes() if each["Resources"].get("CPU")]
        calls = [self.address_on(each["NodeID"]) for each in nodes if each["Alive"]]
        for found in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(found, BaseException) and not isinstance(found, StoreUnavailable):
                raise found

    async def address_on(self, node: str) -> str:
        """Return the address of a node's store; an actor that has died for good is replaced."""
        ray = _ray()
        while True:
            pool = self._pools.get(node) or self._start(node)
            try:
                address: str = await pool.address.remote()
            except ray.exceptions.RayActorError:
                if self._pools.get(node) is pool:
                    del self._pools[node]
                await asyncio.sleep(_RESTART_S)
            else:
                return address

    async def end(self) -> None:
        """End the actors of all nodes."""
        ray = _ray()
        pools, self._pools = self._pools, {}
        ending = asyncio.gather(
            *(pool.end.remote() for pool in pools.values()), return_exceptions=True
        )
        with contextlib.suppress(TimeoutError):  # one without resources never begins
            await asyncio.wait_for(ending, _END_TIMEOUT_S)
        for pool in pools.values():
            ray.kill(pool)

    def _start(self, node: str) -> Any:
        ray = _ray()
        (found,) = [each for each in ray.nodes() if each["NodeID"] == node]
        if not found["Alive"]:
            raise StoreUnavailable(f"node {node[:12]} has ended")
        spare = max(0, int(found["Resources"].get("CPU", 0)) - 1)
        num_cpus = spare if self._num_workers is None else self._num_workers
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        pool = self._pools[node] = (
            ray.remote(_NodePool)
            .options(
                name=f"{self._name}-{node}",
                namespace=_NAMESPACE,
                get_if_exists=True,
                lifetime=self._lifetime,
                num_cpus=num_cpus,
                memory=self._settings["arena_nbytes"],
                max_restarts=_FOREVER,
                max_task_retries=_FOREVER,
                scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(max(1, num_cpus), self._settings)
        )
        return pool


class _NodePool:
    """Actor of one node: it owns the pool of workers and the store."""

    def __init__(self, num_workers: int, settings: dict[str, Any]) -> None:
        self._settings = {**settings, "where": "pool", "num_workers": num_workers}
        self._features: Features | None = None

    def address(self) -> str:
        """Return the address of the store; a pool that has ended is started again."""
        try:
            if self._features is not None:
                return str(self._features.address)
        except Unavailable:
            self.end()
        self._features = Features(**self._settings)
        return str(self._features.address)

    def end(self) -> None:
        """End the pool and its store."""
        features, self._features = self._features, None
        if features is not None:
            features.close()
