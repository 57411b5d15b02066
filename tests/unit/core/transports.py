"""A weight transport whose every step can fail or stall, and a fleet that is updated over it."""

from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import trio

from core.errors import BadRequest
from core.fleet.cohort import Member
from core.fleet.control import WorkerControl
from core.fleet.progress import Update, UpdateRequest
from core.fleet.transport import WeightUpdate
from tests.unit.core.engines import AdministeredFleet, administered


class Courier:
    """Brings weights by vLLM's own steps. `fails` and `stalls` are by `prepare` or by a worker's id."""

    name = "courier"

    def __init__(self, *, repeatable: bool = True, grouped: bool = False) -> None:
        self.repeatable, self.grouped = repeatable, grouped
        self.prepared: list[WeightUpdate] = []
        self.applied: list[tuple[str, str]] = []
        #: What it was told with the first worker of each update.
        self.told: list[WeightUpdate] = []
        self.fails: defaultdict[str, list[BaseException]] = defaultdict(list)
        self.stalls: dict[str, trio.Event] = {}

    def parse(self, options: Mapping[str, Any]) -> Any:
        if unknown := options.keys() - {"path"}:
            raise BadRequest(f"{min(unknown)}: this transport doesn't know it", param=min(unknown))
        return options.get("path")

    async def prepare(self, update: WeightUpdate) -> None:
        self.prepared.append(update)
        await self._obey("prepare")

    async def apply(self, update: WeightUpdate, member: Member, control: WorkerControl) -> None:
        self.applied.append((member.id, update.version))
        if not self.told or self.told[-1].id != update.id:
            self.told.append(update)
        await self._obey(member.id)
        await control.start_weight_update()
        await control.update_weights({"names": ["w"]})
        await control.finish_weight_update(None)

    async def _obey(self, step: str) -> None:
        await trio.lowlevel.checkpoint()
        if step in self.stalls:
            await self.stalls[step].wait()
        if self.fails[step]:
            raise self.fails[step].pop(0)


class UpdatedFleet:
    """A fleet under administration, and the transport to it."""

    def __init__(self, fleet: AdministeredFleet, courier: Courier) -> None:
        self.administered = fleet
        self.courier = courier
        self.engines, self.workers = fleet.engines, fleet.workers

    def ask(self, version: str = "8", **changes: Any) -> Update:
        request = UpdateRequest(version, "courier", changes.pop("options", {}), **changes)
        return self.administered.administration.updates.ask(request, self.administered.administration.workers(), by="me")

    async def update(self, version: str = "8", **changes: Any) -> Update:
        update = self.ask(version, **changes)
        await update.done.wait()
        return update

    @property
    def states(self) -> list[str]:
        return self.administered.states

    @property
    def paused(self) -> list[bool]:
        return [engine.paused for engine in self.engines]


@asynccontextmanager
async def fleet_of(*world_sizes: int, repeatable: bool = True, grouped: bool = False, **settings: Any) -> AsyncIterator["UpdatedFleet"]:
    """A fleet of workers with so many ranks, two of one by default; `settings` are those of the administration."""
    courier = Courier(repeatable=repeatable, grouped=grouped)
    async with administered(*world_sizes, transports=[courier], **settings) as fleet:
        yield UpdatedFleet(fleet, courier)
