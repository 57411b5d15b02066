"""The transport `broadcast`: `trainer.py` sends, `worker.py` receives, and headrace tells each rank its place."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from core import Member, WeightUpdate, WorkerControl, refusing
from plugins.extending import call_extension

_EXTENSION: Final = "plugins.weights_nccl.worker.BroadcastReceiver"


class Meeting(Struct, frozen=True, forbid_unknown_fields=True):
    """Where and when the workers find the trainer: the transport's own keys of `POST /fleet/updates`."""

    host: Annotated[str, Meta(pattern=r"^\S+$", max_length=255)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    #: Of the round: the trainer counts its broadcasts.
    number: Annotated[int, Meta(ge=1)]
    #: Seconds for all ranks to come, and for one message.
    timeout: Annotated[float, Meta(gt=0)] = 1800.0
    stall: Annotated[float, Meta(gt=0)] = 300.0


class BroadcastTransport:
    """The trainer is rank 0; the ranks of the cohort follow in their order."""

    name = "broadcast"
    #: Without the trainer there is nobody to send.
    repeatable = False
    #: The ranks meet anew for each round.
    grouped = False

    def parse(self, options: Mapping[str, Any]) -> Meeting:
        """See `core.WeightTransport`."""
        with refusing("", Meeting):
            return msgspec.convert(options, Meeting)

    async def prepare(self, update: WeightUpdate) -> None:
        """See `core.WeightTransport`."""

    async def apply(self, update: WeightUpdate, member: Member, control: WorkerControl) -> None:
        """See `core.WeightTransport`. No deadline: the ranks have theirs, and the trainer calls off a round that nobody can finish."""
        place = {"rank_offset": 1 + member.base, "world_size": 1 + update.cohort.ranks}
        kwargs = msgspec.structs.asdict(update.options) | place
        await call_extension(control, _EXTENSION, "receive_broadcast", kwargs)
