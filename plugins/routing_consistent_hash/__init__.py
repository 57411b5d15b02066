"""Consistent hash: calls with the same key go to the same worker, and when one leaves only its own keys move.

Rendezvous hashing: each pair of key and worker has a rank among all, and a call goes to the worker that ranks highest for its key. Nothing
is remembered, so any number of proxies agree, and so does one that was started anew.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final

from core import Call, Choice, Worker, hookimpl, ranks_for
from plugins.routing_consistent_hash.keys import key_of

_64_BITS: Final = (1 << 64) - 1


class ConsistentHash:
    """Chooses by the key that `keys` finds."""

    @hookimpl
    def choose_worker(self, call: Call, workers: Sequence[Worker]) -> Choice:
        """See `core.hookspecs`."""
        name, key = key_of(call)
        slots = [(worker, rank) for worker in workers for rank in ranks_for(call, worker)]
        worker, rank = max(slots, key=lambda slot: _mix(key ^ _hash_slot(slot[0].id, slot[1])))
        return Choice(worker, f"consistent-hash: by {name}", rank)


@lru_cache(maxsize=1 << 16)
def _hash_slot(worker: str, rank: int | None) -> int:
    return int.from_bytes(blake2b(f"{rank} {worker}".encode(), digest_size=8).digest())


def _mix(number: int) -> int:
    """A number of 64 bits in which each bit depends on all of them: MurmurHash3's finalizer, cheap enough for each worker."""
    number = (number ^ number >> 33) * 0xFF51AFD7ED558CCD & _64_BITS
    return (number ^ number >> 33) * 0xC4CEB9FE1A85EC53 & _64_BITS
