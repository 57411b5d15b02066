"""Choose the next token of one call from a distribution, under the call's parameters."""

import math
import os
from collections.abc import Iterator, Sequence
from ctypes import c_float
from hashlib import blake2b
from itertools import accumulate, islice

from plugins.stand_in.engine.call import Candidate, Row, Sampling
from plugins.stand_in.engine.model import Context, Distribution

#: How far down the ranks sampling ever reaches.
REACH = 64

#: Up to here a temperature is greedy, and from there on it is at least `COLDEST` (vLLM 0.33, sampling parameters).
GREEDY = 1e-5
COLDEST = 0.01


class Sampler:
    """The choice of tokens for one call.

    `ends` are the ids that end the call: they are not chosen before `min_tokens`.
    """

    def __init__(self, sampling: Sampling, *, ends: frozenset[int], vocab_size: int) -> None:
        self._sampling = sampling
        self._ends = ends
        self._vocab_size = vocab_size
        self._greedy = sampling.temperature <= GREEDY
        self._plain = not (sampling.logit_bias or sampling.allowed_token_ids or sampling.bad_words or (sampling.min_tokens and ends))

    def choose(self, distribution: Distribution, context: Context, output: Sequence[int]) -> int:
        """The next token after `output`. The same for the same arguments, unless it is sampled without a seed."""
        if self._greedy and self._plain:
            return distribution.token(1)
        scored = sorted(self._candidates(distribution, self._banned(output)), key=lambda item: -item[0])
        if not scored:
            return distribution.token(1)
        if self._greedy:
            return scored[0][1]
        return self._draw(scored, context)

    def row(self, distribution: Distribution, token: int) -> Row:
        """The token with what the call wants to know of its position. Logprobs are raw: before temperature and bias."""
        if self._sampling.logprobs is None:
            return Row(token, 0.0, 0)
        ids = self._sampling.logprob_token_ids
        return describe(distribution, token, self._sampling.logprobs, ids)

    def _candidates(self, distribution: Distribution, banned: set[int]) -> Iterator[tuple[float, int]]:
        bias = self._sampling.logit_bias
        if allowed := self._sampling.allowed_token_ids:
            tokens = [token for token in dict.fromkeys(allowed) if token not in banned]
        else:
            ranked = (distribution.token(rank) for rank in range(1, self._vocab_size + 1))
            best = islice((token for token in ranked if token not in banned), REACH)
            tokens = dict.fromkeys([*best, *(token for token in bias if token not in banned)])
        for token in tokens:
            # vLLM's gRPC server clamps the bias to ±100.
            yield distribution.logprob(distribution.rank(token)) + max(-100.0, min(100.0, bias.get(token, 0.0))), token

    def _banned(self, output: Sequence[int]) -> set[int]:
        banned = set(self._ends) if len(output) < self._sampling.min_tokens else set[int]()
        for word in self._sampling.bad_words:
            start = list(word[:-1])
            if not start or list(output[-len(start) :]) == start:
                banned.add(word[-1])
        return banned

    def _draw(self, scored: list[tuple[float, int]], context: Context) -> int:
        sampling = self._sampling
        temperature = max(COLDEST, sampling.temperature)
        weights = [math.exp((score - scored[0][0]) / temperature) for score, _ in scored]
        keep = sum(weight >= sampling.min_p for weight in weights)
        if sampling.top_k:
            keep = min(keep, sampling.top_k)
        sums = list(accumulate(weights[:keep]))
        nucleus = next(place for place, total in enumerate(sums, 1) if total >= sampling.top_p * sums[-1])
        point = self._chance(context) * sums[nucleus - 1]
        return scored[next(place for place, total in enumerate(sums) if point < total)][1]

    def _chance(self, context: Context) -> float:
        """In [0, 1): from the seed and the context, so that it does not matter how often it is drawn; else at random."""
        seed = self._sampling.seed
        if seed is None:
            drawn = os.urandom(8)
        else:
            drawn = blake2b(context.digest(), key=seed.to_bytes(16, "little", signed=True), digest_size=8).digest()
        return (int.from_bytes(drawn, "little") >> 11) / 2**53


def describe(distribution: Distribution, token: int, best: int, ids: Sequence[int] | None = None) -> Row:
    """A token with its logprob and rank, and with the `best` most likely tokens (-1: all), or with `ids` in their order.

    As in vLLM 0.33, the rank of a chosen id is its place in the choice.
    """
    if ids is None:
        ranks = range(1, (distribution.size if best == -1 else best) + 1)
        candidates = [Candidate(distribution.token(rank), _single(distribution.logprob(rank)), rank) for rank in ranks]
    else:
        scored = [(one, distribution.logprob(distribution.rank(one))) for one in ids]
        candidates = [Candidate(one, _single(logprob), place) for place, (one, logprob) in enumerate(scored, 1)]
    rank = distribution.rank(token)
    return Row(token, _single(distribution.logprob(rank)), rank, candidates)


def _single(value: float) -> float:
    """In single precision, as gRPC carries it, so that both wires say the same."""
    return c_float(value).value
