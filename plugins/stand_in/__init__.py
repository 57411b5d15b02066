"""Stand-in: a worker of our own that keeps vLLM's contract without a model.

When no worker is configured, headrace has somebody to speak to: processes with vLLM's two wires (gRPC and HTTP), whose tokens are
made up, yet depend on the prompt, the seed, the weights and the adapter. Run one by hand with `python -m plugins.stand_in`.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated

import structlog
import trio
from msgspec import Meta, field

from core import PluginSettings, Proxy, WorkerSettings, hookimpl
from plugins.stand_in.command_line import parse
from plugins.stand_in.process import StandInFailed, stand_in_process

log = structlog.stdlib.get_logger()


class Settings(PluginSettings, frozen=True):
    """`[plugins.stand-in]`."""

    #: How many processes, and so workers.
    workers: Annotated[int, Meta(ge=1)] = 1
    #: More of the command line of `python -m plugins.stand_in`, for each of them.
    arguments: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        try:
            options = parse(self.arguments)
        except ValueError as error:
            raise ValueError(f"arguments: {error}") from error
        if self.workers > 1 and (options.grpc_port or options.http_port or options.side_channel_port):
            raise ValueError(f"arguments: {self.workers} workers can't share a port; leave the ports out")


class StandIn:
    """Starts the processes, and serves them as workers, when the settings name no worker."""

    settings_type = Settings

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @hookimpl
    def run_service(self, proxy: Proxy) -> Callable[[], Awaitable[None]] | None:
        """See `core.hookspecs`."""
        if proxy.settings.workers:
            return None

        names = [f"stand-in-{number}" for number in range(self._settings.workers)]
        proxy.fleet.coming.update(names)

        async def service() -> None:
            log.warning("stand_in.started", reason="no worker is configured: every token is made up, there is no model")
            async with trio.open_nursery() as nursery:
                for name in names:
                    nursery.start_soon(self._serve, proxy, name)

        return service

    async def _serve(self, proxy: Proxy, name: str) -> None:
        try:
            async with stand_in_process(*self._settings.arguments) as address:
                proxy.fleet.coming.discard(name)
                await proxy.fleet.serve(WorkerSettings(id=name, grpc=address.grpc, http=address.http))
        except StandInFailed as error:
            proxy.fleet.coming.discard(name)
            log.error("stand_in.failed", worker=name, reason=str(error))  # noqa: TRY400 - the process has said why on stderr
