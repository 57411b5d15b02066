"""Callers in tasks of their own."""

import math

import trio

from core.wire.grpc import Channel, GRPCError
from tests.unit.wire.servers import Raw

PATH = "/test.Test/Any"


class Outcome:
    """What became of a call made in a task of its own."""

    def __init__(self) -> None:
        self.reply: object = None
        self.error: GRPCError | None = None
        self.at = math.nan

    @property
    def over(self) -> bool:
        return not math.isnan(self.at)


def call(nursery: trio.Nursery, channel: Channel, message: bytes = b"?", **options: object) -> Outcome:
    outcome = Outcome()

    async def run() -> None:
        try:
            outcome.reply = await channel.unary(PATH, Raw, Raw(message), **options)  # type: ignore[arg-type]
        except GRPCError as error:
            outcome.error = error
        outcome.at = trio.current_time()

    nursery.start_soon(run)
    return outcome
