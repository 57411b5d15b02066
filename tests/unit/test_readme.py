"""The README's requests give the README's answers, its settings are valid, and its plugin works."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import trio

from core import Call, Choice, SamplingParams, Worker, WorkerSettings, hookimpl
from core.proxy import open_proxy
from core.registry import Loaded, Registry
from core.settings import parse_settings
from plugins.routing_round_robin import RoundRobin
from plugins.stand_in import Settings as StandInSettings
from plugins.stand_in import StandIn

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return [text for found, text in re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL) if found == language]


def requests() -> list[dict[str, Any]]:
    return [json.loads(body) for body in re.findall(r"v1/generate -d '(.*)'", README)]


class Joined:
    def __init__(self):
        self.event = trio.Event()

    @hookimpl
    def worker_joined(self, worker: Worker) -> None:
        self.event.set()


async def test_the_requests_give_the_answers():
    joined = Joined()
    plugins = {"round-robin": RoundRobin(), "stand-in": StandIn(StandInSettings()), "joined": joined}
    registry = Registry([Loaded(name, plugin) for name, plugin in plugins.items()], ["round-robin"])
    async with open_proxy(parse_settings(""), registry) as proxy:
        await joined.event.wait()
        transport = httpx.ASGITransport(proxy.asgi)
        async with httpx.AsyncClient(transport=transport, base_url="http://headrace") as client:
            for request, block in zip(requests(), blocks("json"), strict=True):
                answer = (await client.post("/inference/v1/generate", json=request)).json()
                expected = json.loads(block)
                if "created" in expected:
                    expected["created"] = answer["created"]
                assert answer == expected


def test_the_settings_are_valid():
    assert parse_settings(blocks("toml")[0]).workers[0].name == "a"


def test_the_plugin_works():
    namespace: dict[str, Any] = {"__name__": "quiet_hours"}
    exec(blocks("python")[0], namespace)
    plugin = namespace["QuietHours"](namespace["Settings"](worker="b", longer_than=2))
    registry = Registry([Loaded("quiet-hours", plugin), Loaded("round-robin", RoundRobin())], ["quiet-hours", "round-robin"])
    workers = [Worker(WorkerSettings(grpc="127.0.0.1:1", id="a")), Worker(WorkerSettings(grpc="127.0.0.1:2", id="b"))]

    def choose(*token_ids: int) -> Choice:
        return registry.call("choose_worker", call=Call(id="x", token_ids=list(token_ids), sampling=SamplingParams()), workers=workers)

    assert choose(1, 2, 3) == Choice(workers[1], "quiet-hours: 3 tokens")
    assert choose(1) == Choice(workers[0], "round-robin")
