"""One reply out of two: what concerns the prompt comes from the prefill, the rest from the decode worker."""

from typing import Any

from msgspec import Struct

from core import Call, CallError, GenerateReply, Output, PromptTokensDetails
from plugins.disaggregation.npy import join


class Prefilled(Struct):
    """A prefill's reply, who gave it with which weights and when, and whether the decode worker has gone on with it."""

    reply: GenerateReply
    worker: str
    #: `None` when the worker doesn't tell.
    version: str | None
    #: On trio's clock.
    at: float
    is_told: bool = False

    def complete_reply(self, call: Call, result: GenerateReply) -> None:
        """Put it into the decode worker's whole reply. Raises: `CallError` when rows of routed experts don't fit."""
        self.is_told = True
        reply, usage, cached = self.reply, result.usage, self._cached
        result.prompt_logprobs = reply.prompt_logprobs
        result.prompt_token_id_logprobs = reply.prompt_token_id_logprobs
        result.prompt_token_ids = reply.prompt_token_ids
        result.mm_placeholders = reply.mm_placeholders
        usage.prompt_tokens = reply.usage.prompt_tokens
        usage.total_tokens = usage.prompt_tokens + usage.completion_tokens
        usage.prompt_tokens_details = None if cached is None else PromptTokensDetails(cached)
        for choice in result.choices:
            choice.routed_experts = self._rows(call, choice.routed_experts, len(choice.token_ids))

    def complete_output(self, call: Call, output: Output) -> None:
        """Put it into a message of the decode worker's stream. Raises as `complete_reply` does."""
        reply, choice = self.reply, output.choice
        if not self.is_told:
            self.is_told = True
            output.prompt_tokens = reply.usage.prompt_tokens
            output.cached_tokens = self._cached
            output.prompt_logprobs = reply.prompt_logprobs
            output.prompt_token_id_logprobs = reply.prompt_token_id_logprobs
            output.prompt_token_ids = reply.prompt_token_ids
            output.mm_placeholders = reply.mm_placeholders
        if choice.finish_reason is not None:
            output.prompt_tokens = reply.usage.prompt_tokens
            output.cached_tokens = self._cached
            choice.routed_experts = self._rows(call, choice.routed_experts, output.completion_tokens or 0)

    @property
    def _cached(self) -> int | None:
        """How much of the prompt the prefill had cached, as far as it tells. On the decode worker all of it looks cached."""
        if details := self.reply.usage.prompt_tokens_details:
            return details.cached_tokens
        told = (self.reply.kv_transfer_params or {}).get("remote_prefill_cached_tokens")
        return told if isinstance(told, int) else None

    def _rows(self, call: Call, decoded: Any, completion: int) -> Any:
        """Where every token from the client's start on was routed, but for the last one, which was never an input."""
        start = call.sampling.routed_experts_prompt_start
        if start is None or (decoded is None and not completion):
            return decoded
        prompt = self.reply.usage.prompt_tokens
        try:
            return join(self.reply.choices[0].routed_experts, prompt - start, decoded, max(completion - 1, 0))
        except (TypeError, ValueError) as error:
            raise CallError(502, f"the routed experts of prefill and decode can't be joined: {error}") from error
