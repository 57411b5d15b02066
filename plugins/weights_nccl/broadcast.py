"""The transport `broadcast`: `trainer.py` sends, `worker.py` receives, and headrace tells each rank its place."""

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from core import CallError, ControlFailed, Member, WeightUpdate, WorkerControl, refusing

#: How an engine says that it has no such method, and how a rank says that it has done nothing yet.
_NO_METHOD: Final = re.compile(r"no (attribute|method)")
_NOTHING_DONE: Final = re.compile(r"This rank has the weights that it had")
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

    def parse(self, options: Mapping[str, Any]) -> Meeting:
        """See `core.WeightTransport`."""
        with refusing(""):
            return msgspec.convert(options, Meeting)

    async def prepare(self, update: WeightUpdate) -> None:
        """See `core.WeightTransport`."""

    async def apply(self, update: WeightUpdate, member: Member, control: WorkerControl) -> None:
        """See `core.WeightTransport`. No deadline: the ranks have theirs, and the trainer calls off a round that nobody can finish."""
        place = {"rank_offset": 1 + member.base, "world_size": 1 + update.cohort.ranks}
        kwargs = msgspec.structs.asdict(update.options) | place
        try:
            await control.collective_rpc({"method": "receive_broadcast", "kwargs": kwargs})
        except ControlFailed as failure:
            if _NO_METHOD.search(failure.reason):
                text = f"it has no receive_broadcast: start its engine with --worker-extension-cls {_EXTENSION}"
                raise ControlFailed(member.id, failure.operation, CallError(HTTPStatus.NOT_IMPLEMENTED, text)) from failure
            if _NOTHING_DONE.search(failure.reason):
                raise ControlFailed(member.id, failure.operation, CallError(HTTPStatus.BAD_REQUEST, failure.reason)) from failure
            raise
