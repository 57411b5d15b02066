"""A disaggregated fleet in memory: the path, the plugin, and lanes that answer from scripts."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import trio
from trio.testing import wait_all_tasks_blocked

from core.call import Call
from core.fleet.worker import Worker
from core.hookspecs import Choice
from core.proxy import Proxy
from core.reply import Output
from core.settings import Settings as ProxySettings
from core.wire.needs import RUST_HTTP_CAN
from plugins.disaggregation import Disaggregation, Settings
from tests.unit.core.lanes import ScriptedLane, Step, output
from tests.unit.core.rig import Browser, Rig, make_worker

HANDOFF = {"do_remote_prefill": True, "do_remote_decode": False, "remote_port": 5600, "remote_block_ids": [[0]], "remote_host": "h"}


def prefilled(*, handoff: dict[str, Any] | None = HANDOFF, **fields: Any) -> Output:
    """What a prefill worker answers."""
    return output(7, finish=fields.pop("finish", "length"), kv_transfer_params=handoff, **fields)


def prefill(*steps: Step, name: str = "p", http: bool = False) -> Worker:
    return make_worker(name, _lane(*(steps or (prefilled(),)), http=http), role="prefill")


def decode(*steps: Step, name: str = "d", http: bool = False) -> Worker:
    return make_worker(name, _lane(*(steps or (output(8), output(9, finish="length", completion_tokens=2))), http=http), role="decode")


def _lane(*steps: Step, http: bool) -> ScriptedLane:
    return ScriptedLane(list(steps), wire="http", can=RUST_HTTP_CAN) if http else ScriptedLane(list(steps))


def lane(worker: Worker) -> ScriptedLane:
    """The worker's only lane."""
    return cast("ScriptedLane", worker.lanes[0])


class Fleet(Rig):
    """A rig whose workers have roles."""

    def __init__(
        self, *workers: Worker, settings: Settings | None = None, plugins: tuple[object, ...] = (), policy: str = "round-robin"
    ) -> None:
        plugin = Disaggregation(settings or Settings())
        super().__init__(*workers, plugins=[plugin, *plugins], policies=[policy])
        proxy = SimpleNamespace(
            fleet=self.fleet, leg=self.path.leg, preview=self.preview, candidates=self.placer.candidates, settings=ProxySettings()
        )
        self._service = plugin.run_service(cast("Proxy", proxy))
        for worker in workers:
            plugin.worker_joined(worker)

    @asynccontextmanager
    async def releasing(self) -> AsyncGenerator[None, None]:
        """While this lasts, and at its end until nothing moves, blocks of hand-offs that come to nothing are freed."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._service)
            yield
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    def preview(self, call: Call) -> Choice:
        return self.placer.place(call, {}).choice

    async def ask(self, **body: Any) -> Browser:
        """One call of three tokens."""
        return await Browser({"token_ids": [1, 2, 3], "sampling_params": {}, "request_id": "r1", **body}).ask(self)
