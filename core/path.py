"""The life of a call, from the first hook to the last. Read it from top to bottom."""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from http import HTTPStatus
from time import perf_counter
from typing import Any, Final

import msgspec
import structlog
from msgspec.structs import replace

from core.aborts import AbortedStream, aborted
from core.call import BODY_KEYS, Call, Identity, Outcome, SamplingParams
from core.compose import compose
from core.errors import BadRequest, CallAborted, CallError, PluginFault, WorkerLost, WorkerPaused, shorten
from core.fanout import gather, merge
from core.fleet.worker import Worker
from core.holding import Client, collect, holding
from core.hookspecs import Choice
from core.lifted import LiftedStream
from core.metrics import Metrics
from core.placement import Placement, Placer
from core.registry import Registry
from core.relayed import RelayedBody
from core.reply import GenerateReply
from core.versions import StreamedVersions, UnaryVersions
from core.wire.http_relay import Answer
from core.wire.lane import OutputStream
from core.wording import nearest

log = structlog.stdlib.get_logger()

_Begin = Callable[[Call, Mapping[Worker, str]], Awaitable[Call]]
#: A list in an error's text: workers quote the tokens that they refuse, and those are not for the log.
_LIST: Final = re.compile(r"\[[^\]]*\]?")

#: Objects of the body that belong to nobody alone: each plugin takes its members.
_SHARED: Final = ("extra_body", "nvext")
#: The scope of a call that is one request.
_ONE: Final = nullcontext()


