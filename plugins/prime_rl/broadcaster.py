"""`init_broadcaster`: the workers join the trainer's group, each at its own place.

The trainer takes headrace for one server with all the ranks that it counts, and sends the offset 0. A method of Prime-RL's worker extension
does the joining, so it goes to the workers by `/collective_rpc`; some versions of the trainer post that themselves.
"""

from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType, structs

from core import Administration, BadRequest, CallError, Cohort, HTTPReply, HTTPRequest, Routes, Worker, refusing, whom

METHOD: Final = "init_broadcaster"
_ROUTE: Final = f"/{METHOD}"
#: Where the method's arguments stand when they have no names.
_POSITIONS: Final = {"rank_offset": 2, "inference_world_size": 3}


class InitBody(Struct, forbid_unknown_fields=True):
    """Body of the route, in all forms that are known: the NCCL one, with `session_id` NIXL's, with `engine_world_size` that of Dynamo's.

    What is there are the arguments of the method.
    """

    host: str
    port: int
    rank_offset: int | UnsetType = UNSET
    inference_world_size: int | UnsetType = UNSET
    #: In seconds, for the trainer to come.
    timeout: int | float | UnsetType = UNSET
    quantize_in_weight_transfer: bool | UnsetType = UNSET
    session_id: str | UnsetType = UNSET
    engine_world_size: int | UnsetType = UNSET


class Broadcaster:
    """The route; and what became of it, for the update that follows."""

    def __init__(self, routes: Routes, administration: Administration) -> None:
        self._routes = routes
        self._administration = administration
        #: In words, by worker, the latest last; a 404, of engines that have no such method, is a trainer that does without.
        self._failed: dict[str, str] = {}

    async def init(self, request: HTTPRequest) -> HTTPReply:
        """Let the workers join: all, or the one that the path names. A 404 says that the engines have no such method.

        Cancellation: they join all the same.
        Raises: `BadRequest`; `CallError` unless every worker has joined.
        """
        workers = whom(self._administration, request)
        try:
            asked = structs.replace(request, path=request.path.removesuffix(_ROUTE) + "/collective_rpc", body=_rpc(request.body))
            await self._routes.ask(asked)
        except CallError as error:
            self._forget(workers)
            if error.status != HTTPStatus.NOT_FOUND:
                self._failed |= {worker.id: f"{request.path} has failed: {error.message}" for worker in workers}
            raise
        self._forget(workers)
        return HTTPReply.json({"status": "ok"})

    def demand_joined(self, workers: Iterable[Worker]) -> None:
        """Refuse an update of these workers, once, after a joining that has failed on one of them.

        Prime-RL looks at no error of that route, and would wait for the workers for ever; at those of an update it looks.
        Raises: `CallError` (409).
        """
        if told := self._forget(workers):
            raise CallError(HTTPStatus.CONFLICT, f"the trainer's group is incomplete: {told[-1]}")

    def _forget(self, workers: Iterable[Worker]) -> list[str]:
        """What has failed on these workers, the latest last."""
        ids = {worker.id for worker in workers}
        failed = [id_ for id_ in self._failed if id_ in ids]
        return [self._failed.pop(id_) for id_ in failed]


def number(body: Mapping[str, Any], cohort: Cohort, index: int) -> Mapping[str, Any] | None:
    """What a member of the cohort gets of an `init_broadcaster` for all; `None` for other methods.

    Raises: `BadRequest` when the trainer counts other ranks than the cohort has.
    """
    if body["method"] != METHOD:
        return None
    args, kwargs = list(body.get("args", ())), dict(body.get("kwargs", {}))
    places: list[tuple[Any, Any]] = [(args, at) if len(args) > at else (kwargs, name) for name, at in _POSITIONS.items()]
    offset, size = (where.get(key) if where is kwargs else where[key] for where, key in places)
    if offset is None and size is None:  # a version of the method that counts nobody
        return body
    if offset != 0:
        text = f"it is 0 for the whole fleet, and not {offset!r}; who numbers the workers speaks to each (/workers/<id>)"
        raise BadRequest(f"rank_offset: {text}", param="rank_offset")
    if size != cohort.ranks or isinstance(size, bool):
        each = ", ".join(f"{member.id} {member.ranks}" for member in cohort.members)
        text = f"the trainer counts {size!r} ranks, and the fleet has {cohort.ranks} ({each}): some would wait for others for ever"
        raise BadRequest(f"inference_world_size: {text}", param="inference_world_size")
    member = cohort.members[index]
    where, key = places[0]
    where[key] = member.offset
    if "engine_world_size" in kwargs:
        kwargs["engine_world_size"] = member.ranks
    return {**body, "args": args, "kwargs": kwargs}


def _rpc(body: bytes) -> bytes:
    with refusing("", InitBody):
        arguments = msgspec.json.decode(body, type=InitBody)
    return msgspec.json.encode({"method": METHOD, "kwargs": arguments})
