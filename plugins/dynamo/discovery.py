"""`GET /v1/rl/workers`, protocol 1: whom a trainer may administer, where, and by which routes."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final
from urllib.parse import quote

from core import Fleet, Worker, instance_of
from plugins.dynamo.engine import EngineRoutes

_PROTOCOL: Final = 1
_ENDPOINT: Final = "rl"
_ABSENT: Final = ("starting", "gone")
#: By which trainers know what a worker does.
_COMPONENTS: Final = {"aggregated": "backend", "decode": "backend", "prefill": "prefill", "encode": "encode"}
#: Bits of an `instance_id` that tell a process from the next one in its place.
_BITS: Final = 40


class Discovery:
    """The description of the fleet: `each` worker, or all of a model as one."""

    def __init__(self, fleet: Fleet, engine: EngineRoutes, *, namespace: str, each: bool) -> None:
        self._fleet = fleet
        self._engine = engine
        self._namespace = namespace
        self._each = each

    def describe(self, url: str) -> dict[str, Any]:
        """The reply. `url` is headrace's own address, without a slash at its end.

        Ranks are numbered in the order of `instance_id`, which is that of the fleet. A worker that isn't there has an `error`, and keeps
        trainers waiting; another process in its place has another `instance_id`, which they take for what it is.
        """
        workers = list(self._fleet.workers.values())
        rows = self._workers(workers, url) if self._each else self._models(workers, url)
        rows.sort(key=lambda row: (row["component"], row["instance_id"]))
        return {"protocol_version": _PROTOCOL, "namespace": self._namespace, "workers": rows}

    def _workers(self, workers: Sequence[Worker], url: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for index, worker in enumerate(workers):
            if worker.state in _ABSENT or worker.info is None:
                told = {"error": f"{worker.id} is {worker.state}: {worker.reason}", "routes": []}
            else:
                told = self._reached([worker], f"{url}/workers/{quote(worker.id, safe='')}")
            model = {"model": worker.models[0]} if worker.models else {}
            instance = instance_of(worker) if worker.info else ""
            rows.append(self._row(_COMPONENTS[worker.role], (index << _BITS) | _digest(instance), told | model))
        return rows

    def _models(self, workers: Sequence[Worker], url: str) -> list[dict[str, Any]]:
        there = [worker for worker in workers if worker.state not in _ABSENT and worker.info]
        models = list(dict.fromkeys(worker.models[0] for worker in there))
        if len(models) > 1:
            told = {"error": f"the fleet serves {', '.join(models)}: let discovery name each worker", "routes": []}
            return [self._row("backend", index, {**told, "model": model}) for index, model in enumerate(models)]
        if not there:
            return []
        instances = " ".join(f"{worker.id} {instance_of(worker)} {worker.world_size}" for worker in there)
        return [self._row("backend", _digest(instances), {**self._reached(there, url), "model": models[0]})]

    def _reached(self, workers: Sequence[Worker], url: str) -> dict[str, Any]:
        routes = self._engine.routes_of(workers)
        ranks = sum(worker.world_size for worker in workers)
        return {"system_url": url, "admin_base_url": url, "world_size": ranks, "routes": routes, "system_routes": routes}

    def _row(self, component: str, instance_id: int, told: dict[str, Any]) -> dict[str, Any]:
        return {
            "namespace": self._namespace,
            "component": component,
            "endpoint": _ENDPOINT,
            "instance_id": instance_id,
            "transport": "http",
            "request_plane_url": f"dyn://{self._namespace}.{component}.{_ENDPOINT}",
            **told,
        }


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=_BITS // 8).digest())
