"""Methods that read all weights from a path, called again: a worker that comes late gets what a trainer has brought the others by one."""

from collections.abc import Mapping
from typing import Any

from core.fleet.cohort import Member
from core.fleet.control import WorkerControl
from core.fleet.transport import WeightUpdate


class MethodTransport:
    """A method of the workers, by its name, as a transport; the options are its `args` and `kwargs`."""

    repeatable = True
    grouped = False

    def __init__(self, name: str) -> None:
        self.name = name

    def parse(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `core.WeightTransport`."""
        return {"method": self.name, **options}

    async def prepare(self, update: WeightUpdate) -> None:
        """See `core.WeightTransport`. The others have read it already."""

    async def apply(self, update: WeightUpdate, member: Member, control: WorkerControl) -> None:
        """See `core.WeightTransport`."""
        if member.id in update.torn:
            await control.clear_reload()
        await control.collective_rpc(update.options)


def options_of(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The transport's options for a method that replaces all weights; `None` for one that has not read them from a path.

    vLLM's own method takes weights by value, too, or those that lie where they lay when the process began.
    """
    args, kwargs = list(body.get("args", ())), dict(body.get("kwargs", {}))
    if body["method"] == "reload_weights":
        paths = [] if args or kwargs.get("weights_iterator") is not None else [kwargs.get("weights_path")]
    else:
        paths = [*args, *kwargs.values()]
    if len(paths) == 1 and isinstance(paths[0], str):
        return {"args": args, "kwargs": kwargs}
    return None
