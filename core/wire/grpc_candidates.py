"""The candidates of each output token, read from a gRPC reply.

A reply has a list of candidates for each token, and Python pays for an object each time it touches one: that is most of the cost of a long
reply. So no more of them is touched than needed, and the usual case, one candidate a token, is read in bulk.
"""

from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Final

from google.protobuf.message import DecodeError

from core.reply import TopLogprob
from core.wire.generated.columns_pb2 import Columns, Reply
from core.wire.generated.inference_pb2 import CandidateTokenInfo

#: vLLM's HTTP servers write this for a logprob that JSON can't hold.
NOT_FINITE: Final = -9999.0
#: Below so many tokens the bulk costs more than it saves.
_BULK: Final = 32
#: The first byte of a row: field 1, with a length.
_TOKEN_TAG: Final = 0x0A


def candidates_of(token_id: int, row: CandidateTokenInfo) -> list[TopLogprob]:
    """The candidates for one position, in the worker's order, without the sampled token itself."""
    return [TopLogprob(other.id, finite(other.logprob), other.rank or None) for other in row.tokens if other.id != token_id]


def best_candidates(
    token_ids: Sequence[int], ranks: Sequence[int], rows: Sequence[CandidateTokenInfo], data: bytes | None
) -> Iterator[Sequence[TopLogprob]]:
    """For each token the best one of its position, unless it is that one itself, where the worker was asked for one candidate.

    `data` are the bytes of the whole reply, for a long one.
    """
    # The one candidate of a token of rank 1 is that token.
    needed = [i for i, rank in enumerate(ranks) if rank != 1]
    best = _in_bulk(data, needed, token_ids) if data and len(needed) > _BULK else None
    if best is None:
        best = {i: candidates_of(token_ids[i], rows[i]) for i in needed}
    return (best.get(i, ()) for i in range(len(token_ids)))


def _in_bulk(data: bytes, needed: Sequence[int], token_ids: Sequence[int]) -> dict[int, list[TopLogprob]] | None:
    """The only candidate of each position that is needed; `None` when the reply isn't of the simple form that this can read."""
    try:
        rows = Reply.FromString(data).outputs.candidate_tokens
        chosen = [rows[i] for i in needed]
        if any(row[0] != _TOKEN_TAG or row[1] != len(row) - 2 for row in chosen):
            return None  # not one candidate
        columns = Columns.FromString(b"".join([row[2:] for row in chosen]))
    except (DecodeError, IndexError):
        return None
    ids, values, ranks = columns.id, columns.logprob, columns.rank
    if not len(ids) == len(values) == len(ranks) == len(needed):
        return None  # a zero, which isn't on the wire
    return {
        i: [TopLogprob(id_, finite(value), rank)]
        for i, id_, value, rank in zip(needed, ids, values, ranks, strict=True)
        if id_ != token_ids[i]
    }


def finite(logprob: float) -> float:
    """A logprob that JSON can hold."""
    return logprob if isfinite(logprob) else NOT_FINITE
