"""`POST /inference/v1/generate`: the hottest route, so a plain ASGI handler in front of the others.

Parse, run the path, reply. The reply is written inside the scope in which the call settles.
"""

import msgspec

from core.beside import beside
from core.call import Call, Outcome
from core.errors import CallError, ClientGone
from core.northbound.answering import answering, refused_id, reply_headers, send_error, send_json
from core.northbound.body import parse_call
from core.northbound.events import EventStream
from core.northbound.headers import decode_headers
from core.path import Path
from core.serving.asgi import Receive, Scope, Send
from core.serving.client import MIB, Client, Clients, read_body
from core.settings import ServerSettings

PATH = "/inference/v1/generate"

_encoder = msgspec.json.Encoder()


class GenerateRoute:
    """The ASGI handler of the generate route."""

    def __init__(self, path: Path, clients: Clients, settings: ServerSettings) -> None:
        self._path = path
        self._clients = clients
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request. Cancellation ends the call on its worker at once."""
        if scope["method"] != "POST":
            await send_error(send, CallError(405, f"{PATH} is not served for {scope['method']}"), {"allow": "POST"})
            return
        headers = decode_headers(scope["headers"])
        try:
            data = await read_body(
                receive,
                self._settings.max_body_mib * MIB,
                declared=headers.get("content-length"),
                timeout=self._settings.body_timeout,
            )
            call = parse_call(data, headers)
        except ClientGone:
            return
        except CallError as error:
            await send_error(send, error, refused_id(headers))
            return
        del data  # may be tens of megabytes, and the call may last for hours
        async with answering(self._path, self._clients, call, receive, send) as (outcome, client):
            await self._answer(call, outcome, client)

    async def _answer(self, call: Call, outcome: Outcome, client: Client) -> None:
        try:
            if call.stream:
                await self._stream(call, outcome, client)
            else:
                reply = await self._path.unary(call, outcome, client)
                await send_json(client.send, 200, _encoder.encode(reply), reply_headers(call, outcome))
                outcome.kind, outcome.status = "ok", 200
        except CallError as error:
            self._path.fail(call, outcome, error)
            await send_error(client.send, error, reply_headers(call, outcome))

    async def _stream(self, call: Call, outcome: Outcome, client: Client) -> None:
        events = EventStream(call, outcome, client, lambda: reply_headers(call, outcome), self._settings.keep_alive_interval)
        client.break_off = events.fail
        async with beside(events.keep_alive):
            try:
                async with self._path.stream(call, outcome, client) as outputs:
                    client.release = outputs.release
                    while batch := await outputs.receive():
                        await events.write(batch)
                await events.finish()
                outcome.kind, outcome.status = "ok", 200
            except CallError as error:
                if not events.started:
                    raise
                self._path.fail(call, outcome, error)
                await events.fail(error)
