"""`POST /engine/…`: the operations by name, with Dynamo's ways of saying what has failed.

`/engine/control/<name>` and `/engine/update/<name>` are those of its native workers, `/engine/<name>` those of its Python ones.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import msgspec

from core import Administration, CallError, HTTPReply, HTTPRequest, NotFound, Routes, Worker
from plugins.dynamo.asking import Asking, Refused
from plugins.dynamo.controls import CONTROLS
from plugins.dynamo.loras import LORAS, LoraFailed, load_lora
from plugins.dynamo.of_python import OF_PYTHON
from plugins.dynamo.updates import UPDATES

Operation = Callable[[Asking, Mapping[str, Any]], Awaitable[dict[str, Any]]]

#: For all workers of a model (`?model=`), for one, and for those of a named cohort.
_SCOPES: Final = ("", "/workers/<id>", "/cohorts/<cohort>")
_LOAD: Final = "/v1/load_lora_adapter"
#: By the path after `/engine/`.
_OPERATIONS: Final[Mapping[str, Operation]] = {
    **{f"control/{name}": operation for name, operation in CONTROLS.items()},
    **{f"update/{name}": operation for name, operation in (UPDATES | LORAS).items()},
    **OF_PYTHON,
}
#: What a worker must be able to do for an operation; the others are always there.
_NEEDS: Final[Mapping[str, Callable[[Worker], bool]]] = {
    **dict.fromkeys(("control/sleep", "control/wake_up"), lambda worker: bool(worker.info and worker.info.supports_sleep)),
    **dict.fromkeys(
        (f"update/{name}" for name in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")),
        lambda worker: bool(worker.info and worker.info.weight_transfer_backend),
    ),
    "update/start_draft_weight_update": lambda worker: bool(worker.info and worker.info.supports_draft_updates),
    **dict.fromkeys((f"update/{name}" for name in LORAS), lambda worker: bool(worker.info and worker.info.supports_lora)),
    # Methods of the engine are called over HTTP only.
    **dict.fromkeys(
        ("flush_cache", "init_weights_update_group", "update_weights_from_disk", "update_weights_from_distributed"),
        lambda worker: worker.http is not None,
    ),
}


class EngineRoutes:
    """The handlers; each operation is another route's, asked in the same scope."""

    def __init__(self, routes: Routes, administration: Administration) -> None:
        self._routes = routes
        self._administration = administration

    def add_to(self, routes: Routes) -> None:
        """Serve them."""
        for scope in _SCOPES:
            routes.add("POST", f"{scope}/engine/<name>", self.operate)
            routes.add("POST", f"{scope}/engine/<kind>/<name>", self.operate)
        # Adapters are loaded everywhere, whichever worker is asked.
        routes.add("POST", "/v1/loras", self.load_lora)
        routes.add("POST", "/workers/<id>/v1/loras", self.load_lora)

    def routes_of(self, workers: Sequence[Worker]) -> list[str]:
        """The operations that all of these workers can do, sorted."""
        return sorted(name for name in _OPERATIONS if self._can(name, workers))

    async def operate(self, request: HTTPRequest) -> HTTPReply:
        """One operation. Cancellation: what was asked for is done all the same."""
        name = "/".join(filter(None, (request.parameters.get("kind"), request.parameters["name"])))
        asking = Asking(self._routes, self._administration, request, request.path.removesuffix(f"/engine/{name}"))
        try:
            workers = asking.workers()
        except NotFound as error:
            return _reply(404, error="Route not found", message=error.message)
        except CallError as error:
            return _failed(error.message)
        if not self._can(name, workers):
            known = ", ".join(self.routes_of(workers))
            return _reply(404, error="Route not found", message=f"/engine/{name}: these workers can {known}")
        return await self._operate(_OPERATIONS[name], asking, of_update=name.startswith("update/"))

    async def load_lora(self, request: HTTPRequest) -> HTTPReply:
        """Load an adapter everywhere."""
        if not self._serves_adapters:
            return _reply(404, error="Route not found", message="plugin 'lora' is not loaded")
        asking = Asking(self._routes, self._administration, request, "")
        try:
            asking.workers()
        except NotFound as error:
            return _reply(404, error="Route not found", message=error.message)
        except CallError as error:
            return _failed(error.message)
        return await self._operate(load_lora, asking, of_update=True)

    async def _operate(self, operation: Operation, asking: Asking, *, of_update: bool) -> HTTPReply:
        try:
            body = msgspec.json.decode(asking.request.body) if asking.request.body.strip() else {}
        except (msgspec.MsgspecError, RecursionError) as error:
            return _reply(400, error="Invalid JSON", message=str(error))
        if not isinstance(body, dict):
            return _failed("the body must be an object")
        try:
            return HTTPReply.json(await operation(asking, body))
        except LoraFailed as failed:
            return HTTPReply.json(failed.body, failed.status)
        except Refused as refused:  # before a worker has heard of it
            return _reply(500, error="Handler error", message=str(refused)) if of_update else _failed(str(refused))
        except CallError as error:
            return _reply(500, error="Handler error", message=error.message)

    def _can(self, name: str, workers: Sequence[Worker]) -> bool:
        if name not in _OPERATIONS or (name.removeprefix("update/") in LORAS and not self._serves_adapters):
            return False
        needed = _NEEDS.get(name)
        return needed is None or all(needed(worker) for worker in workers)

    @cached_property
    def _serves_adapters(self) -> bool:
        """For after every plugin has added its routes."""
        return self._routes.is_served("POST", _LOAD)


def _reply(status: int, **body: str) -> HTTPReply:
    return HTTPReply.json(body, status)


def _failed(message: str) -> HTTPReply:
    """Much of what fails is a 200 for Dynamo."""
    return HTTPReply.json({"status": "error", "message": message})
