"""The administration of one vLLM server, for the whole fleet: `/pause`, `/update_weights`, … with vLLM's parameters and replies.

Under `/workers/<id>` the same routes reach one worker alone, and under `/cohorts/<cohort>` the members of a named cohort. A 2xx means that
every worker has done it; anything else names each that hasn't. Where the fleet serves several models, `?model=` says which one is meant.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Final, cast, get_args

import msgspec
from msgspec import Meta, Struct

from core.errors import BadRequest, CallError
from core.fleet.administration import Administration
from core.fleet.cohort import Cohort
from core.fleet.control import PauseMode
from core.fleet.methods import REPLACING
from core.fleet.worker import Worker
from core.northbound.asking import demand_known, demand_no_body, demand_printable, read_body, who, whom
from core.registry import Registry
from core.routes import HTTPReply, HTTPRequest, Method, Routes

#: What of a worker wakes up (vLLM 0.33).
_TAGS: Final = ("weights", "kv_cache", "scheduling")
_Name = Annotated[str, Meta(pattern=r"\S", max_length=1000)]


class InitBody(Struct, forbid_unknown_fields=True):
    """Body of `/init_weight_transfer_engine`."""

    init_info: dict[str, Any]


class UpdateBody(Struct, forbid_unknown_fields=True):
    """Body of `/update_weights`: one object for all ranks, or a list with one for each rank of the fleet."""

    update_info: dict[str, Any] | list[dict[str, Any] | None]


class FinishBody(Struct, forbid_unknown_fields=True):
    """Body of `/finish_weight_update`; it may be missing."""

    weight_version: _Name | None = None


class LabelBody(Struct, forbid_unknown_fields=True):
    """Body of `/update_weight_version`."""

    new_version: _Name


class RpcBody(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Body of `/collective_rpc`. `timeout`, in seconds, is the workers' affair."""

    method: _Name
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


class ReasonBody(Struct, forbid_unknown_fields=True):
    """Body of `/fleet/workers/<id>/quarantine` and its likes; it may be missing, or stand in the query."""

    reason: Annotated[str, Meta(max_length=1000)] = ""


class AbortBody(Struct, forbid_unknown_fields=True):
    """Body of `/abort_requests`: without ids it means all calls, as vLLM has it."""

    request_ids: list[str] = []


def add_administration_routes(routes: Routes, administration: Administration, registry: Registry) -> None:
    """Serve them."""
    handlers = _Handlers(administration, registry)
    for route in handlers.table():
        for scope in ("", "/workers/<id>", "/cohorts/<cohort>"):
            routes.add(route.method, f"{scope}{route.path}", route.answer)
    routes.add("POST", "/fleet/workers/<id>/quarantine", handlers.quarantine)
    routes.add("POST", "/fleet/workers/<id>/drain", handlers.drain)
    routes.add("POST", "/fleet/workers/<id>/release", handlers.release)


class _Route(Struct, frozen=True):
    """One of vLLM's routes. `model` may be in the query of each; what it takes besides is refused when it isn't named here."""

    method: Method
    path: str
    handler: Callable[[HTTPRequest], Awaitable[HTTPReply]]
    query: tuple[str, ...] = ()
    #: What may be in the query several times.
    lists: tuple[str, ...] = ()
    body: bool = False

    async def answer(self, request: HTTPRequest) -> HTTPReply:
        demand_known(request, ("model", *self.query, *self.lists), lists=self.lists)
        if not self.body:
            demand_no_body(request)
        return await self.handler(request)


