"""Workers that come and go, and the weights that they get."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from core.hookspecs.markers import hookspec

if TYPE_CHECKING:
    from core.fleet.cohort import Cohort
    from core.fleet.transport import WeightTransport
    from core.fleet.worker import Worker


class WorkerSpecs:
    """What a plugin can do about workers and their weights."""

    @hookspec
    async def prepare_worker(self, worker: "Worker") -> None:
        """Bring a worker to where the fleet is, before it joins: adapters that the others hold, weights.

        Runs each time that a worker which was not there is reachable and healthy, before `worker_joined`; async, one plugin after the
        other. The worker gets no call until all have returned. May speak to the worker (`worker.control`, `worker.http`), and changes
        nothing on it that is headrace's.

        Raises: anything; the worker stays out, with the error and the plugin's name as its reason, and all is tried again at the next
        probe.

        Example: no worker without its adapter.

            @hookimpl
            async def prepare_worker(self, worker: Worker) -> None:
                await worker.control.load_lora(LoadLoraRequest(lora_name="math", source_path="/adapters/math"))
        """

    @hookspec
    def worker_joined(self, worker: "Worker") -> None:
        """A worker has joined the fleet: it was reached and introduced for the first time, or again after it was gone.

        Runs before it gets its first call; it may be paused still. Every plugin is told, whatever another one raises. Changes nothing.

        Raises: nothing; an exception is logged with the plugin's name.

        Example:

            @hookimpl
            def worker_joined(self, worker: Worker) -> None:
                self.load[worker.id] = 0
        """

    @hookspec
    def worker_left(self, worker: "Worker") -> None:
        """A worker is gone: it failed its probes, or was taken out.

        Runs after it has become ineligible; calls may still be in flight. Every plugin is told, whatever another one raises. Changes
        nothing.

        Raises: nothing; an exception is logged with the plugin's name.

        Example:

            @hookimpl
            def worker_left(self, worker: Worker) -> None:
                self.load.pop(worker.id, None)
        """

    @hookspec
    def weight_transports(self) -> "Sequence[WeightTransport] | None":
        """Offer ways by which new weights come into the workers, for `POST /fleet/updates`.

        Runs once, when the proxy opens. Returns the transports, see `WeightTransport`: the core pauses the workers, lets the transport
        bring each its weights, all at the same time, labels and checks them, and resumes. Changes nothing.

        Raises: nothing; an error ends the start, as do two transports of one name.

        Example: every worker loads the checkpoint that it has started with, again.

            class Reload:
                name = "reload"
                repeatable = True
                grouped = False

                def parse(self, options: Mapping[str, Any]) -> None:
                    if options:
                        raise BadRequest(f"{min(options)}: this transport has no options", param=min(options))

                async def prepare(self, update: WeightUpdate) -> None:
                    pass

                async def apply(self, update: WeightUpdate, member: Member, control: WorkerControl) -> None:
                    await control.collective_rpc({"method": "reload_weights"})

            @hookimpl
            def weight_transports(self) -> Sequence[WeightTransport]:
                return [Reload()]
        """

    @hookspec(firstresult=True)
    def translate_weight_update(self, body: "Mapping[str, Any]", workers: "Sequence[Worker]") -> "Mapping[str, Any] | None":
        """Say what a body of `POST /update_weights` that isn't vLLM's means, in a trainer's dialect.

        Runs for each such body, before a worker hears of it; `workers` are those that it is for, all or one, in rank order. Returns the
        body of the `/collective_rpc` that does the same (`method`, and as wanted `args`, `kwargs`, `timeout`), `None` to pass to the next
        plugin; a body that nobody knows is refused. A `weight_version` in it labels the weights of each worker afterwards. Changes nothing.

        Raises: `CallError` to refuse the update; `BadRequest` names the field.

        Example: weights that lie in a folder.

            @hookimpl
            def translate_weight_update(self, body: Mapping[str, Any], workers: Sequence[Worker]) -> Mapping[str, Any] | None:
                if "folder" not in body:
                    return None
                return {"method": "reload_weights", "kwargs": {"weights_path": body["folder"]}}
        """

    @hookspec(firstresult=True)
    def number_ranks(self, body: "Mapping[str, Any]", cohort: "Cohort", index: int) -> "Mapping[str, Any] | None":
        """Give each worker its place in a trainer's group that it joins by a `/collective_rpc` to the whole fleet.

        Runs once for each member of the `cohort`, which `index` says, before a worker hears of it; not for a worker that is spoken to
        alone, since its trainer numbers by itself. `body` is what was posted. Returns what this member gets, `None` for a method that
        joins no group. A method that is numbered does: calls wait while the workers join, and from then on these, as they are, are who
        an update is for. Changes nothing.

        Raises: `BadRequest` when the trainer counts other ranks than there are.

        Example: a method `meet(port, first_rank)`.

            @hookimpl
            def number_ranks(self, body: Mapping[str, Any], cohort: Cohort, index: int) -> Mapping[str, Any] | None:
                if body["method"] != "meet":
                    return None
                return {**body, "kwargs": {**body["kwargs"], "first_rank": cohort.members[index].offset}}
        """
