"""Consistent hash: calls with the same key go to the same worker, and when one leaves only its own keys move.

Rendezvous hashing: each pair of key and worker has a rank among all, and a call goes to the worker that ranks highest for its key. Nothing
is remembered of calls, so any number of proxies agree, and so does one that was started anew.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

from core import Call, Choice, Worker, WorkerInfo, hookimpl, ranks_for
from plugins.routing_consistent_hash.keys import key_of

#: Groups of workers that are remembered: there is one for each model, role and need of calls.
_MOST: Final = 100


class _Slots(NamedTuple):
    """The workers, or ranks of them, that a call may go to."""

    #: What each worker said of itself: one that comes back may have other ranks.
    infos: list[WorkerInfo | None]
    places: list[tuple[Worker, int | None]]
    #: A number of 64 bits for each place.
    numbers: list[int]


class ConsistentHash:
    """Chooses by the key that `keys` finds."""

    def __init__(self) -> None:
        self._known: dict[tuple[int | None, tuple[Worker, ...]], _Slots] = {}

    @hookimpl
    def choose_worker(self, call: Call, workers: Sequence[Worker]) -> Choice:
        """See `core.hookspecs`."""
        name, key = key_of(call)
        slots = self._slots(call, tuple(workers))
        # A whole number's hash is its remainder by the prime 2 ** 61 - 1, in every process, and takes a tenth of a microsecond with this.
        # Without the `^`, one key's ranking would say something of those that are multiples of it.
        ranking = [hash((key ^ number) * number) for number in slots.numbers]
        worker, rank = slots.places[ranking.index(max(ranking))]
        return Choice(worker, f"consistent-hash: by {name}", rank)

    def _slots(self, call: Call, workers: tuple[Worker, ...]) -> _Slots:
        infos = [worker.info for worker in workers]
        slots = self._known.get((call.data_parallel_rank, workers))
        if slots is None or slots.infos != infos:
            places = [(worker, rank) for worker in workers for rank in ranks_for(call, worker)]
            slots = _Slots(infos, places, [_number(worker.id, rank) for worker, rank in places])
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[call.data_parallel_rank, workers] = slots
        return slots


def _number(worker: str, rank: int | None) -> int:
    return int.from_bytes(blake2b(f"{rank} {worker}".encode(), digest_size=8).digest())