class _Handlers:
    def __init__(self, administration: Administration, registry: Registry) -> None:
        self._administration = administration
        self._registry = registry

    def table(self) -> Sequence[_Route]:
        return (
            _Route("POST", "/pause", self.pause, ("mode", "clear_cache")),
            _Route("POST", "/resume", self.resume),
            _Route("GET", "/is_paused", self.is_paused),
            _Route("POST", "/sleep", self.sleep, ("level", "mode")),
            _Route("POST", "/wake_up", self.wake_up, lists=("tags",)),
            _Route("GET", "/is_sleeping", self.is_sleeping),
            _Route("POST", "/reset_prefix_cache", self.reset_prefix_cache, ("reset_running_requests", "reset_external")),
            _Route("POST", "/init_weight_transfer_engine", self.init_weight_transfer_engine, body=True),
            _Route("POST", "/start_weight_update", self.start_weight_update),
            _Route("POST", "/start_draft_weight_update", self.start_draft_weight_update),
            _Route("POST", "/update_weights", self.update_weights, body=True),
            _Route("POST", "/finish_weight_update", self.finish_weight_update, body=True),
            _Route("POST", "/update_weight_version", self.update_weight_version, body=True),
            _Route("GET", "/weight_info", self.weight_info),
            _Route("GET", "/get_world_size", self.get_world_size, ("include_dp",)),
            _Route("POST", "/collective_rpc", self.collective_rpc, body=True),
            _Route("POST", "/abort_requests", self.abort_requests, body=True),
            _Route("GET", "/server_info", self.server_info, ("config_format",)),
        )

    async def pause(self, request: HTTPRequest) -> HTTPReply:
        mode, clear_cache = _mode(request), _flag(request, "clear_cache", default=True)
        await self._administration.pausing.pause(self._workers(request), mode, clear_cache=clear_cache, by=who(request))
        return HTTPReply.json({"status": "paused"})

    async def resume(self, request: HTTPRequest) -> HTTPReply:
        await self._administration.pausing.resume(self._workers(request), by=who(request))
        return HTTPReply.json({"status": "resumed"})

    async def is_paused(self, request: HTTPRequest) -> HTTPReply:
        return HTTPReply.json({"is_paused": await self._administration.is_paused(self._workers(request))})

    async def sleep(self, request: HTTPRequest) -> HTTPReply:
        level = request.query.get("level", "1")
        if level not in {"0", "1", "2"}:
            raise BadRequest(f"level: {level!r} is none; there are 0, 1 and 2", param="level")
        await self._administration.pausing.sleep(self._workers(request), int(level), _mode(request), by=who(request))
        return HTTPReply.json({"status": "sleeping", "level": int(level)})

    async def wake_up(self, request: HTTPRequest) -> HTTPReply:
        tags = request.repeated.get("tags", [])
        if (unknown := next((tag for tag in tags if tag not in _TAGS), None)) is not None:
            raise BadRequest(f"tags: {unknown!r} is none; there are {', '.join(_TAGS)}", param="tags")
        woken = await self._administration.pausing.wake_up(self._workers(request), tags, by=who(request))
        asleep = {"asleep": woken.asleep} if woken.asleep else {}
        return HTTPReply.json({"status": "awake" if woken.awake else "sleeping", "tags": tags or None, **asleep})

    async def is_sleeping(self, request: HTTPRequest) -> HTTPReply:
        answers = await self._administration.read("is_sleeping", self._workers(request), lambda control: control.is_sleeping())
        return HTTPReply.json({"is_sleeping": all(answers)})

    async def reset_prefix_cache(self, request: HTTPRequest) -> HTTPReply:
        query = {name: str(_flag(request, name, default=False)).lower() for name in ("reset_running_requests", "reset_external")}
        query = {name: value for name, value in query.items() if name in request.query}
        workers, same = self._workers(request), " ".join(f"{name}={value}" for name, value in query.items())
        done = await self._administration.do(
            "reset_prefix_cache", workers, lambda control: control.reset_prefix_cache(query), by=who(request), same=same
        )
        return HTTPReply.json({"success": all(done)})

    async def init_weight_transfer_engine(self, request: HTTPRequest) -> HTTPReply:
        """A trainer that speaks to a worker by itself (`/workers/<id>`) numbers the ranks by itself, too."""
        info = read_body(request, InitBody).init_info
        numbered = _as_it_is(info) if "id" in request.parameters else _numbered(info)
        await self._administration.joining.join(self._workers(request, update=True), numbered, by=who(request))
        return HTTPReply.json({"message": "Weight transfer initialized"})

    async def start_weight_update(self, request: HTTPRequest) -> HTTPReply:
        await self._administration.updating.start(self._workers(request, update=True), by=who(request))
        return HTTPReply.json({"message": "Weight update started"})

    async def start_draft_weight_update(self, request: HTTPRequest) -> HTTPReply:
        await self._administration.updating.start(self._workers(request, update=True), by=who(request), draft=True)
        return HTTPReply.json({"message": "Draft weight update started"})

    async def update_weights(self, request: HTTPRequest) -> HTTPReply:
        """Receive weights; or what a plugin makes of another body."""
        try:
            info = read_body(request, UpdateBody).update_info
        except BadRequest:
            workers = self._workers(request, update=True)
            if (translated := self._translated(request, workers)) is None:
                raise
            version, body = translated.pop("weight_version", None), _rpc(translated)
            await self._administration.methods.call(workers, body, by=who(request), version=version)
            return HTTPReply.json({"status": "ok"})
        await self._administration.updating.receive(self._workers(request), info, by=who(request), alone="id" in request.parameters)
        return HTTPReply.json({"message": "Weights updated"})

    async def finish_weight_update(self, request: HTTPRequest) -> HTTPReply:
        version = read_body(request, FinishBody).weight_version if request.body.strip() else None
        demand_printable("weight_version", version)
        await self._administration.updating.finish(self._workers(request), version, by=who(request), alone="id" in request.parameters)
        return HTTPReply.json({"message": "Weight update finished"})

    async def update_weight_version(self, request: HTTPRequest) -> HTTPReply:
        version = read_body(request, LabelBody).new_version
        demand_printable("new_version", version)
        await self._administration.updating.label(self._workers(request), version, by=who(request))
        return HTTPReply.json({"success": True, "new_version": version})

    async def weight_info(self, request: HTTPRequest) -> HTTPReply:
        """One version, or a 409: quarantined workers take no calls, so theirs doesn't count while there are others."""
        workers = self._workers(request)
        workers = [worker for worker in workers if worker.state != "quarantined"] or workers
        versions = await self._administration.read("weight_info", workers, lambda control: control.policy_version())
        if len(set(versions)) > 1:
            told = ", ".join(f"{worker.id} has {version!r}" for worker, version in zip(workers, versions, strict=True))
            raise CallError(HTTPStatus.CONFLICT, f"weight_info: the workers' versions differ: {told}")
        return HTTPReply.json({"weight_version": versions[0]})

    async def get_world_size(self, request: HTTPRequest) -> HTTPReply:
        replicas = _flag(request, "include_dp", default=True)
        workers = self._workers(request)
        ranks = [worker.world_size if replicas else worker.info.world_size for worker in workers if worker.info]
        return HTTPReply.json({"world_size": sum(ranks)})

    async def collective_rpc(self, request: HTTPRequest) -> HTTPReply:
        """Call a method everywhere. One with which the workers join a trainer's group is numbered, as `init_weight_transfer_engine`."""
        body: dict[str, Any] = msgspec.to_builtins(read_body(request, RpcBody))
        workers = self._workers(request, update=body["method"] in REPLACING)
        if "id" not in request.parameters and (numbered := self._numbered(body, workers)):
            self._workers(request, update=True)
            results = await self._administration.joining.join_by_method(workers, numbered, by=who(request))
        else:
            results = await self._administration.methods.call(workers, body, by=who(request))
        return HTTPReply.json({"results": results})

    async def abort_requests(self, request: HTTPRequest) -> HTTPReply:
        """Ids that a worker doesn't know are fine: nobody but it knows its calls. Those that wait at the gate are no worker's."""
        ids = read_body(request, AbortBody).request_ids
        workers, aborts = self._workers(request), self._administration.aborts
        if not ids:
            if not request.parameters:
                aborts.end_all_waiting({name for worker in workers for name in worker.models} if "model" in request.query else None)
            await self._administration.read("abort_requests", workers, lambda control: control.abort_all())
            return HTTPReply()
        if not request.parameters:
            aborts.end_waiting(ids)
        known = aborts.known_as(ids)
        await self._administration.read("abort_requests", workers, lambda control: control.abort(known))
        return HTTPReply()

    async def server_info(self, request: HTTPRequest) -> HTTPReply:
        """The first worker's, and under `workers` each one's."""
        workers = self._workers(request)
        query = {"config_format": request.query["config_format"]} if "config_format" in request.query else {}
        infos: list[Any] = await self._administration.read("server_info", workers, lambda control: control.server_info(query))
        each = {worker.id: info for worker, info in zip(workers, infos, strict=True)}
        first = cast("dict[str, Any]", infos[0]) if isinstance(infos[0], dict) else {}
        return HTTPReply.json({**first, "workers": each})

    async def quarantine(self, request: HTTPRequest) -> HTTPReply:
        reason, [worker] = _reason(request), self._workers(request)
        self._administration.quarantine(worker, reason, by=who(request))
        return HTTPReply.json(worker.describe())

    async def drain(self, request: HTTPRequest) -> HTTPReply:
        reason, [worker] = _reason(request), self._workers(request)
        self._administration.drain(worker, reason, by=who(request))
        return HTTPReply.json(worker.describe())

    async def release(self, request: HTTPRequest) -> HTTPReply:
        reason, [worker] = _reason(request), self._workers(request)
        await self._administration.release(worker, reason, by=who(request))
        return HTTPReply.json(worker.describe())

    def _translated(self, request: HTTPRequest, workers: Sequence[Worker]) -> dict[str, Any] | None:
        """The `/collective_rpc` that a body of `/update_weights` stands for, should a plugin know."""
        body = request.json()
        if not isinstance(body, dict):
            return None
        return dict(self._registry.call("translate_weight_update", body=body, workers=workers) or ()) or None

    def _numbered(self, body: Mapping[str, Any], workers: Sequence[Worker]) -> list[Mapping[str, Any]]:
        """What each worker gets of a method that joins a group; nothing for one that doesn't."""
        cohort = Cohort.of(workers)
        numbered = [self._registry.call("number_ranks", body=body, cohort=cohort, index=index) for index in range(len(workers))]
        return numbered if all(numbered) else []

    def _workers(self, request: HTTPRequest, *, update: bool = False) -> list[Worker]:
        return whom(self._administration, request, update=update)


