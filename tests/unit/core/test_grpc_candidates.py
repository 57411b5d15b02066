"""Candidates read in bulk are those that are read one by one, whatever a worker sends."""

from hypothesis import given
from hypothesis import strategies as st

from core.wire.generated.inference_pb2 import CandidateTokenInfo, GenerateResponse, SequenceOutput
from core.wire.grpc_candidates import best_candidates

TokenInfo = CandidateTokenInfo.TokenInfo
UINT32 = st.integers(0, 2**32 - 1)
TOKENS = st.builds(TokenInfo, id=UINT32, logprob=st.floats(width=32), rank=UINT32)
#: What a worker sends that was asked for one candidate, and what it could send by mistake.
ROWS = st.builds(CandidateTokenInfo, tokens=st.lists(TOKENS, min_size=1, max_size=1)) | st.builds(
    CandidateTokenInfo, tokens=st.lists(TOKENS, max_size=3)
)


def read(ids, ranks, rows, data):
    return [[(top.token_id, repr(top.logprob), top.rank) for top in tops] for tops in best_candidates(ids, ranks, rows, data)]


@given(st.lists(st.tuples(UINT32, st.integers(0, 3), ROWS), min_size=40, max_size=60))
def test_any_reply_is_read_in_bulk_as_one_by_one(tokens):
    ids, ranks, rows = zip(*tokens, strict=True)
    reply = GenerateResponse(outputs=SequenceOutput(token_ids=ids, ranks=ranks, candidate_tokens=rows))
    parsed = GenerateResponse.FromString(reply.SerializeToString()).outputs.candidate_tokens
    assert read(ids, ranks, parsed, reply.SerializeToString()) == read(ids, ranks, parsed, None)


def test_the_best_token_is_shown_beside_a_sampled_one_that_is_not_the_best():
    row = CandidateTokenInfo(tokens=[TokenInfo(id=7, logprob=-0.5, rank=1)])
    reply = GenerateResponse(outputs=SequenceOutput(candidate_tokens=[row] * 50))
    tops = read([9] * 50, [2] * 49 + [1], [], reply.SerializeToString())  # no rows: only the bulk can have read them
    assert tops == [[(7, "-0.5", 1)]] * 49 + [[]]
