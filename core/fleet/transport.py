"""What a weight transport is: the way by which new weights come into the workers, offered by plugins (`weight_transports`)."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from msgspec import Struct

from core.fleet.cohort import Cohort, Member
from core.fleet.control import WorkerControl
from core.settings import SettingsError


class WeightUpdate(Struct, frozen=True):
    """One update, as its transport sees it."""

    #: That of `GET /fleet/updates/<id>`.
    id: str
    #: The policy version that the workers have afterwards. The core labels them: a transport need not.
    version: str
    #: What the transport's `parse` has made of its own keys of the request.
    options: Any
    #: Who takes part, in rank order.
    cohort: Cohort
    #: Workers, by id, in which a replacement of weights began before that has not ended well. vLLM 0.31 takes what it has left for a part
    #: of the next one, unless it is cleared away (`WorkerControl.clear_update`, `clear_reload`). Known once `apply` runs.
    torn: frozenset[str] = frozenset()


class WeightTransport(Protocol):
    """One way for weights. It is shared by all updates over it, so what belongs to one is kept by its id."""

    @property
    def name(self) -> str:
        """What `transport` says in `POST /fleet/updates`: `filesystem`, `nccl`."""
        ...

    @property
    def repeatable(self) -> bool:
        """Whether `prepare` and `apply` alone bring a worker that comes late up to date, with the same options, without the trainer."""
        ...

    @property
    def grouped(self) -> bool:
        """Whether the weights come through the trainer's group, which the workers have joined before (`/init_weight_transfer_engine`).

        Then an update is refused unless all of them are in it, and nobody else is.
        """
        ...

    def parse(self, options: Mapping[str, Any]) -> Any:
        """The request's keys that aren't the core's, checked. Plain function: it touches no file and no worker.

        Raises: `BadRequest`, which names the key.
        """
        ...

    async def prepare(self, update: WeightUpdate) -> None:
        """What can be done, or has to be waited for, before the fleet stands still: marker files, say.

        The workers take calls meanwhile, and others may administer them. No deadline but its own.

        Cancellation: headrace ends.
        Raises: `CallError`; then no worker was paused, and the update has failed.
        """
        ...

    async def apply(self, update: WeightUpdate, member: Member, control: WorkerControl) -> None:
        """Replace all weights of one worker; returns when they are whole.

        Runs for all members at the same time, while their engines are paused: it neither pauses nor resumes. The transport has its own
        deadline, or a reason to have none. `control` is that of `member`.

        Cancellation: headrace ends, or has given the worker up; it may have the weights, or half of them.
        Raises: `CallError`, such as the `ControlFailed` of `control`; the worker is quarantined, and the others go on. With a 400, 404 or
        501, before the worker has answered anything with success, it says that nothing was done: that worker goes on as it was, unless
        another one got the weights.
        """
        ...


def by_name(offered: Iterable[tuple[str, WeightTransport]]) -> dict[str, WeightTransport]:
    """The transports by their names, of pairs with the name of the plugin. Raises: `SettingsError` for two of one name."""
    transports: dict[str, WeightTransport] = {}
    plugins: dict[str, str] = {}
    for plugin, transport in offered:
        if transport.name in transports:
            raise SettingsError(
                f"weight transport {transport.name!r} is offered by the plugins {plugins[transport.name]!r} and {plugin!r}; disable one"
            )
        transports[transport.name], plugins[transport.name] = transport, plugin
    return transports
