"""The pseudo-model: a made-up next-token distribution for every context.

Each context is hashed together with the identity of the weights. The hash picks an order of the whole vocabulary (an affine
permutation) and how steeply probability falls along it (a power of the rank). So rank and probability of any token are one
formula away, probabilities sum to 1, and a conversation sent again with its answer goes on as it would have gone on.
"""

import math
from array import array
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

#: Exponents of the fall: from a distribution that hardly prefers anything to one that is nearly sure.
SLOPES = (1.1, 1.3, 1.5, 1.8, 2.2, 2.8, 3.6, 5.0)


class Context:
    """The tokens read so far, as a running hash."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._hash = blake2b(array("I", tokens).tobytes(), digest_size=16)

    def push(self, token: int) -> None:
        """Read one more token."""
        self._hash.update(array("I", (token,)).tobytes())

    def digest(self) -> bytes:
        """16 bytes that stand for all tokens read so far, in their order."""
        return self._hash.digest()


class Distribution:
    """The probabilities of the token that follows one context. Ranks count from 1."""

    __slots__ = ("_fall", "_log_total", "_shift", "_step", "size")

    def __init__(self, size: int, digest: bytes) -> None:
        self.size = size
        self._shift = int.from_bytes(digest[:8], "little") % size
        step = int.from_bytes(digest[8:15], "little") % size
        while math.gcd(step, size) != 1:
            step += 1
        self._step = step
        self._fall = SLOPES[digest[15] % len(SLOPES)]
        self._log_total = _log_total(size, self._fall)

    def token(self, rank: int) -> int:
        """The token at a rank."""
        return (self._shift + self._step * (rank - 1)) % self.size

    def rank(self, token: int) -> int:
        """The rank of a token."""
        return (token - self._shift) * pow(self._step, -1, self.size) % self.size + 1

    def logprob(self, rank: int) -> float:
        """Natural logarithm of the probability at a rank; always finite."""
        return -self._fall * math.log(rank) - self._log_total


class Model:
    """Distributions over a vocabulary of `vocab_size` tokens."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def distribution(self, context: Context, weights: bytes) -> Distribution:
        """What follows `context` under the weights (and adapter) that `weights` identifies."""
        return Distribution(self.vocab_size, blake2b(context.digest(), key=weights, digest_size=16).digest())


@lru_cache
def _log_total(size: int, fall: float) -> float:
    return math.log(math.fsum(rank**-fall for rank in range(1, size + 1)))
