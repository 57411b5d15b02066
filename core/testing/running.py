"""A whole headrace for a test: every hook runs, and a client speaks HTTP to it without a socket."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import trio
from msgspec import structs

from core.fleet.worker import Worker
from core.hookspecs import Choice, hookimpl
from core.loading import load_plugins
from core.proxy import Proxy, open_proxy
from core.registry import Loaded, Registry
from core.settings import parse_settings
from core.testing.recording import RecordingLane

#: For stand-ins to start: about a second, on a busy machine several.
_START_SECONDS = 60.0


class RunningHeadrace:
    """An open proxy and a client. `lanes` are those of the workers in memory, by the workers' ids."""

    def __init__(self, proxy: Proxy, client: httpx.AsyncClient, lanes: Mapping[str, RecordingLane]) -> None:
        self.proxy = proxy
        self.client = client
        self.lanes = lanes

    async def generate(self, *token_ids: int, headers: Mapping[str, str] | None = None, **body: Any) -> httpx.Response:
        """Post a call with this prompt, three tokens when there is none; `body` is the rest of it."""
        content = {"token_ids": list(token_ids) or [1, 2, 3], "sampling_params": {"max_tokens": 3}, **body}
        return await self.client.post("/inference/v1/generate", json=content, headers=headers)


@asynccontextmanager
async def in_memory(
    plugins: Mapping[str, object],
    *,
    workers: Sequence[tuple[Worker, RecordingLane]],
    policies: Sequence[str] = ("first",),
    settings: str = "",
) -> AsyncGenerator[RunningHeadrace, None]:
    """headrace with just these plugins, by their names, in front of workers that `recording_worker` makes.

    `policies` names the plugins that choose workers; `first`, which is there in addition, takes the first one. `settings` is TOML, of which
    `[routing] policies` and the sections of plugins don't count. Leaving it cancels what still runs.

    Raises: as `open_proxy` does.
    """
    parsed = parse_settings(settings)
    parsed = structs.replace(parsed, routing=structs.replace(parsed.routing, policies=list(policies)))
    registry = Registry([*(Loaded(name, plugin) for name, plugin in plugins.items()), Loaded("first", _First())], policies)
    async with open_proxy(parsed, registry) as proxy:
        for worker, _ in workers:
            proxy.fleet.admit(worker)
        async with _client(proxy) as client:
            yield RunningHeadrace(proxy, client, {worker.id: lane for worker, lane in workers})


@asynccontextmanager
async def on_stand_ins(count: int = 2, *, settings: str = "") -> AsyncGenerator[RunningHeadrace, None]:
    """headrace with every installed plugin that the settings ask for, yours among them, in front of `count` stand-in processes.

    `settings` is TOML. Their ids are `stand-in-0`, `stand-in-1`, … All of them are ready.

    Raises: as `open_proxy` does; `trio.TooSlowError` when they don't get ready.
    """
    parsed = parse_settings(settings)
    parsed.plugins.sections.setdefault("stand-in", {})["workers"] = count
    async with open_proxy(parsed, load_plugins(parsed)) as proxy:
        with trio.fail_after(_START_SECONDS):
            await proxy.fleet.gate.wait_while(lambda: len(proxy.fleet.ready) < count)
        async with _client(proxy) as client:
            yield RunningHeadrace(proxy, client, {})


def _client(proxy: Proxy) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(proxy.asgi), base_url="http://headrace")


class _First:
    """A policy for tests that are about something else."""

    @hookimpl
    def choose_worker(self, workers: Sequence[Worker]) -> Choice:
        return Choice(workers[0], "first")
