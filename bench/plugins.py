"""`python -m bench plugins`: what a call pays for the installed plugins that it doesn't use."""

import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

import msgspec
import trio

from bench.machine import facts
from core.loading import load_plugins
from core.log import configure_log
from core.proxy import open_proxy
from core.settings import LogSettings, PluginsSettings, Settings
from core.testing import recording_worker

#: Rounds, in which both take turns, and calls in each.
_ROUNDS = 41
_CALLS = 100
_POLICY = "round-robin"
_BODY = msgspec.json.encode({"token_ids": list(range(200)), "sampling_params": {"max_tokens": 16}})
_SCOPE = {"type": "http", "method": "POST", "path": "/inference/v1/generate", "headers": [], "query_string": b"", "http_version": "1.1"}

Call = Callable[[], Awaitable[None]]


def main() -> int:
    """Measure and print: CPU times of whole calls without a network, with all plugins and with the policy alone."""
    print(f"{', '.join(f'{name} {value}' for name, value in facts().items())}\n")
    names = [loaded.name for loaded in load_plugins(Settings()).plugins]
    configure_log(LogSettings(level="error"))
    alone, together = trio.run(_both, [name for name in names if name != _POLICY])
    difference = median(b - a for a, b in zip(alone, together, strict=True))
    print(f"{_POLICY} alone: {median(alone) * 1e6:.1f} µs a call; with {len(names) - 1} more plugins: {median(together) * 1e6:.1f} µs")
    print(f"the plugins that a call doesn't use: {difference * 1e6:.1f} µs together")
    return 0


async def _both(others: list[str]) -> tuple[list[float], list[float]]:
    """Seconds a call, by round."""
    silent = Settings(log=LogSettings(level="error"))
    # No stand-in is wanted: the workers here are in memory.
    few = msgspec.structs.replace(silent, plugins=PluginsSettings(disable=others))
    all_ = msgspec.structs.replace(silent, plugins=PluginsSettings(disable=["stand-in"]))
    async with open_proxy(few) as first, open_proxy(all_) as second:
        found: list[list[float]] = []
        for proxy in (first, second):
            worker, lane = recording_worker("a")
            lane.calls = lane.requests = _Nowhere()
            proxy.fleet.admit(worker)
            found.append([])
        for _ in range(_ROUNDS):
            for seconds, proxy in zip(found, (first, second), strict=True):
                began = time.thread_time()
                for _ in range(_CALLS):
                    await proxy.asgi(_SCOPE, _receiver(), _send)
                seconds.append((time.thread_time() - began) / _CALLS)
        return found[0], found[1]


class _Nowhere(list[Any]):
    """Keeps nothing."""

    def append(self, _: Any) -> None:
        pass


def _receiver() -> Callable[[], Awaitable[dict[str, Any]]]:
    bodies = [{"type": "http.request", "body": _BODY, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if bodies:
            return bodies.pop()
        await trio.sleep_forever()
        raise AssertionError

    return receive


async def _send(message: Any) -> None:
    if message["type"] == "http.response.start" and message["status"] != 200:
        raise AssertionError(message)
