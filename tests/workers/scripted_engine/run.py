"""One request inside the scripted engine, from admission to its last token."""

import math
from collections.abc import Sequence

import msgspec

from tests.workers.scripted_engine import tokens
from tests.workers.scripted_engine.behaviour import EDITS, Behaviour, attach_routed_experts
from tests.workers.scripted_engine.encoding import end_with_what_was_seen
from tests.workers.scripted_engine.settings import Settings
from tests.workers.scripted_engine.wire import Finish, Output, PrefillStats, Request

_BEHAVIOURS = frozenset(Behaviour)


class Run:
    """A running request. `due` is when its next output may come, on the clock of `time.monotonic`."""

    def __init__(self, request: Request, settings: Settings) -> None:
        self.request = request
        self.produced = 0
        self.due = 0.0
        self.version_suffix = ""
        self.cached_tokens = 0
        self.output_token_ids: list[int] = []
        self._settings = settings
        sampling, prompt = request.sampling, request.prompt_token_ids
        self.adapter: str = request.lora[0] if request.lora else ""
        self.behaviour = Behaviour(prompt[0]) if prompt[0] in _BEHAVIOURS else None
        self.argument = prompt[1] if len(prompt) > 1 else 0
        self._weights = ""
        self._start = 0
        self._limit = min(sampling.max_tokens, settings.max_model_len - len(prompt))
        self._greedy = sampling.temperature < 1e-5
        self._stop_ids = frozenset(sampling.stop_token_ids or ())
        if self.behaviour is None:
            # Front ends always send the model's further EOS ids, which the table never holds.
            self._stop_ids &= tokens.ALPHABET
        self._plain = self.behaviour is None and not self._stop_ids and not settings.routed_experts and not settings.encodes
        self._wants_logprobs = sampling.logprobs is not None or sampling.logprob_token_ids is not None
        if self.behaviour is Behaviour.SILENT or self._stalled():
            self.due = math.inf

    def step(self, now: float, weights: str) -> Output:
        """Produce the next output with the given weights, and count it. `output.finish` says whether it was the last.

        Raises: `EngineDied` when the request's behaviour demands it.
        """
        if weights != self._weights:
            self._start = self._start_with(weights)
            self._weights = weights
        return self._plain_step(now) if self._plain else self._special_step(now)

    def token_ids(self, count: int) -> tuple[int, ...]:
        """The next `count` tokens of the plain output."""
        return tokens.token_ids(self._position, count)

    def logprobs(self, token_ids: Sequence[int], ranks: Sequence[int]) -> msgspec.Raw | None:
        """What the request asked to know about output tokens of these ranks."""
        sampling, vocab_size = self.request.sampling, self._settings.vocab_size
        if sampling.logprob_token_ids is not None:
            return tokens.selected_logprobs(token_ids, ranks, sampling.logprob_token_ids, vocab_size)
        if sampling.logprobs is not None:
            return tokens.output_logprobs(token_ids, ranks, sampling.logprobs, vocab_size)
        return None

    def _plain_step(self, now: float) -> Output:
        count = min(self._settings.tokens_per_step, self._limit - self.produced)
        output = self._table_output(count)
        self._count(output, count)
        self.due = now + self._settings.step_seconds
        return output

    def _special_step(self, now: float) -> Output:
        output = self._table_output(1)
        if self._settings.routed_experts:
            attach_routed_experts(self, output)
        if self.behaviour is not None and (edit := EDITS.get(self.behaviour)):
            edit(self, output)
        if self._settings.encodes and output.finish is None:
            end_with_what_was_seen(self.request, output)
            return output
        if output.finish is None:
            self._stop(output)
        if output.finish is not Finish.ERROR:
            self._count(output, 1)
        if self._stalled():
            self.due = math.inf
        else:
            self.due = now + (self.argument / 100 if self.behaviour is Behaviour.SLOW else self._settings.step_seconds)
        return output

    def _table_output(self, count: int) -> Output:
        output = Output(self.request.request_id, tokens.encoded_token_ids(self._position, count))
        if self._wants_logprobs:
            output.logprobs = self._table_logprobs(count)
        if self.produced == 0:
            self._attach_prefill(output)
        return output

    @property
    def _position(self) -> int:
        return (self._start + self.produced) % tokens.PERIOD

    def _start_with(self, weights: str) -> int:
        prompt, seed = self.request.prompt_token_ids, self.request.sampling.seed
        start = tokens.start_of(prompt, seed=seed, adapter=self.adapter, weights=weights)
        # For load tests a few distinct starts, so that encoded chunks come out of the cache.
        return start - start % self._settings.tokens_per_step if self._settings.fast else start

    def _table_logprobs(self, count: int) -> msgspec.Raw | None:
        position, top = self._position, self.request.sampling.logprobs
        if self.request.sampling.logprob_token_ids is None and top is not None:
            return tokens.table_logprobs(position, count, top, self._settings.vocab_size, greedy=self._greedy)
        ranks = [tokens.output_rank(position + index, greedy=self._greedy) for index in range(count)]
        return self.logprobs(self.token_ids(count), ranks)

    def _attach_prefill(self, output: Output) -> None:
        prompt, sampling, vocab_size = self.request.prompt_token_ids, self.request.sampling, self._settings.vocab_size
        if sampling.prompt_logprobs is not None:
            output.prompt_logprobs = tokens.prompt_logprobs(prompt, sampling.prompt_logprobs, vocab_size)
        if sampling.prompt_logprob_token_ids is not None:
            scored = prompt[1 + (sampling.prompt_logprob_start or 0) :]
            wanted = sampling.prompt_logprob_token_ids
            output.prompt_token_id_logprobs = tokens.selected_prompt_logprobs(scored, wanted, vocab_size)
        computed = len(prompt) - self.cached_tokens
        output.prefill = PrefillStats(len(prompt), computed, self.cached_tokens, self.cached_tokens)

    def _stop(self, output: Output) -> None:
        token = self._token_ids_of(output, 1)[0]
        if self.produced < self.request.sampling.min_tokens:
            return
        if token == self.request.sampling.eos_token_id:
            output.finish = Finish.STOP
        elif token in self._stop_ids:
            output.finish, output.stop_reason = Finish.STOP, token

    def _count(self, output: Output, count: int) -> None:
        if not self._settings.fast:
            self.output_token_ids += self._token_ids_of(output, count)
        self.produced += count
        if output.finish is None and self.produced >= self._limit:
            output.finish = Finish.LENGTH
        if output.finish is not None:
            output.kv_transfer_params = self._transfer_params()
            # An encoder cache's connector answers with what it was told.
            output.ec_transfer_params = (self.request.sampling.extra_args or {}).get("ec_transfer_params")

    def _token_ids_of(self, output: Output, count: int) -> Sequence[int]:
        return output.token_ids if isinstance(output.token_ids, list) else self.token_ids(count)

    def _stalled(self) -> bool:
        return self.behaviour is Behaviour.STALL and self.produced >= self.argument

    def _transfer_params(self) -> dict[str, object] | None:
        """What a prefill worker hands back for the decode worker: a NIXL connector's parameters, with this request's id."""
        params = (self.request.sampling.extra_args or {}).get("kv_transfer_params")
        if not params or not params.get("do_remote_decode"):
            return None
        blocks = -(-len(self.request.prompt_token_ids) // self._settings.block_size)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(blocks))],
            "remote_engine_id": self._settings.instance_id,
            "remote_request_id": self.request.request_id,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "remote_prefill_cached_tokens": self.cached_tokens,
        }
