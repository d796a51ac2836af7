"""Process that publishes item events.

python -m afferent.operations.item_events.main FD      (started by the supervisor)
"""

from __future__ import annotations

import os

import uvloop

from afferent.engines.item_events import requests_endpoint
from afferent.errors import ConfigError
from afferent.operations.item_events.launch import PublisherSettings
from afferent.operations.item_events.publisher import Publisher, follow
from afferent.runtime.process import ChildProcess, run_until_terminated
from afferent.store.client.async_store import AsyncDaemonStore

_NICE = 5
"""Lower priority than requests, and higher than the live page: routers use the events."""


async def _run(child: ChildProcess, settings: PublisherSettings) -> None:
    publisher = Publisher(settings.endpoint, key=settings.key)
    try:
        async with await AsyncDaemonStore.connect(settings.store_address, name=child.name) as store:
            requests = requests_endpoint(settings.endpoint)
            child.report(f"{settings.endpoint}, requests at {requests}", ready=True)
            await run_until_terminated(
                follow(store, publisher),
                publisher.keep_publishing(),
                publisher.keep_answering(store),
                child.keep_beating(),
            )
    finally:
        publisher.close()


def main() -> None:
    os.nice(_NICE)
    child = ChildProcess.start()
    try:
        uvloop.run(_run(child, child.settings(PublisherSettings)))
    except ConfigError as error:
        child.refuse(error.message)


if __name__ == "__main__":
    main()