def _as_it_is(info: Mapping[str, Any]) -> Callable[[Cohort, int], Mapping[str, Any]]:
    return lambda cohort, index: info  # noqa: ARG005 - nobody's place matters


def _numbered(info: Mapping[str, Any]) -> Callable[[Cohort, int], Mapping[str, Any]]:
    """Each worker's own place in the trainer's group, for transports that have places.

    The trainer numbers the fleet as if it were one server: its own ranks come first, and `rank_offset` says how many they are.
    """
    if "rank_offset" not in info:
        return _as_it_is(info)
    offset, size = info["rank_offset"], info.get("world_size")
    if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
        raise BadRequest("init_info.rank_offset: it is the number of the trainer's own ranks", param="init_info.rank_offset")

    def number(cohort: Cohort, index: int) -> Mapping[str, Any]:
        whole = offset + cohort.ranks
        if size != whole:
            text = f"the trainer's {offset} ranks and the fleet's {cohort.ranks} make {whole} (GET /get_world_size), and not {size}"
            raise BadRequest(f"init_info.world_size: {text}: some would wait for others for ever", param="init_info.world_size")
        return {**info, "rank_offset": offset + cohort.members[index].base, "world_size": whole}

    return number


def _rpc(body: Mapping[str, Any]) -> dict[str, Any]:
    return msgspec.to_builtins(msgspec.convert(body, RpcBody))


def _reason(request: HTTPRequest) -> str:
    """Why somebody does it, from the body or from the query; empty when that isn't said. Raises: `BadRequest`."""
    demand_known(request, ("reason",))
    said = read_body(request, ReasonBody).reason if request.body.strip() else ""
    return said.strip() or request.query.get("reason", "").strip()[:1000]


def _mode(request: HTTPRequest) -> PauseMode:
    mode = request.query.get("mode", "abort")
    if mode not in get_args(PauseMode):
        raise BadRequest(f"mode: {mode!r} is none; there are abort, wait and keep", param="mode")
    return cast("PauseMode", mode)


def _flag(request: HTTPRequest, name: str, *, default: bool) -> bool:
    value = request.query.get(name, str(default)).lower()
    if value not in {"true", "false"}:
        raise BadRequest(f"{name}: {value!r} is neither true nor false", param=name)
    return value == "true"
