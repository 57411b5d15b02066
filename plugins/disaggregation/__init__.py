"""Disaggregation: one worker computes the prompt, another one makes the output; a third may look at the images first.

Long prompts then don't hold up those who are generating. The KV blocks go from worker to worker, NIXL's way, and what passes here is only
where they are: this plugin runs a call's first parts, hands on what they return, and gives the client one reply.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence, Set
from http import HTTPStatus
from typing import Annotated, Final

import trio
from msgspec import Meta
from msgspec.structs import replace

from core import (
    BadRequest,
    Call,
    CallAborted,
    CallError,
    GenerateReply,
    NoWorker,
    Outcome,
    Output,
    PluginSettings,
    Proxy,
    Role,
    Worker,
    hookimpl,
    needs_with_transfers,
)
from plugins.disaggregation.checks import check
from plugins.disaggregation.legs import decode_call, encode_call, prefill_call, take_over
from plugins.disaggregation.merging import Prefilled
from plugins.disaggregation.releases import Releases

_NAME: Final = "disaggregation"
#: The roles that make a model disaggregated, when it has workers of both.
_PAIR: Final[tuple[Role, ...]] = ("prefill", "decode")


class Settings(PluginSettings, frozen=True):
    """`[plugins.disaggregation]`."""

    #: A prompt of fewer tokens is computed where the output is made; those don't count which the policy takes to be cached there.
    threshold: Annotated[int, Meta(ge=0)] = 0
    #: How long, in seconds, a decode call whose client has gone may wait for its first output, which tells that the blocks have come, and
    #: are freed on the prefill worker; from the prefill on, how long it is tried to free those that nobody wants. vLLM's own lease of them
    #: lasts as long.
    hold: Annotated[float, Meta(gt=0)] = 30.0


class Disaggregation:
    """The roles of the workers (`role` in the settings) say what is done: a model with prefill and decode workers is disaggregated."""

    settings_type = Settings
    _proxy: Proxy
    _releases: Releases

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        #: Every role that a worker has had; a fleet without prefill and encode workers costs a call one look at it.
        self._roles: set[Role] = set()

    @hookimpl
    def run_service(self, proxy: Proxy) -> Callable[[], Awaitable[None]]:
        """See `core.hookspecs`."""
        self._proxy = proxy
        self._roles |= {worker.role for worker in proxy.settings.workers}
        self._releases = Releases(proxy, self._settings.hold)
        return self._releases.run

    @hookimpl
    def worker_joined(self, worker: Worker) -> None:
        """See `core.hookspecs`."""
        self._roles.add(worker.settings.role)

    @hookimpl
    def prepare_call(self, call: Call) -> None:
        """See `core.hookspecs`."""
        if call.relayed:
            return
        if call.kv_transfer_params:
            self._follow(call)
        elif "prefill" in self._roles and self._is_remote(call):
            check(call, self._workers("prefill", call.model), self._workers("decode", call.model))
            call.role = "decode"

    @hookimpl
    def begin_attempt(self, call: Call) -> Awaitable[Call] | None:
        """See `core.hookspecs`."""
        if call.role == "decode" and not call.kv_transfer_params:
            return self._prefill(call)
        if call.kv_transfer_params:
            return self._held(call) if call.kv_transfer_params.get("do_remote_prefill") else None
        return self._encode(call) if self._is_to_be_seen(call) else None

    @hookimpl
    def explain_attempt(self, call: Call) -> Sequence[str] | None:
        """See `core.hookspecs`."""
        if call.relayed or call.kv_transfer_params:
            return None
        legs = [self._previewed(encode_call(call))] if self._is_to_be_seen(call) else []
        if call.role != "decode":
            return [*legs, f"no prefill elsewhere: {self._why_whole(call)}"] if self._has("prefill", call.model) else legs
        if self._is_mostly_cached(call):
            least = self._settings.threshold
            return [f"no prefill elsewhere: fewer than {least:,} tokens (threshold) are taken not to be cached on the decode worker"]
        try:
            versions = self._versions(decode_call(call, hold=self._settings.hold))
        except CallError:  # the choice says why
            return [*legs, self._previewed(prefill_call(call))]
        return [*legs, self._previewed(prefill_call(call, **{_NAME: versions}))]

    @hookimpl
    def explain_unready(self, model: str, workers: Sequence[Worker]) -> str | None:
        """See `core.hookspecs`."""
        for role in _PAIR if all(self._has(role, model) for role in _PAIR) else ():
            if not any(worker.role == role for worker in workers):
                gone = ", ".join(f"{worker.id} is {worker.state} ({worker.reason})" for worker in self._workers(role, model))
                return f"no {role} worker is ready: {gone}"
        return None

    @hookimpl
    def eligible_workers(self, call: Call, workers: Sequence[Worker]) -> Sequence[Worker] | None:
        """See `core.hookspecs`."""
        match call.role, call.notes.get(_NAME):
            case "decode", Prefilled() as prefilled:
                why = f"no decode worker has the weights that {prefilled.worker} has computed the prompt with: {prefilled.version!r}"
                return _having(workers, {prefilled.version}, why)
            case "prefill", frozenset() as versions:
                told = ", ".join(sorted(map(repr, versions)))
                return _having(workers, versions, f"no prefill worker that is ready has the weights of a decode worker: {told}")
            case "decode", None if not call.kv_transfer_params:
                ready = {worker.policy_version for worker in self._workers("prefill", call.model) if worker.state == "ready"}
                return _having(workers, ready)
            case _:
                return None

    @hookimpl(tryfirst=True)
    def lift_output(self, call: Call, output: Output) -> None:
        """See `core.hookspecs`."""
        prefilled: Prefilled | None = call.notes.get(_NAME) if call.role == "decode" else None
        if prefilled is not None:
            prefilled.complete_output(call, output)

    @hookimpl(tryfirst=True)
    def lift_result(self, call: Call, result: GenerateReply) -> None:
        """See `core.hookspecs`."""
        prefilled: Prefilled | None = call.notes.get(_NAME) if call.role == "decode" else None
        if prefilled is not None:
            prefilled.complete_reply(call, result)

    @hookimpl
    def call_settled(self, call: Call, outcome: Outcome) -> None:
        """See `core.hookspecs`. One whose client has gone was held until its decode worker had the blocks."""
        if outcome.kind in ("refused", "failed"):
            self._release(call)

    def _follow(self, call: Call) -> None:
        """A client that disaggregates by itself says what each of its calls is."""
        params = call.kv_transfer_params or {}
        role: Role | None = "prefill" if params.get("do_remote_decode") else "decode" if params.get("do_remote_prefill") else None
        if role and self._has(role, call.model):
            call.role = role
        if role == "decode" and (call.sampling.n or 1) > 1:
            raise BadRequest("sampling_params.n: the blocks of a remote prefill can be had once; send n calls", param="sampling_params.n")
        if params.get("do_remote_prefill") and call.sampling.prompt_logprobs is not None:
            name = "sampling_params.prompt_logprobs"
            raise BadRequest(f"{name}: after a remote prefill the prefill's reply has them, and this one can't", param=name)

    def _is_remote(self, call: Call) -> bool:
        sampling = call.sampling
        # Each of n outputs would need a hand-off of its own, since blocks can be had once; the decode worker's cache serves them better.
        # And to vLLM blocks that come from elsewhere are a cache: it would compute the prompt once more (seen with 0.31).
        if (sampling.n or 1) > 1 or sampling.skip_reading_prefix_cache or len(call.token_ids) < self._settings.threshold:
            return False
        return all(self._has(role, call.model) for role in _PAIR)

    def _why_whole(self, call: Call) -> str:
        """Why the prompt is computed where the output is made."""
        if (call.sampling.n or 1) > 1:
            return "of n outputs each would need it"
        if call.sampling.skip_reading_prefix_cache:
            return "skip_reading_prefix_cache"
        if len(call.token_ids) < self._settings.threshold:
            return f"the prompt has {len(call.token_ids):,} tokens, fewer than {self._settings.threshold:,} (threshold)"
        return "there is no decode worker"

    def _previewed(self, leg: Call) -> str:
        """Where a part would go."""
        try:
            choice = self._proxy.preview(leg)
        except CallError as error:
            return f"{leg.role}: nowhere now: {error.message}"
        return f"{leg.role}={choice.worker.id} ({choice.reason})"

    def _is_mostly_cached(self, call: Call) -> bool:
        """Whether the decode worker to which the call would go has nearly all of its prompt."""
        threshold = self._settings.threshold
        if not threshold or call.sampling.prompt_logprobs is not None:  # for these, no cache is read
            return False
        try:
            cached = self._proxy.preview(call).cached_tokens
        except BadRequest:  # no decode worker can do all of it
            return False
        return cached is not None and len(call.token_ids) - cached < threshold

    def _is_to_be_seen(self, call: Call) -> bool:
        """Whether an encode worker has to look at something first."""
        return "encode" in self._roles and bool(call.identity.media) and not call.ec_transfer_params and self._has("encode", call.model)

    def _has(self, role: Role, model: str) -> bool:
        """Whether a model has a worker of that role."""
        return any(True for _ in self._workers(role, model))

    def _workers(self, role: Role, model: str) -> Iterator[Worker]:
        """A model's workers of a role, whether they can be reached or not; of any model for a call that names none."""
        for worker in self._proxy.fleet.workers.values():
            if worker.role == role and (not model or not worker.models or model in worker.models):
                yield worker

    async def _held(self, call: Call) -> Call:
        return replace(call, stream=True, hold=self._settings.hold, retries=0)

    async def _encode(self, call: Call) -> Call:
        reply, leg = await self._leg(encode_call(call))
        seen = replace(call, ec_transfer_params=reply.ec_transfer_params, legs=(*call.legs, _told("encode", leg)), retries=1)
        seen.needs = needs_with_transfers(seen)
        return seen

    async def _prefill(self, call: Call) -> Call:
        """A hand-off is for one decode call: whether one that has failed got the blocks, nobody can tell, and when it did they are gone."""
        self._release(call)
        if self._is_mostly_cached(call):
            return call
        decode = decode_call(call, hold=self._settings.hold)
        versions = self._versions(decode)  # nothing is computed for a call that nobody can go on with
        begun = await self._encode(call) if self._is_to_be_seen(call) else call
        while True:
            reply, leg = await self._leg(prefill_call(begun, **{_NAME: versions}))
            if not reply.kv_transfer_params:
                raise CallError(502, f"prefill: {leg.worker} returned no kv_transfer_params: start vLLM with --kv-transfer-config")
            worker = self._proxy.fleet.workers.get(leg.worker)
            prefilled = Prefilled(reply, leg.worker, worker.policy_version if worker else None, trio.current_time())
            try:
                versions = self._versions(decode)
            except CallError:  # they were paused meanwhile, or lost: the core begins anew behind the gate, or says why it can't
                self._releases.add(call, prefilled)
                return decode
            if prefilled.version is None or versions & {prefilled.version, None}:
                call.notes[_NAME] = prefilled
                return take_over(decode, reply, *begun.legs, _told("prefill", leg))
            self._releases.add(call, prefilled)

    def _versions(self, decode: Call) -> frozenset[str | None]:
        """Those of the workers that may make the call's output now. Raises: the `CallError` that says why there is none."""
        return frozenset(worker.policy_version for worker in self._proxy.candidates(decode))

    def _release(self, call: Call) -> None:
        """Let go of the hand-off that the call has, if its decode worker hasn't gone on with it."""
        prefilled: Prefilled | None = call.notes.pop(_NAME, None)
        if prefilled is not None and not prefilled.is_told:
            self._releases.add(call, prefilled)

    async def _leg(self, call: Call) -> tuple[GenerateReply, Outcome]:
        """A part of the call; one that is aborted in a part is aborted, as on a worker that does all of it."""
        try:
            reply, leg = await self._proxy.leg(call)
        except CallError as error:
            if error.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                raise  # clients know these by the worker's words
            raise CallError(error.status, f"{call.role}: {error.message}", param=error.param, retry_after=error.retry_after) from error
        if reply.choices[0].finish_reason == "abort":
            raise CallAborted
        return reply, leg


def _told(role: str, leg: Outcome) -> str:
    return f"{role}={leg.worker} ({leg.route})"


def _having(workers: Sequence[Worker], versions: Set[str | None], why: str = "") -> Sequence[Worker] | None:
    """Those that have one of these versions, as far as both are known. Raises `NoWorker` when there are none, if there is a `why`."""
    if None in versions:
        return None
    having = [worker for worker in workers if worker.policy_version is None or worker.policy_version in versions]
    if not having and why:
        raise NoWorker(why)
    return having or None
