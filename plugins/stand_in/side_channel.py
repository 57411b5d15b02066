"""How two stand-ins hand KV blocks over: lines of JSON on a TCP connection, where NIXL's agents have their own protocol.

The decode's side asks with `{"read": ID}` and is told whether the blocks are there; when it has "read" them it says `{"free": ID}`. One
that goes in between has freed nothing, as with NIXL: the blocks stay until the lease is over.
"""

import asyncio
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from plugins.stand_in.engine.handoff import Handoffs


class _Request(msgspec.Struct):
    read: str = ""
    free: str = ""


async def start_side_channel(ranks: Sequence[Handoffs], listener: socket.socket) -> asyncio.Server:
    """Answer for the prefill's side, for all of its ranks, and let the hand-offs say where."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                request = msgspec.json.decode(line, type=_Request)
                if request.free:
                    for handoffs in ranks:
                        handoffs.free(request.free)
                there = any(handoffs.has(request.read) for handoffs in ranks)
                writer.write(msgspec.json.encode(there or bool(request.free)) + b"\n")
                await writer.drain()
        except (msgspec.MsgspecError, ConnectionError):
            pass
        finally:
            writer.close()

    for handoffs in ranks:
        handoffs.port = listener.getsockname()[1]
    return await asyncio.start_server(answer, sock=listener)


async def pull(params: Mapping[str, Any], delay: float) -> bool:
    """Get the blocks that hand-off parameters name, which takes `delay` seconds; False when they aren't to be had.

    Cancellation: they are not freed.
    """
    try:
        reader, writer = await asyncio.open_connection(params["remote_host"], int(params["remote_port"]))
    except (OSError, ValueError, OverflowError):
        return False
    try:
        for order in ("read", "free"):
            writer.write(msgspec.json.encode({order: str(params["remote_request_id"])}) + b"\n")
            if await reader.readline() != b"true\n":
                return False
            if order == "read":
                await asyncio.sleep(delay)
    except ConnectionError:
        return False
    finally:
        writer.close()
    return True
