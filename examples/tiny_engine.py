"""A complete `afferent.Engine` in one file: it names colours.

    python examples/tiny_engine.py

The answer is the mean colour of each image, as three tokens from 0 to 255. The engine pins features
under its own connection, sends `Accepted`, reads the features in place, and unpins them however a
request ends. `examples/tiny_plugin.py` makes it an engine that a server can select.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import numpy as np

from afferent import (
    Accepted,
    AsyncDaemonStore,
    CreateItem,
    EngineEvent,
    EngineInfo,
    EngineRequest,
    Finished,
    Handle,
    Item,
    MiB,
    Modality,
    ObjectKind,
    Placeholder,
    Sampling,
    SealItem,
    StoreServer,
    TokenLogprobs,
    Tokens,
    codec,
    errors,
)
from afferent.schedule import WindowIndex

EOS = 256


class TinyEngine:
    """An engine that serves any number of concurrent requests; their tokens alternate."""

    def __init__(self, store: AsyncDaemonStore, *, max_model_len: int = 4096) -> None:
        """Create the engine; ``store`` is its own connection, so its pins end with its process."""
        self._store = store
        self.info: EngineInfo | None = EngineInfo(
            max_model_len,
            [EOS],
            modalities=(Modality.IMAGE,),
            unsupported=("temperature", "top_p", "top_k", "seed"),
        )

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """See `Engine.submit`."""
        self._check_running()
        index = WindowIndex((item.placeholder, item) for item in request.items)  # may refuse
        if index.end > len(request.token_ids):
            raise errors.InvalidPlaceholders("an item lies outside of the prompt")
        handles = [item.handle for item in request.items]
        try:
            await self._store.get(request.request_id, handles)  # one round trip pins all or none
            yield Accepted()
            colours = [token for handle in handles for token in self._mean_colour(handle)]
            self._store.forget(request.request_id)  # unpins: the features are not needed any more
            for event in _speak(colours, request.sampling):
                await asyncio.sleep(0)  # a real engine computes here
                self._check_running()
                yield event
        finally:  # after any end; a second unpin only costs a message
            self._store.forget(request.request_id)

    async def stats(self) -> None:
        """Return no statistics."""

    def close(self) -> None:
        """Refuse new requests; running ones fail, and a client can send them again."""
        self.info = None

    def _check_running(self) -> None:
        if self.info is None:
            raise errors.EngineUnavailable("the engine is closed; try again")

    def _mean_colour(self, handle: Handle) -> list[int]:
        """Read the features as an array over the arena, without a copy.

        The array must not outlive the pin. Each row is a patch: first its red values, then its
        green and its blue ones.
        """
        features: Any = codec.view(self._store.block(handle))
        patches = features["pixel_values"]
        mean = patches.reshape(len(patches), 3, -1).mean(axis=(0, 2))
        return [int(value) for value in mean.round()]


def _speak(answer: list[int], sampling: Sampling) -> Iterator[EngineEvent]:
    chosen = itertools.cycle([*answer, EOS])
    for token in itertools.islice(chosen, sampling.max_tokens):
        if token == EOS and not sampling.ignore_eos:
            yield Finished("stop", [])
            return
        yield Tokens([token], [], _logprobs(token, sampling.num_logprobs))
    yield Finished("length", [])


def _logprobs(token: int, number: int | None) -> list[TokenLogprobs]:
    """Return log-probabilities that leave no doubt."""
    if number is None:
        return []
    others = [(other, -100.0) for other in range(EOS + 1) if other != token]
    return [TokenLogprobs(0.0, [(token, 0.0), *others][:number])]


def plain_image(colour: tuple[int, int, int], num_patches: int) -> Any:
    """Return the features of an image of one colour, as the built-in model's family makes them."""
    patch = np.repeat(np.array(colour, np.uint8), 14 * 14)
    return {"pixel_values": np.tile(patch, (num_patches, 1))}


async def main() -> None:
    with StoreServer(64 * MiB) as server:
        frontend = await AsyncDaemonStore.connect(server.address, name="frontend", writable=True)
        store = await AsyncDaemonStore.connect(server.address, name="engine")
        engine = TinyEngine(store)
        names = {frontend.client_number: "frontend", store.client_number: "engine"}

        async def pins() -> str:
            objects = await frontend.list_objects()
            return ", ".join(names[client] for info in objects for client in info.pins) or "nobody"

        image = plain_image((200, 30, 90), 26 * 46)
        for request_id, num_read in (("answered", 99), ("aborted", 1)):
            planned = codec.plan(image)
            wanted = CreateItem(ObjectKind.FEATURES, planned.nbytes)
            (handle,) = await frontend.create(request_id, [wanted])
            used = codec.write_into(image, frontend.block(handle))
            (handle,) = await frontend.seal(request_id, [SealItem(handle, used)])
            item = Item(Modality.IMAGE, bytes(32), handle, Placeholder(1, 8))
            request = EngineRequest(request_id, [7] * 10, [item], Sampling(max_tokens=16))
            print(f"{request_id}: {used:,} bytes of features, pinned by {await pins()}")
            async with aclosing(engine.submit(request)) as events:
                for _ in range(num_read):  # to leave early aborts the request
                    event = await anext(events, None)
                    if event is None:
                        break
                    if isinstance(event, Accepted):
                        await frontend.release(request_id)
                    print(f"  {type(event).__name__}, pinned by {await pins()}")
            await store.stat()  # the daemon answers after it has handled the engine's unpin
            print(f"  the end, pinned by {await pins()}")
        engine.close()
        await store.close()
        await frontend.close()


if __name__ == "__main__":
    asyncio.run(main())
