"""Whatever trainers and operators do, in whatever order, and whoever fails meanwhile: no engine dies, nobody takes calls in a trainer's
pause, and in the end all go on.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from random import Random

import httpx
import msgspec
import pytest
from trio.testing import wait_all_tasks_blocked

from core.errors import CallError
from core.fleet.control import PauseMode
from core.fleet.progress import UpdateRequest
from tests.unit.core.engines import broken, refused
from tests.unit.core.test_latecomers import Fleet, fleet_of

STEPS = 60
MODES: Sequence[PauseMode] = ("keep", "wait", "abort")


class Crowd:
    """Trainers and operators of one fleet, who don't know of each other."""

    def __init__(self, fleet: Fleet, random: Random) -> None:
        self.fleet = fleet
        self.random = random
        self.administration = fleet.administered.administration
        self.standings = self.administration._standings
        self.version = 1
        #: What was done, for whoever reads a failure.
        self.done: list[str] = []
        for index in range(len(fleet.workers)):
            self._serve_checkpoints(index)

    @property
    def operations(self) -> Sequence[Callable[[], Awaitable[None]]]:
        steps = (self.start, self.receive, self.finish)
        by_hand = (self.quarantine, self.drain, self.release, self.release)
        replacing = (*steps, *steps, self.update, self.reload)
        return (self.pause, self.resume, *replacing, *by_hand, self.restart, self.fail, self.sleep, self.wake_up)

    async def pause(self) -> None:
        await self.fleet.administered.pause(mode=self.random.choice(MODES))

    async def resume(self) -> None:
        await self.fleet.administered.resume()

    async def start(self) -> None:
        await self.fleet.administered.start()

    async def receive(self) -> None:
        await self.fleet.administered.receive()

    async def finish(self) -> None:
        await self.fleet.administered.finish(self._next())

    async def update(self, *, force: bool = False) -> None:
        request = UpdateRequest(self._next(), "courier", {}, self.random.choice(MODES), force=force)
        update = self.administration.updates.ask(request, self.administration.workers(), by="me")
        await update.done.wait()

    async def reload(self) -> None:
        await self.administration.methods.call(self.administration.workers(), {"method": "reload_weights"}, by="me", version=self._next())

    async def quarantine(self) -> None:
        self.administration.quarantine(self.random.choice(self.fleet.workers), "it smells", by="me")

    async def drain(self) -> None:
        self.administration.drain(self.random.choice(self.fleet.workers), by="me")

    async def release(self) -> None:
        index = self._index()
        # To release one whose weights are half of an update is at one's own risk; in an update that is open it is none.
        if not self.fleet.engines[index].broken or self.standings.of(self.fleet.workers[index]).updating:
            await self.administration.release(self.fleet.workers[index], by="me")

    async def restart(self) -> None:
        self.fleet.restart(self._index())

    async def fail(self) -> None:
        """The next such step of this engine."""
        failure = self.random.choice((broken, refused))()
        self.fleet.engines[self._index()].fails[self.random.choice(("pause", "start", "update", "finish"))] = [failure]

    async def sleep(self) -> None:
        workers = self.administration.workers()
        await self.fleet.administered.pausing.sleep(workers, self.random.choice((0, 1)), self.random.choice(MODES), by="me")

    async def wake_up(self) -> None:
        tags = self.random.choice(([], [], ["weights"], ["kv_cache"]))
        await self.fleet.administered.pausing.wake_up(self.administration.workers(), tags, by="me")

    async def do(self, operation: Callable[[], Awaitable[object]], name: str = "") -> None:
        """It may be refused, or fail; what has begun by itself ends."""
        try:
            await operation()
            outcome = "ok"
        except CallError as error:
            outcome = f"{error.status} {error.message}"
        await wait_all_tasks_blocked()
        states = [f"{worker.state} ({worker.reason})" for worker in self.fleet.workers]
        self.done.append(f"{name or getattr(operation, '__name__', '')}: {outcome[:160]} -> {states}")

    def check(self) -> None:
        told = "\n".join(self.done)
        for worker, engine in zip(self.fleet.workers, self.fleet.engines, strict=True):
            assert not engine.dead, told
            if worker.state == "ready":
                assert (engine.broken, engine.paused) == (False, False), told
                assert not any(self.standings.of(other).paused == "trainer" for other in self.fleet.workers), told
            assert worker.state == "ready" or worker.reason, told

    def _next(self) -> str:
        self.version += 1
        return str(self.version)

    def _index(self) -> int:
        return self.random.randrange(len(self.fleet.workers))

    def _serve_checkpoints(self, index: int) -> None:
        engine = self.fleet.engines[index]

        def answer(request: httpx.Request) -> httpx.Response:
            if msgspec.json.decode(request.content).get("method") == "reload_weights":
                engine.broken = False
            return httpx.Response(200, json={"results": [None]})

        self.fleet.workers[index].http = httpx.AsyncClient(base_url="http://w", transport=httpx.MockTransport(answer))


@pytest.mark.parametrize("repeatable", [False, True])
@pytest.mark.parametrize("seed", range(15))
async def test_no_order_of_operations_kills_an_engine_breaks_a_pause_or_leaves_anybody_paused(seed: int, repeatable: bool):
    async with fleet_of(1, 1, 1, repeatable=repeatable) as fleet:
        crowd = Crowd(fleet, Random(seed))
        for _ in range(STEPS):
            await crowd.do(crowd.random.choice(crowd.operations))
            crowd.check()
        for engine in fleet.engines:
            engine.fails.clear()
        pausing, workers = fleet.administered.pausing, fleet.workers
        await crowd.do(partial(crowd.update, force=True), "update by force")
        await crowd.do(partial(pausing.wake_up, workers, [], by="me"), "wake_up")
        await crowd.do(crowd.resume)
        told = "\n".join(crowd.done)
        crowd.check()
        assert {worker.state for worker in workers} <= {"ready", "draining", "quarantined"}, told
        for worker in workers:
            await crowd.do(partial(crowd.administration.release, worker, by="me"), "release")
        told = "\n".join(crowd.done)
        assert fleet.states == ["ready"] * 3, told
        assert {engine.version for engine in fleet.engines} == {str(crowd.version)}, told
        assert not any(engine.paused or engine.broken for engine in fleet.engines), told
