"""What is wrong with a call, as far as its prefill isn't asked and its decode worker would refuse it too late: after a hand-off.

Where the values are of no use to anybody, vLLM 0.33 refuses them in the same way.
"""

from collections.abc import Iterable

from core import BadRequest, Call, Worker


def check(call: Call, prefill: Iterable[Worker], decode: Iterable[Worker]) -> None:
    """The workers are those of the model, whether they are ready or not. Raises: `BadRequest`."""
    sampling = call.sampling
    if sampling.stop == "" or (isinstance(sampling.stop, list) and "" in sampling.stop):
        raise _wrong("stop", "an empty string stops nothing; send strings of one character or more")
    if sampling.stream_interval == 0:
        raise _wrong("stream_interval", "0 tokens make no message; send 1 or more")
    least, most = sampling.min_tokens, sampling.max_tokens
    if least and most and least > most:
        raise _wrong("min_tokens", f"{least} is more than max_tokens, which is {most}")
    length, prompt = _longest(decode), len(call.token_ids)
    if least and prompt < length < prompt + least:
        raise _wrong("min_tokens", f"{least} is more than the {length - prompt} tokens that the prompt leaves")
    if 0 < length <= prompt < _longest(prefill):  # else the prefill says so, in words that clients know
        why = f"This model's maximum context length is {length} tokens on its decode workers; {prompt} of prompt leave no room for output"
        raise BadRequest(why, param="input_tokens")


def _longest(workers: Iterable[Worker]) -> int:
    """The most tokens of prompt and output on one of them; 0 when nobody knows."""
    return max((worker.info.max_model_len for worker in workers if worker.info), default=0)


def _wrong(name: str, why: str) -> BadRequest:
    path = f"sampling_params.{name}"
    return BadRequest(f"{path}: {why}", param=path)
