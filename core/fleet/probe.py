"""Asking a worker how it is: who it is when it joins, and whether it is healthy, paused, and on which policy version, ever after."""

from http import HTTPStatus
from typing import Any, TypeVar, cast

import grpclib.client
import httpx
import msgspec
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from msgspec import Struct, field

from core.fleet.worker import WorkerInfo
from core.wire import Channel, ConnectionLost
from core.wire.generated.grpc.health.v1 import HealthCheckRequest, HealthCheckResponseServingStatus, HealthStub
from core.wire.generated.vllm import (
    ControlStub,
    GetModelInfoRequest,
    GetServerInfoRequest,
    GetWeightVersionRequest,
    IsPausedRequest,
    ParallelismInfo,
    RlCapabilities,
)
from core.wire.http_errors import describe, key_refused
from core.wire.http_lane import PATH
from core.wire.needs import PYTHON_HTTP_CAN, RUST_HTTP_CAN

T = TypeVar("T")


class ProbeFailed(Exception):
    """The worker isn't healthy, as far as one probe can tell. `certain`: it said so itself, or nobody listens there."""

    def __init__(self, reason: str, *, certain: bool) -> None:
        super().__init__(reason)
        self.certain = certain


class RouteClosed(Exception):
    """The worker's HTTP server takes no calls; the text says why."""


class Report(Struct, frozen=True):
    """What changes over a worker's life. `None` for the version: it doesn't tell."""

    paused: bool
    policy_version: str | None


class GrpcProbe:
    """Probes over gRPC. Every method raises `ProbeFailed`."""

    def __init__(self, channel: Channel) -> None:
        self._health = HealthStub(as_grpclib(channel))
        self._control = ControlStub(as_grpclib(channel))

    async def introduce(self) -> WorkerInfo:
        """Who the worker is."""
        try:
            server = await self._control.get_server_info(GetServerInfoRequest())
            model = await self._control.get_model_info(GetModelInfoRequest())
        except GRPCError as error:
            raise _failed(error) from error
        parallelism = server.parallelism or ParallelismInfo()
        rl = server.rl_capabilities or RlCapabilities()
        # An older server tells no local size and owns the whole group.
        local = parallelism.data_parallel_size_local or max(parallelism.data_parallel_size, 1)
        return WorkerInfo(
            models=(model.served_model_name, *model.served_model_aliases),
            model_id=model.model_id,
            max_model_len=server.max_model_len,
            engine_version=server.engine_version,
            instance_id=server.instance_id,
            world_size=max(parallelism.world_size, 1),
            ranks=tuple(range(parallelism.data_parallel_rank, parallelism.data_parallel_rank + local)),
            data_parallel_size=max(parallelism.data_parallel_size, 1),
            kv_block_size=server.kv_block_size,
            total_kv_blocks=server.total_kv_blocks,
            max_running_requests=server.max_running_requests,
            supports_lora=model.supports_lora,
            supports_multimodal=model.supports_multimodal,
            supports_sleep=rl.sleep_mode_enabled,
            supports_draft_updates=rl.draft_weight_updates_enabled,
            weight_transfer_backend=rl.weight_transfer_backend if rl.weight_transfer_enabled else "",
        )

    async def check(self) -> Report:
        """How the worker is.

        The health service alone isn't enough: it goes on saying SERVING when an engine that the server didn't start was killed. The
        other two are answered by the engine itself.
        """
        try:
            health = await self._health.check(HealthCheckRequest())
            if health.status != HealthCheckResponseServingStatus.SERVING:
                raise ProbeFailed("the worker says that it is not serving", certain=True)
            paused = await self._control.is_paused(IsPausedRequest())
            version = await self._control.get_weight_version(GetWeightVersionRequest())
        except GRPCError as error:
            raise _failed(error) from error
        return Report(paused.paused, version.weight_version)