class Path:
    """Takes calls from the northbound routes to a worker and back.

    `retries` is how many further workers are tried when one is lost before its first token.
    """

    def __init__(self, registry: Registry, placer: Placer, metrics: Metrics, *, retries: int) -> None:
        self._registry = registry
        self._metrics = metrics
        self._placer = placer
        self._retries = retries

    @contextmanager
    def settling(self, call: Call) -> Generator[Outcome, None, None]:
        """The scope of a call: whatever its end, it settles here, once. The reply is written inside.

        What the scope raises passes through, and counts as a failure; an error that was answered inside is told by `fail`.
        """
        outcome = Outcome(kind="cancelled", status=503)
        try:
            yield outcome
        except Exception as error:
            outcome.kind, outcome.status, outcome.error = "failed", 500, type(error).__name__
            raise
        finally:
            outcome.seconds = perf_counter() - call.started
            self._settle(call, outcome)

    def fail(self, call: Call, outcome: Outcome, error: CallError) -> None:
        """Note the error with which a call ends. A plugin's fault is logged in full: its client learns no more than the name."""
        self._note(outcome, error)
        if isinstance(error, PluginFault):
            log.error("plugin.failed", id=call.id, plugin=error.plugin, hook=error.hook, exc_info=error.__cause__ or error)

    def _note(self, outcome: Outcome, error: CallError) -> None:
        outcome.kind = "refused" if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else "failed"
        outcome.status, outcome.error = error.status, error.message

    async def unary(self, call: Call, outcome: Outcome, client: Client | None = None) -> GenerateReply:
        """The whole reply of a call, for a client by whose loss it is cancelled.

        Cancellation: the call is cancelled on its worker at once.
        Raises: `CallError`.
        """
        await self._receive(call)
        try:
            reply = await self._answer(call, outcome, self._begin, client)
        except CallAborted:  # no worker has said anything that there is to lift
            return compose(call, self._placer.model_of(call), aborted(call))
        outcome.first_output_seconds = perf_counter() - call.started
        try:
            self._registry.call("lift_result", call=call, result=reply)
        finally:
            _count(outcome, reply)
        return reply

    async def leg(self, call: Call) -> tuple[GenerateReply, Outcome]:
        """What a worker says to a part of a call that another one is to go on with, as it says it; `Proxy.leg` for plugins.

        `call` is a copy of the call with what this part asks for (`msgspec.structs.replace`): above all a role, and no stream. It is
        gated, placed, lowered and tried elsewhere like any call; but no hook sees it received, begun, lifted or settled, and it
        counts as a leg (`headrace_legs`), not as a call.

        Cancellation: it is cancelled on its worker at once.
        Raises: `CallError`.
        """
        outcome = Outcome(kind="cancelled", status=503)
        started = perf_counter()
        try:
            reply = await self._answer(call, outcome, self._gated, None)
            outcome.kind, outcome.status = "ok", 200
        except CallError as error:
            self._note(outcome, error)
            raise
        finally:
            outcome.seconds = perf_counter() - started
            self._metrics.leg_settled(call.role or "", outcome)
            log.info("leg.settled", id=call.id, role=call.role, **_summary(outcome))
        return reply, outcome

    async def _answer(self, call: Call, outcome: Outcome, begin: _Begin, client: Client | None) -> GenerateReply:
        tried: dict[Worker, str] = {}
        while True:
            attempt = await begin(call, tried)
            with holding(attempt.hold, client) as end_holding:
                place = self._place(attempt, tried, outcome)
                try:
                    with self._placer.routing.attempt(attempt, place.choice, outcome), place.worker.serving(), self._several(attempt):
                        requests, versions = self._lower(attempt, place), UnaryVersions(place.worker)
                        if attempt.stream:
                            outputs = await collect(attempt, place.lane, requests, end_holding)
                        else:
                            outputs = await gather(attempt, place.lane, requests)
                        if place.lane.wire == "grpc":
                            versions.tell(outputs)
                        reply = compose(call, call.model or place.worker.models[0], outputs)
                        _count(outcome, reply)
                        return reply
                except CallError as error:
                    self._lost(attempt, place.worker, tried, error)

    @asynccontextmanager
    async def stream(self, call: Call, outcome: Outcome, client: Client | None = None) -> AsyncGenerator[OutputStream, None]:
        """The outputs of a call as they come, for a client by whose loss it is cancelled; entering waits for the first.

        Cancellation, and leaving early: the call is cancelled on its worker at once.
        Raises: `CallError`, on entry or from `receive`.
        """
        await self._receive(call)
        tried: dict[Worker, str] = {}
        started = False
        while True:
            try:
                attempt = await self._begin(call, tried)
            except CallAborted:
                yield AbortedStream(call)
                return
            with holding(attempt.hold, client) as end_holding:
                place = self._place(attempt, tried, outcome)
                try:
                    with self._placer.routing.attempt(attempt, place.choice, outcome), place.worker.serving(), self._several(attempt):
                        async with merge(attempt, place.lane, self._lower(attempt, place)) as source:
                            versions = StreamedVersions(place.worker) if place.lane.wire == "grpc" else None
                            lifted = LiftedStream(source, call, outcome, self._registry, versions)
                            await lifted.start()
                            end_holding()
                            started = True
                            yield lifted
                            return
                except CallError as error:
                    if not started:
                        self._lost(attempt, place.worker, tried, error)
                        continue
                    if isinstance(error, WorkerLost):  # what the client has read can't be taken back
                        place.worker.suspect()
                    raise

    @asynccontextmanager
    async def relayed(
        self, call: Call, outcome: Outcome, body: RelayedBody, ask: Callable[[Choice, bytes], AbstractAsyncContextManager[Answer]]
    ) -> AsyncGenerator[Answer, None]:
        """What a worker's HTTP server answers to a call whose body goes there as it is; entering waits until an answer has begun.

        `ask` sends the body to a chosen worker. A 503 is passed on only when no other worker is there to try, and none that says that the
        worker is paused: the call goes back to the gate.

        Cancellation, and leaving early: the connection is closed, which cancels the call on the worker.
        Raises: `CallError`, on entry or from `Answer.receive`.
        """
        await self._receive(call)
        tried: dict[Worker, str] = {}
        started = False
        while True:
            await self._placer.gate(call, tried)
            choice = self._placer.place_relayed(call, tried)
            worker = choice.worker
            outcome.worker, outcome.wire, outcome.route = worker.id, "http", choice.reason
            outcome.attempts += 1
            request = body.lower(_on(worker, call))
            self._registry.call("lower_call", call=call, worker=worker, request=request)
            try:
                with self._placer.routing.attempt(call, choice, outcome), worker.serving():
                    async with ask(choice, body.encode(request)) as answer:
                        if answer.status == HTTPStatus.SERVICE_UNAVAILABLE and self._may_go_on(call, tried, worker):
                            self._lost(call, worker, tried, WorkerLost("it answered 503"))
                            continue
                        started = True
                        outcome.first_output_seconds = perf_counter() - call.started
                        yield answer
                        return
            except WorkerLost as lost:
                if started:
                    worker.suspect()
                    raise
                self._lost(call, worker, tried, lost)

    @asynccontextmanager
    async def received(self, call: Call) -> AsyncGenerator[None, None]:
        """The scope of a call that is received and identified, and goes nowhere. Plugins are told that it was cancelled.

        Cancellation: that of the plugin that prepares the call.
        Raises: the `CallError` that refuses it.
        """
        try:
            await self._receive(call)
            yield
        finally:
            self._registry.tell("call_settled", call=call, outcome=Outcome(kind="cancelled", status=503))

    async def _receive(self, call: Call) -> None:
        self._registry.call("receive_call", call=call)
        await self._registry.prepare_call(call)
        if not call.relayed:
            for key, raw in call.unclaimed.items():
                raise _unknown_member(key, raw) or _unknown(key, key, BODY_KEYS)
            for key in call.unclaimed_sampling:
                raise _unknown(f"sampling_params.{key}", key, SamplingParams.__struct_fields__)
        call.identity = Identity(namespace=call.cache_salt, adapter=call.adapter)
        self._registry.call("identify_call", call=call)

    async def _gated(self, call: Call, tried: Mapping[Worker, str]) -> Call:
        await self._placer.gate(call, tried)
        return call

    async def _begin(self, call: Call, tried: Mapping[Worker, str]) -> Call:
        """What goes to a worker in an attempt. Nothing is awaited after a plugin has begun it: a client that goes can't keep it from there.

        What an attempt began with is out of date once the fleet was paused: then it begins anew, behind the gate.
        """
        while True:
            await self._placer.gate(call, tried)
            if tried:  # nothing is begun in vain
                self._placer.demand(call, tried)
            attempt = await self._registry.begin_attempt(call)
            if attempt is call or not self._placer.would_wait(attempt, tried):
                return attempt

    def _place(self, call: Call, tried: Mapping[Worker, str], outcome: Outcome) -> Placement:
        place = self._placer.place(call, tried)
        outcome.worker, outcome.wire, outcome.route = place.worker.id, place.lane.wire, place.reason
        if call.legs:
            outcome.route = ", ".join([*call.legs, f"{place.worker.role}={place.worker.id} ({place.reason})"])
        outcome.attempts += 1
        return place

    def _lower(self, call: Call, place: Placement) -> list[Any]:
        resolved = _on(place.worker, call)
        requests = [place.lane.lower(resolved, index) for index in range(call.sampling.n or 1)]
        for request in requests:
            self._registry.call("lower_call", call=call, worker=place.worker, request=request)
        return requests

    def _several(self, call: Call) -> AbstractContextManager[None]:
        return _ONE if call.sampling.n in (None, 1) else self._placer.aborts.several(call, call.sampling.n)

    def _may_go_on(self, call: Call, tried: Mapping[Worker, str], worker: Worker) -> bool:
        """Whether there is another worker to try after this one."""
        retries = self._retries if call.retries is None else call.retries
        return len(tried) < retries and self._placer.has_other(call, tried, worker)

    def _lost(self, call: Call, worker: Worker, tried: dict[Worker, str], error: CallError) -> None:
        """Note a lost worker, or give up with its error. A paused one isn't lost: the call goes back to the gate."""
        if isinstance(error, WorkerPaused):
            self._placer.paused(worker)
            return
        if isinstance(error, WorkerLost):
            worker.suspect()
            final = len(tried) >= (self._retries if call.retries is None else call.retries)
        else:  # a refusal, unless the call takes it for a failure
            failed = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(error, PluginFault)
            final = call.retries is None or not failed or not self._may_go_on(call, tried, worker)
        if final:
            raise error
        tried[worker] = error.message
        log.warning("call.retried", worker=worker.id, reason=_without_lists(error.message))

    def _settle(self, call: Call, outcome: Outcome) -> None:
        self._metrics.settled(outcome)
        log.info("call.settled", id=call.id, **_summary(outcome))
        self._registry.tell("call_settled", call=call, outcome=outcome)


