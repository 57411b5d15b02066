"""The scripted engine's scheduler: admit, step, abort, pause, and say what happened."""

import json
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

from msgspec import msgpack

from tests.workers.scripted_engine.administration import Administration, PauseState, WhenIdle
from tests.workers.scripted_engine.behaviour import EngineDied
from tests.workers.scripted_engine.kv_events import KVEventPublisher
from tests.workers.scripted_engine.prefix_cache import PrefixCache
from tests.workers.scripted_engine.run import Run
from tests.workers.scripted_engine.settings import Settings
from tests.workers.scripted_engine.wire import CacheStats, Finish, Link, Output, Request, RequestError, Stats, Utility

# `EngineCoreRequest`, in the order in which its fields travel.
_REQUEST_FIELDS = (
    "request_id",
    "prompt_token_ids",
    "mm_features",
    "sampling_params",
    "pooling_params",
    "arrival_time",
    "lora_request",
    "cache_salt",
    "data_parallel_rank",
    "prompt_embeds",
    "prompt_is_token_ids",
    "client_index",
    "current_wave",
    "priority",
    "trace_headers",
    "resumable",
    "external_req_id",
    "reasoning_ended",
    "reasoning_parser_kwargs",
    "abort_immediately",
    "session_id",
    "kv_hints",
)


class EventLog:
    """One JSON object a line for everything that reached the engine, and for the end of every request."""

    def __init__(self, path: Path | None, rank: int) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8") if path else None
        self._rank = rank

    def write(self, event: str, **fields: Any) -> None:
        """Append one event, readable by others at once."""
        if self._file:
            self._file.write(json.dumps({"event": event, "rank": self._rank, **fields}, default=_readable) + "\n")

    def write_request(self, body: bytes) -> None:
        """Append an `add` event with every field that the front end sent, under vLLM's names."""
        if self._file:
            self.write("add", **dict(zip(_REQUEST_FIELDS, msgpack.decode(body), strict=False)))


class Engine:
    """One engine, driven by `serve`."""

    def __init__(self, link: Link, settings: Settings, log: EventLog, *, failing: list[str], extension_methods: list[str]) -> None:
        self.settings = settings
        self.running: dict[str, Run] = {}
        self.cache = PrefixCache(settings.block_size, settings.num_blocks)
        if settings.kv_replay and (config := settings.kv_events_config()):
            self.cache.announce = KVEventPublisher(config, settings.rank).publish
        self._waiting: deque[Request] = deque()
        self._link = link
        self._log = log
        self._administration = Administration(self, failing=failing, extension_methods=extension_methods)
        self._when_idle: list[tuple[int, WhenIdle]] = []
        self._reported = (0, 0)

    def serve(self) -> None:
        """Serve for ever.

        Raises: `EngineDied` when a request's behaviour demands it, or on a forward pass over weights that are being replaced.
        """
        while True:
            for message in self._link.receive(self._patience()):
                match message:
                    case Request():
                        self._log.write_request(self._link.last_frames[0])
                        self._add(message)
                    case Utility():
                        self._call(message)
                    case list():
                        self._log.write("abort", request_ids=message)
                        self._abort(message)
            self._admit()
            self._step()
            self._answer_idle_calls()

    def abort_all(self) -> None:
        """End every request, also those that wait, and tell the front end so."""
        request_ids = [*self.running, *(request.request_id for request in self._waiting)]
        self._abort(request_ids)
        self._send([Output(request_id, [], finish=Finish.ABORT) for request_id in request_ids])

    def _patience(self) -> float | None:
        """Seconds until some running request is due; `None` for never."""
        if self._administration.frozen or not self.running:
            return None
        due = min(run.due for run in self.running.values())
        return None if due == float("inf") else max(0.0, due - time.monotonic())

    def _add(self, request: Request) -> None:
        if self._administration.rejects_new:
            error = RequestError("engine_paused", "Generation is paused. Please retry after it resumes.", retryable=True)
            self._send([Output(request.request_id, [], finish=Finish.ERROR, error=error)])
            return
        self._waiting.append(request)

    def _admit(self) -> None:
        if self._administration.pause_state is not PauseState.RUNNING or self._administration.asleep:
            return
        while self._waiting and len(self.running) < self.settings.max_num_seqs:
            request = self._waiting.popleft()
            run = Run(request, self.settings)
            if not self.settings.fast:
                if not (request.sampling.skip_reading_prefix_cache or request.sampling.prompt_logprobs is not None):
                    run.cached_tokens = self.cache.cached_tokens(request)
                self.cache.store(request)
            self.running[request.request_id] = run

    def _step(self) -> None:
        if self._administration.frozen:
            return
        now, weights = time.monotonic(), self._administration.weights
        due = [run for run in self.running.values() if run.due <= now]
        if due and weights.broken:
            raise EngineDied(announced=True)
        outputs: list[Output] = []
        for run in due:
            output = run.step(now, weights.fingerprint)
            if output.finish is not None:
                self._finish(run, output)
            if run.version_suffix:
                self._send([output], weights.version + run.version_suffix)
            else:
                outputs.append(output)
        if outputs or self._reported != (len(self.running), len(self._waiting)):
            self._send(outputs)

    def _finish(self, run: Run, output: Output) -> None:
        del self.running[run.request.request_id]
        if not self.settings.fast:
            self.cache.store(run.request, run.output_token_ids)
        reason = output.finish.name.lower() if output.finish is not None else None
        self._log.write("finish", request_id=run.request.request_id, reason=reason, output_token_ids=run.output_token_ids)

    def _abort(self, request_ids: list[str]) -> None:
        gone = set(request_ids)
        for request_id in request_ids:
            self.running.pop(request_id, None)
        self._waiting = deque(request for request in self._waiting if request.request_id not in gone)

    def _send(self, outputs: list[Output], version: str | None = None) -> None:
        self._reported = (len(self.running), len(self._waiting))
        self._link.send(outputs, self._stats(), version or self._administration.weights.version)

    def _stats(self) -> Stats:
        if self.settings.fast:
            return Stats(len(self.running), len(self._waiting), 0.0, CacheStats(), {}, {})
        used = sum(len(run.request.prompt_token_ids) + run.produced for run in self.running.values())
        return Stats(
            len(self.running),
            len(self._waiting),
            min(1.0, used / (self.settings.num_blocks * self.settings.block_size)),
            self.cache.take_stats(),
            dict(Counter(run.adapter for run in self.running.values() if run.adapter)),
            dict(Counter(request.lora[0] for request in self._waiting if request.lora)),
        )

    def _call(self, utility: Utility) -> None:
        self._log.write("utility", method=utility.method, args=utility.args)
        try:
            result = self._administration.call(utility.method, utility.args)
        except Exception as error:  # noqa: BLE001 - an engine answers any failure of a utility and lives on
            self._link.answer(utility.call_id, failure=f"Call to {utility.method} method failed: {error}")
        else:
            if isinstance(result, WhenIdle):
                self._when_idle.append((utility.call_id, result))
            else:
                self._link.answer(utility.call_id, result=result)

    def _answer_idle_calls(self) -> None:
        if self.running:
            return
        for call_id, pending in self._when_idle:
            pending.then()
            self._link.answer(call_id)
        self._when_idle.clear()


def _readable(value: Any) -> Any:
    if isinstance(value, bytes | memoryview):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, msgpack.Ext):
        return {"ext": value.code, "bytes": bytes(value.data).hex()}
    raise TypeError(f"{type(value).__name__} has no JSON form")
