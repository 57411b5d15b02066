"""Routed experts: which experts each token went through, so that a trainer can replay the routing.

vLLM answers with a `.npy` file in base64, over HTTP only; trainers splice raw rows out of the reply. This plugin sends a call that asks
for them to where they can be had, proves that every row is there, and gives them in the form that the client reads.
"""

from collections.abc import Sequence
from typing import Final, Literal

import msgspec
from msgspec import Struct

from core import OVER_HTTP, BadRequest, Call, CallError, GenerateReply, Output, PluginSettings, Worker, hookimpl
from plugins.routed_experts.npy import read_data, read_header

Form = Literal["raw", "npy"]

_NAME: Final = "routed-experts"
HEADER: Final = "x-headrace-routed-experts"
_KEY: Final = "return_routed_experts"
_START: Final = "sampling_params.routed_experts_prompt_start"


class Settings(PluginSettings, frozen=True):
    """`[plugins.routed-experts]`."""

    form: Form = "raw"  #: `raw`: `{"data", "shape", "start", "dtype"}`; `npy`: vLLM's string. A call's `x-headrace-routed-experts` wins
    always: bool = False  #: every call asks that doesn't say no: for clients that say nothing and take what comes
    workers: tuple[str, ...] = ()  #: ids of the workers that capture (`--enable-return-routed-experts`); empty: all of them


class Rows(Struct, frozen=True):
    """The rows of one output. `data`, base64 in the reply, stands first: clients look for it there; `start` is the first row's position."""

    data: memoryview
    shape: tuple[int, int, int]
    start: int
    dtype: str


class RoutedExperts:
    """A call asks with `return_routed_experts: true`, or with `sampling_params.routed_experts_prompt_start`; `false` says no to all."""

    settings_type = Settings

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._workers = frozenset(settings.workers)

    @hookimpl
    def receive_call(self, call: Call) -> None:
        """See `core.hookspecs`."""
        if call.relayed:  # its answer isn't looked into
            return
        asked, by = self._settings.always, "plugins.routed-experts.always"
        if call.unclaimed and (raw := call.unclaimed.pop(_KEY, None)) is not None and (said := _flag(raw)) is not None:
            asked, by = said, _KEY
            if not said:
                call.sampling.routed_experts_prompt_start = None
                call.needs.discard(_START)
                call.notes[_NAME] = said
        if not asked and call.sampling.routed_experts_prompt_start is None:
            return
        _check(call)
        if asked:
            call.need(OVER_HTTP, by=by)
            if call.sampling.routed_experts_prompt_start is None:
                call.sampling.routed_experts_prompt_start = 0

    @hookimpl
    def eligible_workers(self, call: Call, workers: Sequence[Worker]) -> Sequence[Worker] | None:
        """See `core.hookspecs`."""
        if call.sampling.routed_experts_prompt_start is None or not self._workers:
            return None
        capturing = [worker for worker in workers if worker.id in self._workers]
        if not capturing:
            raise BadRequest(f"{_KEY}: no worker that is ready captures them (plugins.routed-experts.workers)", param=_KEY)
        return capturing

    @hookimpl
    def lift_output(self, call: Call, output: Output) -> None:
        """See `core.hookspecs`."""
        choice = output.choice
        if _NAME in call.notes:
            choice.routed_experts = None
            return
        if choice.finish_reason is None and choice.routed_experts is None:
            return
        if choice.routed_experts is None and call.sampling.routed_experts_prompt_start is None:
            return
        prompt, completion = output.prompt_tokens, output.completion_tokens
        if prompt is None or completion is None:
            raise CallError(502, "routed experts: the worker doesn't tell how many tokens its stream has, so their rows can't be checked")
        choice.routed_experts = self._lifted(call, choice.routed_experts, choice.finish_reason, prompt, completion)

    @hookimpl
    def lift_result(self, call: Call, result: GenerateReply) -> None:
        """See `core.hookspecs`."""
        for choice in result.choices:
            if _NAME in call.notes:
                choice.routed_experts = None
            elif choice.routed_experts is not None or call.sampling.routed_experts_prompt_start is not None:
                prompt, completion = result.usage.prompt_tokens, len(choice.token_ids)
                choice.routed_experts = self._lifted(call, choice.routed_experts, choice.finish_reason, prompt, completion)

    def _lifted(self, call: Call, encoded: object, finish_reason: str | None, prompt: int, completion: int) -> Rows | str | None:
        """What the client gets of the worker's rows; `prompt` and `completion` in tokens."""
        if finish_reason == "abort" and not completion:  # nothing was sampled, and of the prompt there may be any part
            return None
        if encoded is None:
            raise CallError(502, "the worker returned no routed experts: start vLLM with --enable-return-routed-experts")
        start = call.sampling.routed_experts_prompt_start or 0
        form = call.headers.get(HEADER, self._settings.form)
        try:
            # The last token was never an input.
            return _formed(encoded, form, start, prompt + completion - 1 - start)
        except (TypeError, ValueError) as error:
            raise CallError(502, f"the worker's routed experts can't be used: {error}") from error


def _formed(encoded: object, form: str, start: int, rows: int) -> Rows | str:
    if not isinstance(encoded, str):
        raise TypeError(f"they are a {type(encoded).__name__}, not a string")
    header = read_header(encoded)
    if header.shape[0] != rows:
        raise ValueError(f"there are {header.shape[0]} rows, and the tokens from position {start} on make {rows}")
    return encoded if form == "npy" else Rows(read_data(encoded, header), header.shape, start, header.dtype)


def _flag(raw: msgspec.Raw) -> bool | None:
    """What the client said; a null is nothing."""
    try:
        return msgspec.json.decode(raw, type=bool | None)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{_KEY}: {error}", param=_KEY) from error


def _check(call: Call) -> None:
    form = call.headers.get(HEADER)
    if form not in (None, "raw", "npy"):
        raise BadRequest(f"{HEADER}: {form!r} is no form; send raw or npy", param=HEADER)
    # A decode worker doesn't run the prompt, so what it would report there was never routed; the prefill's reply has those rows.
    handed_over = bool(call.kv_transfer_params and call.kv_transfer_params.get("do_remote_prefill"))
    if handed_over and call.sampling.routed_experts_prompt_start != len(call.token_ids):
        raise BadRequest(
            f"{_START}: after a remote prefill only the rows from position {len(call.token_ids)} on are routed here; "
            "send that, and take the prompt's rows from the prefill's reply",
            param=_START,
        )