def _on(worker: Worker, call: Call) -> Call:
    """The call with the salt that it has on this worker."""
    identity = call.identity
    if identity.per_worker is None:
        return call
    return replace(call, identity=replace(identity, namespace=identity.namespace_on(worker), per_worker=None))


def _count(outcome: Outcome, reply: GenerateReply) -> None:
    usage = reply.usage
    outcome.prompt_tokens, outcome.output_tokens = usage.prompt_tokens, usage.completion_tokens
    outcome.cached_tokens = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None


def _unknown(path: str, key: str, known: Sequence[str]) -> BadRequest:
    path = shorten(path, 200)
    return BadRequest(f"{path}: there is no such key here; {nearest(key, list(known))}", param=path)


def _unknown_member(key: str, raw: msgspec.Raw) -> BadRequest | None:
    """Of an object whose members plugins take one by one, the first that none has taken."""
    if key not in _SHARED:
        return None
    try:
        member = next(iter(msgspec.json.decode(raw, type=dict[str, msgspec.Raw])), None)
    except (msgspec.MsgspecError, RecursionError):
        return None
    path = shorten(f"{key}.{member}", 200)
    return BadRequest(f"{path}: there is no such key here; no plugin takes it", param=path) if member else None


def _summary(outcome: Outcome) -> dict[str, Any]:
    return {
        "outcome": outcome.kind,
        "status": outcome.status,
        "worker": outcome.worker,
        "wire": outcome.wire,
        "route": outcome.route,
        "prompt": outcome.prompt_tokens,
        "output": outcome.output_tokens,
        "cached": outcome.cached_tokens,
        "ms": round(outcome.seconds * 1000),
        **({"error": _without_lists(outcome.error)} if outcome.error else {}),
    }


def _without_lists(message: str) -> str:
    return _LIST.sub("[…]", message)
