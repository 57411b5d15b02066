"""Calls over a worker's HTTP server: `/inference/v1/generate`, for what gRPC can't carry and for workers without gRPC."""

import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any

import httpx
import msgspec
import trio

from core.call import Call
from core.errors import CallError, WorkerLost, from_http
from core.reply import Output
from core.wire.http_errors import describe, key_refused
from core.wire.http_lifting import lift_from_http
from core.wire.http_lowering import lower_to_http
from core.wire.needs import Wire

PATH = "/inference/v1/generate"
_EVENT = "data: "
_DONE = "[DONE]"
_END_SECONDS = 0.1


class HttpLane:
    """`core.wire.lane.Lane` over a client whose base URL is the worker's. `max_model_len` is the worker's, in tokens."""

    wire: Wire = "http"

    def __init__(self, client: httpx.AsyncClient, *, can: frozenset[str], max_model_len: int, rank: int | None = None) -> None:
        self._client = client
        self._max_model_len = max_model_len
        self._rank = rank
        self.can = can

    def at_rank(self, rank: int) -> "HttpLane":
        """See `Lane`."""
        return HttpLane(self._client, can=self.can, max_model_len=self._max_model_len, rank=rank)

    def lower(self, call: Call, index: int) -> dict[str, Any]:
        """See `Lane`."""
        return lower_to_http(call, index=index, max_model_len=self._max_model_len)

    async def generate(self, call: Call, request: dict[str, Any], index: int) -> Output:
        """See `Lane`."""
        try:
            response = await self._client.send(self._request(call, request))
        except httpx.HTTPError as error:
            raise _lost(error) from error
        if response.status_code != HTTPStatus.OK:
            raise self._refused(response.status_code, response.content)
        return lift_from_http(call, response.content, index)

    @asynccontextmanager
    async def stream(self, call: Call, request: dict[str, Any], index: int) -> AsyncGenerator["HttpOutputStream", None]:
        """See `Lane`."""
        try:
            response = await self._client.send(self._request(call, request), stream=True)
        except httpx.HTTPError as error:
            raise _lost(error) from error
        try:
            if response.status_code != HTTPStatus.OK:
                raise self._refused(response.status_code, await response.aread())
            source = HttpOutputStream(response, call, index)
            try:
                yield source
            finally:
                await source.aclose()
        finally:
            await response.aclose()

    def _refused(self, status: int, body: bytes) -> CallError:
        return WorkerLost(key_refused(self._client)) if status == HTTPStatus.UNAUTHORIZED else from_http(status, body)

    def _request(self, call: Call, request: dict[str, Any]) -> httpx.Request:
        headers = {b"content-type": b"application/json"}
        if self._rank is not None:
            headers[b"x-data-parallel-rank"] = b"%d" % self._rank
        if call.session_id:
            headers[b"x-session-id"] = call.session_id.encode("latin-1", "replace")
        return self._client.build_request("POST", PATH, content=msgspec.json.encode(request), headers=headers)


class HttpOutputStream:
    """`core.wire.lane.OutputStream` over server-sent events.

    The counts come in an event after the last choice's; that choice waits for them, so that they arrive together as over gRPC.
    """

    def __init__(self, response: httpx.Response, call: Call, index: int) -> None:
        self._response = response
        self._lines = response.aiter_lines()
        self._call = call
        self._index = index
        self._last: Output | None = None
        self._ended = False

    async def receive(self) -> list[Output]:
        """See `OutputStream`."""
        while not self._ended:
            data = await self._event()
            if data is None:
                self._ended = True
                return [self._last] if self._last else []
            output = lift_from_http(self._call, data, self._index)
            if self._last:
                _take_counts(self._last, output)
            elif output.choice.finish_reason:
                self._last = output
            else:
                return [output]
        return []

    async def aclose(self) -> None:
        """Leave what is unread. Cancellation: the same."""
        # httpx reads through nested generators; one that is left suspended would end when the garbage collector finds it. Reading on in
        # a scope whose time is up ends all of them. After the last event only the end of the body is outstanding, and a connection that
        # has seen it can be used again.
        with trio.CancelScope(shield=True, deadline=trio.current_time() + (_END_SECONDS if self._ended else 0)), suppress(httpx.HTTPError):
            async for _ in self._lines:
                pass

    async def _event(self) -> str | None:
        """The data of the next event; `None` is the end."""
        try:
            async for line in self._lines:
                if line.startswith(_EVENT):
                    data = line.removeprefix(_EVENT)
                    return None if data == _DONE else data
        except httpx.HTTPError as error:
            if self._last is None:
                raise _lost(error) from error
        if self._last is None:
            raise WorkerLost("the worker closed the stream before its end")
        return None

    def release(self) -> None:
        """See `OutputStream`. The worker sees the connection end; who reads from it sees the same."""
        close_connection(self._response)


def _take_counts(output: Output, counted: Output) -> None:
    output.prompt_tokens = counted.prompt_tokens
    output.cached_tokens = counted.cached_tokens
    output.completion_tokens = counted.completion_tokens


def close_connection(response: httpx.Response) -> None:
    """Close a response's connection at once, from any task; who reads from it sees its end."""
    network: socket.socket | None = response.extensions["network_stream"].get_extra_info("socket")
    if network is not None:
        with suppress(OSError):  # ended already
            network.shutdown(socket.SHUT_RDWR)


def _lost(error: httpx.HTTPError) -> WorkerLost:
    return WorkerLost(f"the worker's HTTP server can't be reached: {describe(error)}")
