"""Calls over a worker's HTTP server: `/inference/v1/generate`, for what gRPC can't carry and for workers without gRPC."""

import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any

import httpx
import msgspec

from core.call import Call
from core.errors import WorkerLost, from_http
from core.reply import Output
from core.wire.http_lifting import lift_from_http
from core.wire.http_lowering import lower_to_http
from core.wire.needs import Wire

PATH = "/inference/v1/generate"
_EVENT = "data: "
_DONE = "[DONE]"


class HttpLane:
    """`core.wire.lane.Lane` over a client whose base URL is the worker's. `max_model_len` is the worker's, in tokens."""

    wire: Wire = "http"

    def __init__(self, client: httpx.AsyncClient, *, can: frozenset[str], max_model_len: int) -> None:
        self._client = client
        self._max_model_len = max_model_len
        self.can = can

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
            raise from_http(response.status_code, response.content)
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
                raise from_http(response.status_code, await response.aread())
            yield HttpOutputStream(response, call, index)
        finally:
            await response.aclose()

    def _request(self, call: Call, request: dict[str, Any]) -> httpx.Request:
        headers = {"content-type": "application/json"}
        if call.data_parallel_rank is not None:
            headers["x-data-parallel-rank"] = str(call.data_parallel_rank)
        if call.session_id:
            headers["x-session-id"] = call.session_id
        return self._client.build_request("POST", PATH, content=msgspec.json.encode(request), headers=headers)


class HttpOutputStream:
    """`core.wire.lane.OutputStream` over server-sent events."""

    def __init__(self, response: httpx.Response, call: Call, index: int) -> None:
        self._response = response
        self._lines = response.aiter_lines()
        self._call = call
        self._index = index

    async def receive(self) -> list[Output]:
        """See `OutputStream`."""
        try:
            async for line in self._lines:
                if not line.startswith(_EVENT):
                    continue
                data = line.removeprefix(_EVENT)
                if data == _DONE:
                    return []
                return [lift_from_http(self._call, data, self._index)]
        except httpx.HTTPError as error:
            raise _lost(error) from error
        raise WorkerLost("the worker closed the stream before its end")

    def release(self) -> None:
        """See `OutputStream`. The worker sees the connection end; who reads from it sees the same."""
        network: socket.socket | None = self._response.extensions["network_stream"].get_extra_info("socket")
        if network is not None:
            with suppress(OSError):  # ended already
                network.shutdown(socket.SHUT_RDWR)


def _lost(error: httpx.HTTPError) -> WorkerLost:
    return WorkerLost(f"the worker's HTTP server can't be reached: {error or type(error).__name__}")
