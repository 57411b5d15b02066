"""Loading and unloading over the whole fleet: everywhere, or nowhere."""

import time
from collections.abc import AsyncGenerator, Collection, Iterable
from contextlib import asynccontextmanager

import structlog
import trio

from core import BadRequest, CallError, NotFound, NoWorker, Proxy, Worker
from plugins.lora import on_worker
from plugins.lora.names import split_name
from plugins.lora.on_worker import WorkerFailed
from plugins.lora.source import Source
from plugins.lora.version import Version, Versions

log = structlog.stdlib.get_logger()

#: States in which a worker has calls, or gets them again without being prepared anew: the fleet doesn't go on without it.
_TAKING_PART = frozenset({"ready", "paused", "updating"})


class Adapters:
    """The adapters of the fleet. `deadline`, in seconds, is for each worker's answer."""

    def __init__(self, proxy: Proxy, *, deadline: float) -> None:
        self._fleet = proxy.fleet
        self._deadline = deadline
        self.versions = Versions()
        #: Workers that know of every adapter, or are being told.
        self._members: set[Worker] = set()
        self._locks: dict[str, trio.Lock] = {}

    async def load(self, name: str, source: Source, *, base: str | None, in_place: bool, reload: bool) -> None:
        """Load an adapter everywhere; calls that are received after it has returned get these weights, on any worker.

        A source that is loaded already is left as it is, but for workers that lack it; where nobody can tell, `reload` decides. Another
        source needs `in_place`. When a worker fails, every other one unloads it again, and the version before stays current.

        Cancellation: the workers that were asked may have loaded it; their next preparation finds it.
        Raises: `BadRequest`, `NotFound` when a worker doesn't see the files, `NoWorker`, `CallError` (500) for anything else.
        """
        async with self._alone(name):
            model = self._base(name, base)
            current = self.versions.current.get(name)
            if current and current.base == model and _is_there(current.source, source, reload=reload):
                await self._load(current, self._workers_of(model) - current.holders, otherwise="The other workers have it")
                return
            if current and not in_place:
                raise BadRequest(
                    f"LoRA adapter `{name}` is already loaded. If you want to load the adapter in place, set 'load_inplace' to true.",
                    param="lora_name",
                )
            started = trio.current_time()
            version = self.versions.new(name, model, source, created=int(time.time()), first=int(name == model))
            try:
                asked: set[Worker] = set()
                while new := self._workers_of(model) - asked:  # some may come while the others load
                    asked |= new
                    await self._load(version, new, otherwise="No worker uses it")
            except Exception:
                self.versions.retire(version)
                await self.sweep()
                raise
            self.versions.make_current(version)
            seconds = round(trio.current_time() - started, 3)
            log.info("lora.loaded", name=name, on_workers=version.on_workers, workers=len(version.holders), seconds=seconds)

    async def unload(self, name: str) -> None:
        """Unload an adapter: calls that name it are refused from now on; workers unload it when no call uses it any more.

        Cancellation: the name is gone; what workers still hold goes with the next sweep.
        Raises: `NotFound`; `CallError` (500) when a worker didn't unload it.
        """
        async with self._alone(name):
            version = self.versions.current.get(name)
            if version is None:
                raise NotFound(f"The model `{name}` does not exist.", param="lora_name")
            self.versions.retire(version)
            log.info("lora.unloaded", name=name, on_workers=version.on_workers, calls=version.calls)
            await self.sweep()
            if version.asked and not version.calls:
                left = ", ".join(sorted(worker.id for worker in version.asked))
                raise CallError(500, f"LoRA adapter `{name}` is out of use, but not yet unloaded by {left}; that is tried again later")

    async def sweep(self) -> None:
        """Unload the retired versions that no call uses, on every worker that may hold them; what fails is tried at the next sweep.

        Cancellation: as `unload`.
        """
        async with trio.open_nursery() as nursery:
            for version in self.versions.all.values():
                if version.retired and not version.calls:
                    for worker in version.asked:
                        nursery.start_soon(self._unload_one, version, worker)
        self.versions.forget_unheld()

    async def prepare(self, worker: Worker) -> None:
        """Learn what a worker holds, and load what it lacks. What the fleet doesn't know, it learns from the first worker that holds it.

        Cancellation: what was loaded stays.
        Raises: `WorkerFailed`.
        """
        self._members.add(worker)
        try:
            await self._take_stock(worker)
            await self._complete(worker)
        except BaseException:
            self._members.discard(worker)
            raise

    def forget(self, worker: Worker) -> None:
        """The worker is gone, and what it held with it."""
        self._members.discard(worker)
        self.versions.forget_worker(worker)

    @asynccontextmanager
    async def _alone(self, name: str) -> AsyncGenerator[None, None]:
        """Nobody else changes the adapter of that name meanwhile."""
        lock = self._locks.setdefault(name, trio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked() and not lock.statistics().tasks_waiting:
                self._locks.pop(name, None)

    def _base(self, name: str, base: str | None) -> str:
        """The model that an adapter is for: the one whose name it takes, the one that was named, or the only one."""
        served = {model for worker in self._able() for model in worker.models}
        if not served:
            raise NoWorker("no worker that takes LoRA adapters is there (vLLM: --enable-lora)")
        if name in served:
            if base not in (None, name):
                raise BadRequest(f"base_model: {name!r} is itself a model that is served; leave base_model out", param="base_model")
            return name
        if base is not None:
            if base not in served:
                raise NotFound(f"The model `{base}` does not exist.", param="base_model")
            return base
        models = {worker.models[0] for worker in self._able()}
        if len(models) > 1:
            raise BadRequest(f"base_model: the fleet serves {', '.join(sorted(models))}; name one", param="base_model")
        return models.pop()

    def _able(self) -> list[Worker]:
        return [w for w in self._members if self._fleet.workers.get(w.id) is w and w.state != "draining" and _takes_adapters(w)]

    def _workers_of(self, model: str) -> set[Worker]:
        return {worker for worker in self._able() if model in worker.models}

    async def _load(self, version: Version, workers: Collection[Worker], *, otherwise: str) -> None:
        """Load on these workers.

        Raises: `CallError` when one that takes part has failed, or no worker holds it; `otherwise` says what that means.
        """
        failures: dict[Worker, WorkerFailed] = {}

        async def load(worker: Worker) -> None:
            if failure := await self._load_one(version, worker):
                failures[worker] = failure

        async with trio.open_nursery() as nursery:
            for worker in workers:
                nursery.start_soon(load, worker)
        if failures and (not version.holders or any(worker.state in _TAKING_PART for worker in failures)):
            raise _failed(version, failures.items(), otherwise)

    async def _load_one(self, version: Version, worker: Worker) -> WorkerFailed | None:
        version.asked.add(worker)
        failure: WorkerFailed | None = None
        try:
            with trio.fail_after(self._deadline):
                await on_worker.load(worker, version.on_workers, version.source)
        except trio.TooSlowError:
            failure = self._too_slow()
        except WorkerFailed as error:
            failure = error
        gone = worker not in self._members
        if gone or (failure and failure.certain):
            version.asked.discard(worker)
        if failure is None:
            if not gone:
                version.holders.add(worker)
            return None
        log.warning("lora.load_failed", name=version.name, on_workers=version.on_workers, worker=worker.id, reason=str(failure))
        return failure

    async def _unload_one(self, version: Version, worker: Worker) -> None:
        version.holders.discard(worker)
        try:
            with trio.fail_after(self._deadline):
                await on_worker.unload(worker, version.on_workers)
        except (WorkerFailed, trio.TooSlowError) as error:
            log.warning("lora.unload_failed", name=version.name, on_workers=version.on_workers, worker=worker.id, reason=str(error))
        else:
            version.asked.discard(worker)

    async def _take_stock(self, worker: Worker) -> None:
        self.versions.forget_worker(worker)
        if not _takes_adapters(worker):
            return
        try:
            with trio.fail_after(self._deadline):
                held = await on_worker.held(worker)
                for on_workers in sorted(held, key=lambda name: split_name(name)[1], reverse=True):  # the newest is the one to learn
                    version = self.versions.all.get(on_workers) or self.versions.adopt(on_workers, held[on_workers], worker)
                    if version and version.source.path == held[on_workers] and not version.retired:
                        version.asked.add(worker)
                        version.holders.add(worker)
                    else:
                        await _drop(worker, on_workers)
        except trio.TooSlowError as error:
            raise self._too_slow() from error

    async def _complete(self, worker: Worker) -> None:
        """Load what the worker lacks, also what becomes current meanwhile."""
        while lacking := next((v for v in self.versions.current.values() if _suits(v, worker) and worker not in v.holders), None):
            async with self._alone(lacking.name):
                if not lacking.retired and worker not in lacking.holders and (failure := await self._load_one(lacking, worker)):
                    raise failure

    def _too_slow(self) -> WorkerFailed:
        return WorkerFailed(f"no answer within {self._deadline:g} s (plugins.lora.deadline)")


async def _drop(worker: Worker, on_workers: str) -> None:
    """Unload an older version, or what else has a name of ours. It's in nobody's way when that fails, or will be named by who needs it."""
    try:
        await on_worker.unload(worker, on_workers)
    except WorkerFailed as failure:
        log.warning("lora.unload_failed", name=split_name(on_workers)[0], on_workers=on_workers, worker=worker.id, reason=str(failure))


def _is_there(loaded: Source, source: Source, *, reload: bool) -> bool:
    same = loaded.same_as(source)
    return not reload if same is None else same


def _takes_adapters(worker: Worker) -> bool:
    """Whether it does, as far as it says; an HTTP server alone doesn't."""
    return worker.info is not None and (worker.info.supports_lora or worker.control is None)


def _suits(version: Version, worker: Worker) -> bool:
    return version.base in worker.models and _takes_adapters(worker)


def _failed(version: Version, failures: Iterable[tuple[Worker, WorkerFailed]], otherwise: str) -> CallError:
    reasons = "; ".join(sorted(f"{worker.id}: {failure}" for worker, failure in failures))
    statuses = {failure.status for _, failure in failures}
    # Anything mixed is nobody's fault in particular, and may pass.
    status = statuses.pop() if len(statuses) == 1 else 500
    return CallError(status, f"LoRA adapter `{version.name}` was not loaded: {reasons}. {otherwise}", param="lora_path")
