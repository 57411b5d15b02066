"""The transport `nccl`: vLLM's own protocol, start, updates and finish, which the trainer's end of vLLM speaks, too."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from core import BadRequest, Cohort, Member, WeightUpdate, WorkerControl, refusing

#: An `update_info` as vLLM takes it: one object for all ranks, or one for each rank of the fleet.
Info = Mapping[str, Any] | Sequence[Mapping[str, Any] | None]


class Sending(Struct, frozen=True, forbid_unknown_fields=True):
    """What the trainer sends: the transport's own keys of `POST /fleet/updates`, one of the two."""

    update_info: dict[str, Any] | list[dict[str, Any] | None] | None = None
    #: Several, one after the other.
    chunks: Annotated[list[dict[str, Any] | list[dict[str, Any] | None]], Meta(min_length=1)] | None = None


class NativeTransport:
    """Passes on what the trainer says, whatever the workers' backend makes of it; packed and sparse forms are in it."""

    name = "nccl"
    #: Without the trainer there is nobody to send.
    repeatable = False
    grouped = True

    def parse(self, options: Mapping[str, Any]) -> Sequence[Info]:
        """See `core.WeightTransport`."""
        with refusing("", Sending):
            sending = msgspec.convert(options, Sending)
        if (sending.update_info is None) == (sending.chunks is None):
            raise BadRequest("update_info: send it, or several of them as chunks", param="update_info")
        return [sending.update_info] if sending.update_info is not None else sending.chunks or []

    async def prepare(self, update: WeightUpdate) -> None:
        """See `core.WeightTransport`."""
        for info in update.options:
            _share(info, update.cohort, update.cohort.members[0])

    async def apply(self, update: WeightUpdate, member: Member, control: WorkerControl) -> None:
        """See `core.WeightTransport`. No deadline: a worker that is in its update waits for the trainer, and for every other worker."""
        if member.id in update.torn:
            await control.clear_update()
        await control.start_weight_update()
        for info in update.options:
            await control.update_weights(_share(info, update.cohort, member))
        await control.finish_weight_update(update.version)


def _share(info: Info, cohort: Cohort, member: Member) -> Info:
    """What one worker gets of an `update_info`. Raises: `BadRequest`."""
    if isinstance(info, Mapping):
        return info
    if len(info) != cohort.ranks:
        text = f"update_info: {len(info)} objects for {cohort.ranks} ranks; as a list it has one for each"
        raise BadRequest(text, param="update_info")
    return info[member.offset : member.offset + member.ranks]
