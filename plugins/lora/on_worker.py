"""The adapters of one worker, over whichever of its wires can say it.

vLLM's gRPC first: it is always open. Its HTTP routes when the worker has no gRPC, and where gRPC falls short: it has no flag for 3-D
weights, and refuses folders unless `VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES` of the worker names them, a rule that not every HTTP server
has. They are open only under `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`.
"""

import re
from http import HTTPStatus
from typing import Any, Final

import httpx
import msgspec
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from core import Worker
from core.wire.generated.vllm import ControlStub, ListLorasRequest, LoadLoraRequest, UnloadLoraRequest
from plugins.lora.source import Source

_MISSING: Final = re.compile(r"must exist|No such file", re.IGNORECASE)
_TAKEN: Final = re.compile(r"already (been )?loaded", re.IGNORECASE)
_PREFIXES: Final = re.compile(r"prefix|VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES", re.IGNORECASE)
_CLOSED: Final = "its HTTP server has no open {}: start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"


class WorkerFailed(Exception):
    """A worker didn't do it. `status` is what a client may be told: 404 its files aren't there, 400 it never will, 500 it may.

    `certain`: nothing has changed there.
    """

    def __init__(self, reason: str, *, status: int = 500, certain: bool = False) -> None:
        super().__init__(reason)
        self.status = status
        self.certain = certain


async def load(worker: Worker, name: str, source: Source) -> None:
    """Load an adapter. An adapter of that name that has the same path is as good.

    Cancellation: what the worker has heard of, it may do all the same.
    Raises: `WorkerFailed`.
    """
    try:
        if worker.control and not (source.is_3d and worker.http):
            await _load_over_grpc(worker, worker.control, name, source)
        else:
            await _load_over_http(worker, name, source)
    except _Taken as taken:
        if (await held(worker)).get(name) != source.path:
            raise WorkerFailed(str(taken), certain=True) from taken


async def unload(worker: Worker, name: str) -> None:
    """Unload an adapter; one that isn't there is unloaded. Raises and is cancelled as `load`."""
    if worker.control:
        try:
            await worker.control.unload_lora(UnloadLoraRequest(lora_name=name))
        except GRPCError as error:
            if error.status is not Status.NOT_FOUND:
                raise _failed(worker, error) from error
        return
    response = await _post(worker, "/v1/unload_lora_adapter", {"lora_name": name})
    if response.status_code == HTTPStatus.NOT_FOUND and response.content:
        return
    _check(response)


async def held(worker: Worker) -> dict[str, str]:
    """The adapters that the worker has loaded, with their paths. Raises: `WorkerFailed`. Cancellation: safe."""
    if worker.control:
        try:
            reply = await worker.control.list_loras(ListLorasRequest())
        except GRPCError as error:
            raise _failed(worker, error) from error
        return {adapter.lora_name: adapter.source_path for adapter in reply.adapters}
    try:
        response = await _client(worker).get("/v1/models")
        cards = msgspec.json.decode(response.content, type=_Cards).data
    except httpx.HTTPError as error:
        raise _unreachable(worker, error) from error
    except msgspec.MsgspecError as error:
        raise WorkerFailed(f"/v1/models answers what can't be read: {error}") from error
    return {card.id: card.root or "" for card in cards if card.parent}


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card] = []


class _Taken(Exception):
    """The worker has an adapter of that name."""


async def _load_over_grpc(worker: Worker, control: ControlStub, name: str, source: Source) -> None:
    if source.is_3d:
        raise WorkerFailed("is_3d_lora_weight: gRPC can't say it, and the worker has no HTTP server", status=400, certain=True)
    try:
        await control.load_lora(LoadLoraRequest(lora_name=name, source_path=source.path))
    except GRPCError as error:
        failure = _failed(worker, error)
        if error.status is Status.ALREADY_EXISTS:
            raise _Taken(str(failure)) from error
        if worker.http and error.status is Status.INVALID_ARGUMENT and _PREFIXES.search(error.message or ""):
            await _load_over_http(worker, name, source, otherwise=failure)
            return
        raise failure from error


async def _load_over_http(worker: Worker, name: str, source: Source, *, otherwise: WorkerFailed | None = None) -> None:
    body = {"lora_name": name, "lora_path": source.path, **({"is_3d_lora_weight": True} if source.is_3d else {})}
    response = await _post(worker, "/v1/load_lora_adapter", body)
    if otherwise and _is_closed(response):
        raise otherwise
    if response.status_code == HTTPStatus.BAD_REQUEST and _TAKEN.search(response.text):
        raise _Taken(_text(response))
    _check(response)


async def _post(worker: Worker, path: str, body: dict[str, Any]) -> httpx.Response:
    try:
        return await _client(worker).post(path, json=body)
    except httpx.HTTPError as error:
        raise _unreachable(worker, error) from error


def _client(worker: Worker) -> httpx.AsyncClient:
    assert worker.http is not None  # a worker has at least one wire
    return worker.http


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    if _is_closed(response):
        raise WorkerFailed(_CLOSED.format(response.request.url.path), status=400, certain=True)
    raise _refused(_text(response), by_request=response.status_code == HTTPStatus.BAD_REQUEST)


def _is_closed(response: httpx.Response) -> bool:
    """The route isn't there. vLLM's own 404s have an error's body; those of no route have none, or FastAPI's."""
    return response.status_code in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED) and b'"error"' not in response.content


def _text(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return response.text[:500] or f"{response.request.url.path} answers {response.status_code}"


def _failed(worker: Worker, error: GRPCError) -> WorkerFailed:
    message = error.message or error.status.name
    if error.status is Status.UNAVAILABLE:
        worker.suspect()
        return WorkerFailed(message)
    definite = error.status in (Status.INVALID_ARGUMENT, Status.FAILED_PRECONDITION, Status.UNIMPLEMENTED)
    return _refused(message, by_request=definite)


def _refused(message: str, *, by_request: bool) -> WorkerFailed:
    if by_request and _MISSING.search(message):
        return WorkerFailed(message, status=HTTPStatus.NOT_FOUND, certain=True)
    return WorkerFailed(message, status=HTTPStatus.BAD_REQUEST if by_request else HTTPStatus.INTERNAL_SERVER_ERROR, certain=by_request)


def _unreachable(worker: Worker, error: httpx.HTTPError) -> WorkerFailed:
    worker.suspect()
    return WorkerFailed(str(error) or type(error).__name__)
