"""The administration of one worker: what vLLM offers on `vllm.Control` and on its development routes, in one place.

gRPC is asked where it has the operation, the HTTP server (`VLLM_SERVER_DEV_MODE=1`) for the rest: `collective_rpc`,
`reset_prefix_cache`, `server_info`, an abort of all calls, and updates in list form. Nothing here has a time-out: a pause that waits lasts
as long as the longest call, and a collective operation until everybody has joined. Who calls has a deadline, or a reason to have none.
"""

import re
from collections.abc import Awaitable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Literal, TypeVar

import httpx
import msgspec
import structlog
from grpclib.exceptions import GRPCError

from core.errors import CallError, from_grpc, from_http
from core.fleet.worker import Worker
from core.wire.generated.vllm import (
    AbortRequest,
    FinishWeightUpdateRequest,
    GetServerInfoRequest,
    GetWeightVersionRequest,
    InitWeightTransferEngineRequest,
    IsPausedRequest,
    IsSleepingRequest,
    PauseGenerationRequest,
    ResumeGenerationRequest,
    SleepRequest,
    StartDraftWeightUpdateRequest,
    StartWeightUpdateRequest,
    UpdateWeightsRequest,
    UpdateWeightVersionRequest,
    WakeUpRequest,
)
from core.wire.generated.vllm import (
    PauseMode as WirePauseMode,
)
from core.wire.http_errors import describe, key_refused

T = TypeVar("T")
log = structlog.stdlib.get_logger()

#: What becomes of calls in flight: `abort` ends them, `wait` lets them finish first, `keep` freezes them.
PauseMode = Literal["abort", "wait", "keep"]

_PAUSE_MODES: Mapping[PauseMode, WirePauseMode] = {
    "abort": WirePauseMode.ABORT,
    "wait": WirePauseMode.WAIT,
    "keep": WirePauseMode.KEEP,
}


class ControlFailed(CallError):
    """A worker refused an operation, failed in it, or doesn't offer it. The text names the worker and the operation."""

    def __init__(self, worker: str, operation: str, cause: CallError) -> None:
        super().__init__(cause.status, f"worker {worker!r}: {operation}: {cause.message}", param=cause.param)
        self.worker = worker
        self.operation = operation
        #: Without the names.
        self.reason = cause.message


