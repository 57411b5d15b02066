"""Calls and workers to pass to hooks."""

from typing import Any

from core.call import Call, SamplingParams
from core.fleet.worker import Observed, State, Worker, WorkerInfo
from core.settings import Role, WorkerSettings
from core.wire.lane import Lane


def make_call(*token_ids: int, **fields: Any) -> Call:
    """A call with this prompt, three tokens when there is none; `fields` are those of `Call`."""
    defaults: dict[str, Any] = {"id": "call", "token_ids": list(token_ids) or [1, 2, 3], "sampling": SamplingParams()}
    return Call(**{**defaults, **fields})


def make_worker(name: str, *lanes: Lane, state: State = "ready", role: Role = "aggregated", **info: Any) -> Worker:
    """A worker that was introduced and is in that state; `info` are fields of `WorkerInfo`."""
    worker = Worker(WorkerSettings(grpc="127.0.0.1:1", id=name, role=role))
    defaults: dict[str, Any] = {"models": ("tiny",), "model_id": "tiny", "max_model_len": 4096}
    worker.info = WorkerInfo(**{**defaults, **info})
    worker.lanes = lanes
    worker.state, worker.reason = state, "" if state == "ready" else "in a test"
    worker.observed = Observed(worker.state, worker.reason)
    return worker
