"""The handle of a worker that serves."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.workers.processes import get, json_lines, post

Kind = Literal["stand-in", "scripted", "engine"]


@dataclass(frozen=True)
class RunningWorker:
    """A worker that serves. It ends with the context that yielded it."""

    kind: Kind
    grpc: str  #: `127.0.0.1:port`
    http: str  #: `http://127.0.0.1:port`
    model: str  #: the name under which the model is served
    max_model_len: int
    vocab_size: int
    pids: tuple[int, ...]  #: the server first, then its scripted engines
    log: Path  #: what the server printed
    engine_log: Path | None = None  #: a scripted engine's events, see `engine_events`

    def running_requests(self) -> int:
        """How many requests the engine has, running or waiting, according to the worker's `/metrics`.

        Raises: `ConnectionError` when the worker doesn't answer; `ValueError` when its metrics don't say.
        """
        metrics = get(f"{self.http}/metrics")
        if metrics is None:
            raise ConnectionError(f"{self.http}/metrics doesn't answer")
        names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
        counts = [int(float(line.split()[-1])) for line in metrics.splitlines() if line.startswith(names)]
        if not counts:
            raise ValueError(f"{self.http}/metrics has no vllm:num_requests_running")
        return sum(counts)

    def metric(self, name: str, **labels: str) -> float:
        """A number out of the worker's `/metrics`, of the first series that has these labels; 0 when there is none: vLLM shows a series
        from its first value on.

        Raises: `ConnectionError` when the worker doesn't answer.
        """
        metrics = get(f"{self.http}/metrics")
        if metrics is None:
            raise ConnectionError(f"{self.http}/metrics doesn't answer")
        for line in metrics.splitlines():
            if line.startswith(f"{name}{{") and all(f'{label}="{value}"' in line for label, value in labels.items()):
                return float(line.split()[-1])
        return 0.0

    def engine_events(self, event: str | None = None) -> list[dict[str, Any]]:
        """What reached a scripted engine so far, in order; with `event`, only events of that kind.

        Kinds: `init`; `add` with every field of the request under vLLM's names; `abort` with `request_ids`; `utility` with `method` and
        `args`; `finish` with `request_id`, `reason` and `output_token_ids`; `died`. Each has the `rank` of its engine.

        Raises: `ValueError` for a worker whose engine isn't scripted, or doesn't log.
        """
        if self.engine_log is None:
            raise ValueError(f"the {self.kind} worker at {self.http} logs no engine events")
        return [entry for entry in json_lines(self.engine_log) if event in (None, entry["event"])]

    def wait_for_event(self, event: str, *, since: int = 0, timeout: float = 10.0) -> dict[str, Any]:
        """Wait for a scripted engine's event, the first of its kind after the first `since` events of any kind, and return it.

        Blocks; from trio, call it in a thread.

        Raises: `TimeoutError` after `timeout` seconds; `ValueError` as `engine_events`.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            for entry in self.engine_events()[since:]:
                if entry["event"] == event:
                    return entry
            time.sleep(0.01)
        raise TimeoutError(f"no {event!r} event reached the engine within {timeout} s")

    def order(self, method: str, *arguments: Any) -> None:
        """Give a scripted engine an order: `script_fail`, `script_stall` or `script_reset`, see `scripted_engine.administration`.

        Blocks; from trio, call it in a thread, or post to `/collective_rpc`.

        Raises: `ConnectionError` when the worker refuses, or isn't there.
        """
        post(f"{self.http}/collective_rpc", {"method": method, "args": arguments})

    def send_signal(self, number: signal.Signals, process: int = 0) -> None:
        """Send a signal to one of `pids`; nobody starts the process again."""
        os.kill(self.pids[process], number)