class WorkerControl:
    """Operations on one worker. Each raises `ControlFailed`; none is retried.

    Cancellation: the worker may or may not have done it. Whoever can't live with that shields the call.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        #: How many operations the worker has answered; none that changes anything failed half-way when it is 0.
        self.answered = 0

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pause the engine; returns when it is idle. vLLM 0.33: `clear_cache` empties the caches in every mode."""
        if control := self.worker.control:
            request = PauseGenerationRequest(mode=_PAUSE_MODES[mode], clear_cache=clear_cache)
            await self._rpc("pause", control.pause_generation(request))
        else:
            await self._post("pause", "/pause", query={"mode": mode, "clear_cache": _word(clear_cache)})

    async def resume(self) -> None:
        """Resume the engine; nothing happens when it isn't paused."""
        if control := self.worker.control:
            await self._rpc("resume", control.resume_generation(ResumeGenerationRequest()))
        else:
            await self._post("resume", "/resume")

    async def is_paused(self) -> bool:
        """Whether the engine is paused."""
        if control := self.worker.control:
            return (await self._rpc("is_paused", control.is_paused(IsPausedRequest()))).paused
        return await self._value(self._get("is_paused", "/is_paused"), "is_paused", bool)

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Give memory back. Level 0 only pauses, 1 moves the weights to the CPU, 2 drops them: they have to be loaded again."""
        if control := self.worker.control:
            await self._rpc("sleep", control.sleep(SleepRequest(level=level, mode=_PAUSE_MODES[mode])))
        else:
            await self._post("sleep", "/sleep", query={"level": str(level), "mode": mode})

    async def wake_up(self, tags: Sequence[str]) -> None:
        """Take memory again: `weights`, `kv_cache`, `scheduling`; no tags for all of it."""
        if control := self.worker.control:
            await self._rpc("wake_up", control.wake_up(WakeUpRequest(tags=list(tags))))
        else:
            await self._post("wake_up", "/wake_up", query={"tags": list(tags)})

    async def is_sleeping(self) -> bool:
        """Whether the engine sleeps (vLLM 0.33: true also while it is only paused)."""
        if control := self.worker.control:
            return (await self._rpc("is_sleeping", control.is_sleeping(IsSleepingRequest()))).sleeping
        return await self._value(self._get("is_sleeping", "/is_sleeping"), "is_sleeping", bool)

    async def init_weight_transfer(self, init_info: Mapping[str, Any]) -> None:
        """Join a trainer's group; returns when everybody has."""
        if control := self.worker.control:
            request = InitWeightTransferEngineRequest(init_info_json=msgspec.json.encode(init_info))
            await self._rpc("init_weight_transfer_engine", control.init_weight_transfer_engine(request))
        else:
            await self._post("init_weight_transfer_engine", "/init_weight_transfer_engine", body={"init_info": init_info})

    async def start_weight_update(self, *, draft: bool = False) -> None:
        """Make ready for new weights. From here on a forward pass kills the engine until `finish` has succeeded (vLLM 0.33)."""
        name = "start_draft_weight_update" if draft else "start_weight_update"
        if control := self.worker.control:
            if draft:
                await self._rpc(name, control.start_draft_weight_update(StartDraftWeightUpdateRequest()))
            else:
                await self._rpc(name, control.start_weight_update(StartWeightUpdateRequest()))
        else:
            await self._post(name, f"/{name}")

    async def update_weights(self, update_info: Mapping[str, Any] | Sequence[Any]) -> None:
        """Receive weights; the list form has an element per rank and goes over HTTP only."""
        if (control := self.worker.control) and isinstance(update_info, Mapping):
            request = UpdateWeightsRequest(update_info_json=msgspec.json.encode(update_info))
            await self._rpc("update_weights", control.update_weights(request))
        else:
            await self._post("update_weights", "/update_weights", body={"update_info": update_info})

    async def finish_weight_update(self, version: str | None) -> None:
        """The weights are complete; the worker then labels them with the version, if there is one."""
        if control := self.worker.control:
            await self._rpc("finish_weight_update", control.finish_weight_update(FinishWeightUpdateRequest(weight_version=version)))
        else:
            body = {} if version is None else {"weight_version": version}
            await self._post("finish_weight_update", "/finish_weight_update", body=body)

    async def clear_update(self, *, draft: bool = False) -> None:
        """Take away what an update that broke off has left: an empty one does, and touches nothing else (vLLM 0.31 takes what is in an
        incomplete layer for a part of the next one otherwise, which then fails, or is wrong).
        """
        await self.start_weight_update(draft=draft)
        await self.finish_weight_update(None)

    async def clear_reload(self) -> None:
        """The same, for workers that load their weights by a method: a load of nothing. HTTP only."""
        await self.collective_rpc({"method": "reload_weights", "kwargs": {"weights_iterator": []}})

    async def set_policy_version(self, version: str) -> None:
        """Label the weights that are there."""
        if control := self.worker.control:
            await self._rpc("update_weight_version", control.update_weight_version(UpdateWeightVersionRequest(weight_version=version)))
        else:
            await self._post("update_weight_version", "/update_weight_version", body={"new_version": version})

    async def policy_version(self) -> str:
        """The label of the weights that are there."""
        if control := self.worker.control:
            return (await self._rpc("weight_info", control.get_weight_version(GetWeightVersionRequest()))).weight_version
        return await self._value(self._get("weight_info", "/weight_info"), "weight_version", str)

    async def collective_rpc(self, body: Mapping[str, Any]) -> list[Any]:
        """Call a method of every rank: `{"method", "args", "kwargs", "timeout"}`; the results in rank order. HTTP only.

        Raises: `ControlFailed`, with a 404 when the engine has no such method, so that nothing was done.
        """
        method = str(body["method"])
        try:
            return await self._value(self._post(f"collective_rpc {method}", "/collective_rpc", body=body), "results", list[Any])
        except ControlFailed as failure:
            if re.search(f"no (attribute|method) '{re.escape(method)}'", failure.reason):
                raise ControlFailed(failure.worker, failure.operation, CallError(HTTPStatus.NOT_FOUND, failure.reason)) from failure
            raise

    async def reset_prefix_cache(self, query: Mapping[str, str] | None = None) -> bool:
        """Forget every cached prefix; false when the engine couldn't. HTTP only."""
        return await self._value(self._post("reset_prefix_cache", "/reset_prefix_cache", query=query), "success", bool)

    async def forget_encoded_media(self) -> None:
        """Drop what the model has made of pictures, videos and sounds with earlier weights. HTTP only.

        vLLM 0.31: when weights are loaded anew, its ranks drop that and its scheduler doesn't know; a call with the same picture then kills
        the engine. Weights that come by its own transfer leave what is outdated in use. Nothing is asked of a worker that can't have any,
        and one without the route (it isn't in development mode) keeps what it has, which is logged.
        """
        if not (self.worker.info and self.worker.info.supports_multimodal and self.worker.http):
            return
        try:
            await self._post("reset_encoder_cache", "/reset_encoder_cache")
        except ControlFailed as failure:
            if failure.status != HTTPStatus.NOT_IMPLEMENTED:
                raise
            log.warning("worker.encoded_media_kept", worker=self.worker.id, reason=failure.reason)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these calls; an empty list ends none, whatever a worker would make of it."""
        if not request_ids:
            return
        if control := self.worker.control:
            await self._rpc("abort_requests", control.abort(AbortRequest(request_ids=list(request_ids))))
        else:
            # To vLLM's Python server a call of the generate route has this before its id.
            both = [*request_ids, *(f"generate-tokens-{id_}" for id_ in request_ids)]
            await self._post("abort_requests", "/abort_requests", body={"request_ids": both})

    async def abort_all(self) -> None:
        """End all calls. HTTP only: over gRPC, no ids are no calls."""
        await self._post("abort_requests", "/abort_requests", body={"request_ids": []})

    async def server_info(self, query: Mapping[str, str] | None = None) -> Any:
        """What the worker's HTTP server tells of its configuration."""
        return await self._get("server_info", "/server_info", query=query)

    async def instance(self) -> str:
        """What tells this process from another one at its address, as it says now; empty when it doesn't (HTTP)."""
        if control := self.worker.control:
            return (await self._rpc("server_info", control.get_server_info(GetServerInfoRequest()))).instance_id
        return ""

    async def _rpc(self, operation: str, call: Awaitable[T]) -> T:
        try:
            with self.worker.administered():
                answer = await call
        except GRPCError as error:
            raise self._failed(operation, from_grpc(error)) from error
        self.answered += 1
        return answer

    async def _get(self, operation: str, path: str, *, query: Mapping[str, Any] | None = None) -> Any:
        return await self._http(operation, "GET", path, query, None)

    async def _post(self, operation: str, path: str, *, query: Mapping[str, Any] | None = None, body: Any = None) -> Any:
        return await self._http(operation, "POST", path, query, body)

    async def _http(self, operation: str, method: str, path: str, query: Mapping[str, Any] | None, body: Any) -> Any:
        http = self.worker.http
        if http is None:
            raise self._failed(operation, CallError(501, "only its HTTP server has this, and the settings name none (http)"))
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"content-type": "application/json"}
        try:
            with self.worker.administered():
                response = await http.request(method, path, params=query, content=content, headers=headers)
        except httpx.HTTPError as error:
            cause = CallError(HTTPStatus.SERVICE_UNAVAILABLE, f"its HTTP server can't be reached: {describe(error)}")
            raise self._failed(operation, cause) from error
        if response.status_code == HTTPStatus.NOT_FOUND and b'"error"' not in response.content:
            cause = CallError(501, f"its HTTP server has no {path}: start it with VLLM_SERVER_DEV_MODE=1")
            raise self._failed(operation, cause)
        if response.status_code == HTTPStatus.UNAUTHORIZED:
            raise self._failed(operation, CallError(HTTPStatus.BAD_GATEWAY, key_refused(http)))
        if not response.is_success:
            raise self._failed(operation, from_http(response.status_code, response.content))
        self.answered += 1
        if not response.content:
            return None
        try:
            return msgspec.json.decode(response.content)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise self._failed(operation, CallError(502, f"its answer is not JSON: {error}")) from error

    async def _value(self, answer: Awaitable[Any], key: str, type_: type[T]) -> T:
        """One member of an answer over HTTP."""
        value = await answer
        try:
            return msgspec.convert(value[key], type_)
        except (TypeError, LookupError, msgspec.ValidationError) as error:
            raise self._failed(key, CallError(502, f"its answer has no {key!r} as vLLM writes it")) from error

    def _failed(self, operation: str, cause: CallError) -> ControlFailed:
        if cause.status == HTTPStatus.SERVICE_UNAVAILABLE:
            self.worker.suspect()
        return ControlFailed(self.worker.id, operation, cause)


def _word(value: bool) -> str:
    return "true" if value else "false"
