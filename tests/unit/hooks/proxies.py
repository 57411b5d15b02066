"""A proxy around one plugin, and how it is asked."""

from typing import Any

from core.fleet.fleet import Fleet
from core.fleet.worker import Worker
from core.proxy import Proxy
from tests.unit.core.rig import Browser

BODY = {"token_ids": [1, 2, 3], "sampling_params": {}, "request_id": "r1", "cache_salt": "v7"}


async def get(proxy: Proxy, path: str) -> Browser:
    return await ask(proxy, path, b"", method="GET")


async def ask(proxy: Proxy, path: str, body: Any, *, method: str = "POST") -> Browser:
    browser = Browser(body, method=method, path=path)
    await proxy.asgi(browser.scope, browser.receive, browser.send)
    return browser


def fleet_of(proxy: Proxy) -> Fleet:
    return proxy.fleet


def move(fleet: Fleet, worker: Worker, state) -> None:
    fleet.workers[worker.id] = worker
    fleet._set(worker, state, "in a test")
