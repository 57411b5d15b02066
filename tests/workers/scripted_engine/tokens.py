"""The scripted model: which token comes next, and how likely every token was.

Output `i` of a request is `TABLE[(start + i) % PERIOD]`, where `start` is a hash of everything that would change a real model's
output: prompt, seed, adapter and weights. It's never the salt. All outputs are printable ASCII, one byte each.

At every position, prompt and output alike, the token of rank `r` has the log-probability `−r · ln 2`; the vocabulary is ranked
cyclically around the token that stands there. So whatever a reply says about log-probabilities and ranks can be checked by hand.
"""

import array
import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

import msgspec
from msgspec import msgpack

from tests.workers.scripted_engine.wire import array_of, tensor_of

PERIOD = 4096
_STREAM = b"".join(hashlib.sha256(block.to_bytes(2, "little")).digest() for block in range(PERIOD // 32))
TABLE = tuple(0x20 + byte % 95 for byte in _STREAM)
ALPHABET = frozenset(TABLE)

# Room for every position, in a few combinations of the other arguments.
_CACHED = 8 * PERIOD


def start_of(prompt: Sequence[int], *, seed: int | None, adapter: str, weights: str) -> int:
    """The place in `TABLE` from which the output of a request is read."""
    context = f"{seed}|{adapter}|{weights}".encode()
    digest = hashlib.blake2b(array.array("I", prompt).tobytes() + context, digest_size=4).digest()
    return int.from_bytes(digest, "little") % PERIOD


def logprob(rank: int) -> float:
    """The log-probability of the token of a rank (1 is the likeliest)."""
    return -rank * math.log(2)


def rank_of(token: int, *, around: int, rank: int, vocab_size: int) -> int:
    """The rank of `token` at a position where the token `around` has the rank `rank`."""
    return (token - around + rank - 1) % vocab_size + 1


def output_rank(position: int, *, greedy: bool) -> int:
    """The rank of the token that is sampled at a place in `TABLE`: 1 when greedy, else 1 to 3."""
    return 1 if greedy else 1 + TABLE[position % PERIOD] % 3


def prompt_rank(token: int) -> int:
    """The rank of a prompt token, 1 to 5."""
    return 1 + token % 5


@lru_cache(maxsize=_CACHED)
def token_ids(position: int, count: int) -> tuple[int, ...]:
    """`count` tokens of the table, from `position` (below `PERIOD`) on."""
    repeats = 1 + (position + count) // PERIOD
    return (TABLE * repeats)[position : position + count]


@lru_cache(maxsize=_CACHED)
def encoded_token_ids(position: int, count: int) -> msgspec.Raw:
    """`token_ids`, ready to be put into an output."""
    return msgspec.Raw(msgpack.encode(token_ids(position, count)))


@lru_cache(maxsize=_CACHED)
def table_logprobs(position: int, count: int, top: int, vocab_size: int, *, greedy: bool) -> msgspec.Raw:
    """Log-probabilities of `token_ids(position, count)`, with the `top` likeliest (−1: all) of each position."""
    tokens = token_ids(position, count)
    ranks = [output_rank(position + index, greedy=greedy) for index in range(count)]
    return output_logprobs(tokens, ranks, top, vocab_size)


def output_logprobs(tokens: Sequence[int], ranks: Sequence[int], top: int, vocab_size: int) -> msgspec.Raw:
    """One row for each token: the token itself first, then the `top` likeliest (−1: all), best first."""
    ids, values, width = _rows(tokens, ranks, vocab_size if top == -1 else top, vocab_size)
    return _output_arrays(ids, values, ranks, width)


def selected_logprobs(tokens: Sequence[int], ranks: Sequence[int], wanted: Sequence[int], vocab_size: int) -> msgspec.Raw:
    """One row for each token: the token itself first, then the wanted ids in the order in which they were given."""
    ids: list[int] = []
    values: list[float] = []
    for token, rank in zip(tokens, ranks, strict=True):
        ids += [token, *wanted]
        values.append(logprob(rank))
        values += [logprob(rank_of(other, around=token, rank=rank, vocab_size=vocab_size)) for other in wanted]
    return _output_arrays(ids, values, ranks, 1 + len(wanted))


def nan_logprobs(tokens: Sequence[int]) -> msgspec.Raw:
    """What broken logits give: not a number, of rank 0, for each token."""
    return _output_arrays(tokens, [math.nan] * len(tokens), [0] * len(tokens), 1)


def prompt_logprobs(prompt: Sequence[int], top: int, vocab_size: int) -> msgspec.Raw:
    """Rows for every prompt token but the first, so none for a prompt of one token."""
    tokens = prompt[1:]
    ranks = [prompt_rank(token) for token in tokens]
    ids, values, width = _rows(tokens, ranks, vocab_size if top == -1 else top, vocab_size)
    shape = (len(tokens), width)
    arrays = tensor_of(ids, shape, "int32"), tensor_of(values, shape, "float32"), tensor_of(ranks, shape[:1], "int32"), None
    return msgspec.Raw(msgpack.encode(arrays))


def selected_prompt_logprobs(scored: Sequence[int], wanted: Sequence[Sequence[int]], vocab_size: int) -> msgspec.Raw:
    """For each scored prompt token, the log-probabilities of the ids that are wanted in its place; −∞ for −1, which pads."""
    values = [
        logprob(rank_of(other, around=token, rank=prompt_rank(token), vocab_size=vocab_size)) if other >= 0 else -math.inf
        for token, row in zip(scored, wanted, strict=True)
        for other in row
    ]
    return msgspec.Raw(msgpack.encode(tensor_of(values, (len(wanted), len(values) // max(1, len(wanted))), "float32")))


def _rows(tokens: Sequence[int], ranks: Sequence[int], top: int, vocab_size: int) -> tuple[list[int], list[float], int]:
    best = [logprob(rank) for rank in range(1, top + 1)]
    ids: list[int] = []
    values: list[float] = []
    for token, rank in zip(tokens, ranks, strict=True):
        ids.append(token)
        ids += [(token + other - rank) % vocab_size for other in range(1, top + 1)]
        values.append(logprob(rank))
        values += best
    return ids, values, 1 + top


def _output_arrays(ids: Sequence[int], values: Sequence[float], ranks: Sequence[int], width: int) -> msgspec.Raw:
    shape = (len(ranks), width)
    arrays = array_of(ids, shape, "<i8"), array_of(values, shape, "<f4"), array_of(ranks, shape[:1], "<i8"), None
    return msgspec.Raw(msgpack.encode(arrays))