class HttpProbe:
    """Probes over a worker's HTTP server, for workers without gRPC. Every method raises `ProbeFailed`."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def introduce(self) -> WorkerInfo:
        """Who the worker is, as far as its HTTP server tells."""
        cards = await self._get("/v1/models", _ModelCards)
        own = [card for card in cards.data if card.parent is None and card.max_model_len]
        if not own:
            raise ProbeFailed("/v1/models lists no model with a max_model_len", certain=False)
        ranks = await self._ranks()
        return WorkerInfo(
            models=tuple(card.id for card in own),
            model_id=own[0].root or own[0].id,
            max_model_len=own[0].max_model_len or 0,
            engine_version=(await self._get("/version", _Version)).version,
            # A development route, which counts all ranks: absent from a server that trains nothing.
            world_size=max((await self._get("/get_world_size", _WorldSize, optional=True)).world_size // len(ranks), 1),
            ranks=ranks,
        )

    async def check(self) -> Report:
        """How the worker is. Pause and version are development routes; without them it counts as running."""
        response = await self._send("/health")
        if response.status_code not in (HTTPStatus.OK, HTTPStatus.NOT_FOUND):
            raise ProbeFailed(f"/health answers {response.status_code}", certain=response.status_code == HTTPStatus.SERVICE_UNAVAILABLE)
        paused = await self._get("/is_paused", _Paused, optional=True)
        weights = await self._get("/weight_info", _Weights, optional=True)
        return Report(paused.is_paused, weights.weight_version)

    async def generate_can(self) -> frozenset[str]:
        """The needs that the generate route serves. Raises: `RouteClosed` when the server doesn't offer it, `ProbeFailed`."""
        try:
            # An empty prompt is refused where the route is open, before an engine hears of it.
            response = await self._client.post(PATH, json={"token_ids": [], "sampling_params": {}})
        except httpx.HTTPError as error:
            raise _unreachable(error) from error
        match response.status_code:
            case HTTPStatus.BAD_REQUEST | HTTPStatus.UNPROCESSABLE_ENTITY:
                pass
            case HTTPStatus.UNAUTHORIZED:
                raise RouteClosed(key_refused(self._client))
            case HTTPStatus.FORBIDDEN | HTTPStatus.NOT_FOUND:  # vLLM 0.33's Rust server and its Python one
                raise RouteClosed(f"its HTTP server doesn't offer {PATH}: start it with --enable-scale-out")
            case status:
                raise RouteClosed(f"its HTTP server answers {status} to {PATH}")
        return RUST_HTTP_CAN if (await self._get("/version", _Version)).rust_frontend_version else PYTHON_HTTP_CAN

    async def _ranks(self) -> tuple[int, ...]:
        """The data-parallel ranks: only those that publish KV events are named anywhere, and not how many others a group has elsewhere."""
        named = tuple(sorted(await self._get("/kv_event_sources", dict[int, Any], optional=True)))
        return named if named and named == tuple(range(len(named))) else (0,)

    async def _get(self, path: str, type_: type[T], *, optional: bool = False) -> T:
        response = await self._send(path)
        if response.status_code != HTTPStatus.OK:
            if optional:
                return type_()
            if response.status_code == HTTPStatus.UNAUTHORIZED:
                raise ProbeFailed(key_refused(self._client), certain=False)
            raise ProbeFailed(f"{path} answers {response.status_code}", certain=False)
        try:
            return msgspec.json.decode(response.content, type=type_)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ProbeFailed(f"{path} answers what can't be read: {error}", certain=False) from error

    async def _send(self, path: str) -> httpx.Response:
        try:
            return await self._client.get(path)
        except httpx.HTTPError as error:
            raise _unreachable(error) from error


def as_grpclib(channel: Channel) -> "grpclib.client.Channel":
    """Our channel has grpclib's interface without being one; this is for the type checker."""
    return cast("grpclib.client.Channel", channel)


class _ModelCard(Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _ModelCards(Struct):
    data: list[_ModelCard] = field(default_factory=list[_ModelCard])


class _Version(Struct):
    version: str = ""
    #: Only the Rust server has it.
    rust_frontend_version: str | None = None


class _WorldSize(Struct):
    world_size: int = 1


class _Paused(Struct):
    is_paused: bool = False


class _Weights(Struct):
    weight_version: str | None = None


def _failed(error: GRPCError) -> ProbeFailed:
    certain = isinstance(error, ConnectionLost) or error.status is Status.INTERNAL
    return ProbeFailed(error.message or error.status.name, certain=certain)


def _unreachable(error: httpx.HTTPError) -> ProbeFailed:
    return ProbeFailed(describe(error), certain=isinstance(error, httpx.ConnectError))
