"""The transport `nixl`: hands what the trainer offers on to the workers, all at once."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from core import (
    BadRequest,
    Member,
    PluginSettings,
    WeightTransport,
    WeightUpdate,
    WorkerControl,
    hookimpl,
    refusing,
)
from plugins.extending import call_extension

_EXTENSION: Final = "plugins.weights_nixl.worker.NixlPull"


class Settings(PluginSettings, frozen=True):
    """`[plugins.weights-nixl]`."""

    #: Each rank reads the weights through a buffer of this size on its device; a larger tensor has one of its own size.
    chunk_mib: Annotated[int, Meta(ge=1)] = 256
    #: Seconds for one such chunk. A trainer that is gone ends a transfer sooner than that.
    timeout: Annotated[float, Meta(gt=0)] = 300.0


class Offer(Struct, frozen=True, forbid_unknown_fields=True):
    """What the trainer offers: the transport's own keys of `POST /fleet/updates`."""

    #: Metadata of its NIXL agent, in base64.
    agent: Annotated[str, Meta(pattern=r"^[A-Za-z0-9+/]+={0,2}$")]
    #: Where its tensors are: in main memory, or in that of GPUs.
    memory: Literal["DRAM", "VRAM"]
    #: Name, dtype as torch names it, shape, address, and the number of the GPU (0 in main memory).
    tensors: Annotated[list[tuple[str, str, tuple[Annotated[int, Meta(ge=0)], ...], int, int]], Meta(min_length=1)]


class WeightsNixl:
    """Offers the transport."""

    settings_type = Settings

    def __init__(self, settings: Settings) -> None:
        self._transport = NixlTransport(settings)

    @hookimpl
    def weight_transports(self) -> Sequence[WeightTransport]:
        """See `core.hookspecs`."""
        return [self._transport]


class NixlTransport:
    """The workers read, each for itself; headrace sees no weight."""

    name = "nixl"
    #: The trainer takes its tensors back as soon as the update is over.
    repeatable = False
    grouped = False

    def __init__(self, settings: Settings) -> None:
        self._chunk_bytes = settings.chunk_mib * 2**20
        self._timeout = settings.timeout

    def parse(self, options: Mapping[str, Any]) -> Offer:
        """See `core.WeightTransport`."""
        with refusing("", Offer):
            offer = msgspec.convert(options, Offer)
        seen: set[str] = set()
        for name, *_ in offer.tensors:
            if name in seen:
                raise BadRequest(f"tensors: {name!r} is there twice", param="tensors")
            seen.add(name)
        return offer

    async def prepare(self, update: WeightUpdate) -> None:
        """See `core.WeightTransport`."""

    async def apply(self, update: WeightUpdate, member: Member, control: WorkerControl) -> None:  # noqa: ARG002 - all read the same
        """See `core.WeightTransport`. The worker itself gives up on a trainer that doesn't answer."""
        offer: Offer = update.options
        arguments = {"agent": offer.agent, "memory": offer.memory, "tensors": offer.tensors}
        limits = {"chunk_bytes": self._chunk_bytes, "timeout": self._timeout}
        await call_extension(control, _EXTENSION, "pull_weights_nixl", arguments | limits)
