"""A worker's gRPC answer as an `Output`, and that a client can't tell it from one over HTTP."""

import json
import math

import pytest
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Struct
from hypothesis import given
from hypothesis import strategies as st

from core.call import SamplingParams
from core.errors import CallError
from core.reply import TopLogprob
from core.wire.generated.inference_pb2 import (
    CandidateTokenInfo,
    FinishInfo,
    GenerateResponse,
    PromptInfo,
    SequenceOutput,
    TokenIds,
)
from core.wire.grpc_lifting import lift_from_grpc
from core.wire.grpc_lowering import lower_to_grpc
from tests.unit.core.rig import make_call


def call_with(**sampling):
    fields = sampling.pop("call", {})
    return make_call(sampling=SamplingParams(**sampling), **fields)


def candidates(*tokens):
    return CandidateTokenInfo(tokens=[CandidateTokenInfo.TokenInfo(id=id_, logprob=value, rank=rank) for id_, value, rank in tokens])


def answer(finish=None, prompt=None, **outputs):
    message = GenerateResponse(outputs=SequenceOutput(**outputs))
    if finish is not None:
        message.outputs.finish_info.CopyFrom(finish)
    if prompt is not None:
        message.prompt_info.CopyFrom(prompt)
    return message


def test_a_unary_answer():
    message = answer(
        FinishInfo(num_output_tokens=2, finish_reason=FinishInfo.LENGTH, num_cached_tokens=0),
        PromptInfo(num_prompt_tokens=3),
        token_ids=[34, 118],
        num_tokens=2,
        text="ignored",
    )
    output = lift_from_grpc(call_with(), message, 1)
    assert (output.choice.index, output.choice.token_ids, output.choice.finish_reason) == (1, [34, 118], "length")
    assert (output.prompt_tokens, output.completion_tokens, output.cached_tokens) == (3, 2, 0)
    assert output.choice.logprobs is None
    assert output.choice.stop_reason is None
    assert output.kv_transfer_params is None


def test_vllm_031_says_nothing_of_cached_tokens():
    assert lift_from_grpc(call_with(), answer(FinishInfo(num_output_tokens=1)), 0).cached_tokens is None


@pytest.mark.parametrize(
    ("info", "reason", "stop"),
    [
        (FinishInfo(finish_reason=FinishInfo.LENGTH), "length", None),
        (FinishInfo(finish_reason=FinishInfo.ABORTED), "abort", None),
        (FinishInfo(finish_reason=FinishInfo.STOP, stop_token_id=0), "stop", 0),
        (FinishInfo(finish_reason=FinishInfo.STOP, stop_token_id=5), "stop", 5),
        (FinishInfo(finish_reason=FinishInfo.STOP, stop_string="zz"), "stop", "zz"),
        (FinishInfo(finish_reason=FinishInfo.STOP, eos_token_id=319), "stop", None),
        (FinishInfo(finish_reason=FinishInfo.NOT_FINISHED), "error", None),
    ],
)
def test_how_it_finished(info, reason, stop):
    choice = lift_from_grpc(call_with(), answer(info), 0).choice
    assert (choice.finish_reason, choice.stop_reason) == (reason, stop)


def test_a_message_in_the_middle_of_a_stream_has_no_finish_and_no_counts():
    output = lift_from_grpc(call_with(), answer(token_ids=[7]), 0)
    assert (output.choice.finish_reason, output.prompt_tokens, output.completion_tokens) == (None, None, None)


def test_what_the_stream_said_of_the_prompt_before_comes_with_its_first_output():
    output = lift_from_grpc(call_with(), answer(token_ids=[7]), 0, prompt=PromptInfo(num_prompt_tokens=3))
    assert output.prompt_tokens == 3


def test_the_prompts_tokens_come_only_when_asked_for_and_only_with_the_first_output():
    message = answer(prompt=PromptInfo(num_prompt_tokens=3, token_ids=[1, 2, 3]))
    asks = call_with(call={"return_token_ids": True})
    assert lift_from_grpc(asks, message, 0).prompt_token_ids == [1, 2, 3]
    assert lift_from_grpc(asks, message, 1).prompt_token_ids is None
    assert lift_from_grpc(call_with(), message, 0).prompt_token_ids is None


def test_sampling_masks():
    assert lift_from_grpc(call_with(), answer(sampling_mask=[TokenIds(ids=[1, 2]), TokenIds()]), 0).choice.sampling_mask == [[1, 2], []]


# --- logprobs ----------------------------------------------------------------------------------------------------------------


def content(sampling, **outputs):
    logprobs = lift_from_grpc(call_with(**sampling), answer(**outputs), 0).choice.logprobs
    assert logprobs
    return logprobs.content


def tops(entry):
    return [(top.token_id, top.rank) for top in entry.top_logprobs]


def test_without_candidates_the_sampled_token_stands_alone():
    [entry] = content({"logprobs": 0}, token_ids=[34], logprobs=[-1.5], ranks=[2], candidate_tokens=[candidates()])
    assert (entry.token_id, entry.logprob, entry.rank, entry.token) == (34, -1.5, 2, "token_id:34")
    assert entry.top_logprobs == [TopLogprob(34, -1.5, 2)]


@pytest.mark.parametrize(
    ("count", "rank", "expected"),
    [
        (1, 1, [(34, 1)]),
        (1, 2, [(34, 2), (33, 1)]),
        (5, 2, [(34, 2), (33, 1), (35, 3), (36, 4), (37, 5)]),
        (2, 9, [(34, 9), (33, 1), (35, 2)]),
    ],
)
def test_the_sampled_token_leads_and_is_not_repeated(count, rank, expected):
    ids = [33, 34, 35, 36, 37] if rank == 2 else ([34] if rank == 1 else [33, 35])
    row = candidates(*((id_, -float(i), i) for i, id_ in enumerate(ids[:count], 1)))
    [entry] = content({"logprobs": count}, token_ids=[34], logprobs=[-9.0], ranks=[rank], candidate_tokens=[row])
    assert tops(entry) == expected


def test_selected_ids_come_in_the_given_order_with_their_place_as_rank():
    row = candidates((66, -1.0, 1), (65, -2.0, 2), (66, -1.0, 3))
    [entry] = content({"logprob_token_ids": [66, 65, 66]}, token_ids=[34], logprobs=[-9.0], ranks=[7], candidate_tokens=[row])
    assert tops(entry) == [(34, 7), (66, 1), (65, 2), (66, 3)]


def test_one_selected_id_is_shown_even_when_the_sampled_token_is_the_best():
    row = candidates((66, -8.0, 1))
    [entry] = content({"logprobs": 1, "logprob_token_ids": [66]}, token_ids=[34], logprobs=[-1.0], ranks=[1], candidate_tokens=[row])
    assert tops(entry) == [(34, 1), (66, 1)]


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_what_json_cannot_hold_is_what_vllm_writes_for_it(value):
    row = candidates((35, value, 0))
    [entry] = content({"logprobs": 1}, token_ids=[34], logprobs=[value], ranks=[0], candidate_tokens=[row])
    assert [(top.logprob, top.rank) for top in entry.top_logprobs] == [(-9999.0, None)] * 2
    assert (entry.logprob, entry.rank) == (-9999.0, None)


def test_an_empty_message_of_a_call_with_logprobs_has_an_empty_list():
    assert content({"logprobs": 1}) == []


@pytest.mark.parametrize(
    "outputs",
    [
        {"token_ids": [1, 2], "logprobs": [-1.0], "ranks": [1]},
        {"token_ids": [1], "logprobs": [-1.0], "ranks": []},
        {"token_ids": [1], "logprobs": [-1.0], "ranks": [2], "candidate_tokens": []},
    ],
)
def test_lists_that_do_not_match_are_the_workers_fault_and_no_crash(outputs):
    with pytest.raises(CallError) as raised:
        lift_from_grpc(call_with(logprobs=1), answer(**outputs), 0)
    assert raised.value.status == 502


@st.composite
def engine_rows(draw):
    """What an engine says of one token: distinct candidates by rank, among them the sampled one when its rank is within k."""
    k = draw(st.integers(1, 4))
    ids = draw(st.lists(st.integers(0, 50), min_size=k + 1, max_size=k + 1, unique=True))
    values = sorted(draw(st.lists(st.floats(-20, 0, width=32), min_size=k + 1, max_size=k + 1)), reverse=True)
    rank = draw(st.integers(1, k + 3))
    sampled = (ids[rank - 1], values[rank - 1]) if rank <= k else (ids[k], values[k])
    return k, [(id_, value, i) for i, (id_, value) in enumerate(zip(ids[:k], values[:k], strict=True), 1)], (*sampled, rank)


def the_long_way(row, sampled):
    return [sampled, *(candidate for candidate in row if candidate[0] != sampled[0])]


@given(engine_rows())
def test_the_short_cut_for_the_best_token_equals_the_long_way(drawn):
    k, row, (token_id, value, rank) = drawn
    [entry] = content({"logprobs": k}, token_ids=[token_id], logprobs=[value], ranks=[rank], candidate_tokens=[candidates(*row)])
    shown = [(top.token_id, top.logprob, top.rank) for top in entry.top_logprobs]
    assert shown == the_long_way(row, (token_id, value, rank))
    assert len(shown) == (k if rank <= k else k + 1)


# --- prompt logprobs ---------------------------------------------------------------------------------------------------------


def prompt_logprobs(info, count=1, **call):
    return lift_from_grpc(call_with(prompt_logprobs=count, call=call), answer(prompt=info), 0).prompt_logprobs


def test_the_prompts_own_token_comes_first_at_each_position():
    info = PromptInfo(
        num_prompt_tokens=3,
        logprobs=[0.0, -1.0, -2.0],
        ranks=[0, 2, 1],
        candidate_tokens=[candidates(), candidates((9, -0.5, 1), (2, -1.0, 2)), candidates((3, -2.0, 1), (8, -3.0, 2))],
    )
    positions = prompt_logprobs(info, 2)
    assert positions is not None
    assert positions[0] is None
    assert [list(position or ()) for position in positions[1:]] == [["2", "9"], ["3", "8"]]
    own = (positions[1] or {})["2"]
    assert (own.logprob, own.rank, own.decoded_token) == (-1.0, 2, "token_id:2")


def test_prompt_logprobs_without_candidates_hold_the_prompts_own_tokens():
    info = PromptInfo(num_prompt_tokens=3, logprobs=[0.0, -1.0, -2.0], ranks=[0, 2, 1], candidate_tokens=[candidates()] * 3)
    assert [position and list(position) for position in prompt_logprobs(info, 0) or ()] == [None, ["2"], ["3"]]


@pytest.mark.parametrize(
    "info",
    [
        PromptInfo(num_prompt_tokens=1),
        PromptInfo(num_prompt_tokens=1, logprobs=[0.0], ranks=[0], candidate_tokens=[candidates()]),
    ],
)
def test_a_prompt_of_one_token_has_one_position_without_logprobs(info):
    assert prompt_logprobs(info, token_ids=[65]) == [None]


def test_prompt_logprobs_that_are_not_finite():
    info = PromptInfo(num_prompt_tokens=2, logprobs=[0.0, math.nan], ranks=[0, 0], candidate_tokens=[candidates()] * 2)
    position = (prompt_logprobs(info, 0, token_ids=[1, 2]) or [])[1]
    assert position
    assert (position["2"].logprob, position["2"].rank) == (-9999.0, None)


def test_prompt_logprobs_follow_the_prompt_as_the_worker_saw_it():
    info = PromptInfo(num_prompt_tokens=2, token_ids=[4, 5], logprobs=[0.0, -1.0], ranks=[0, 1], candidate_tokens=[candidates()] * 2)
    assert [position and list(position) for position in prompt_logprobs(info, 0, return_token_ids=True) or ()] == [None, ["5"]]


def test_prompt_logprobs_of_another_length_than_the_prompt_are_the_workers_fault():
    with pytest.raises(CallError) as raised:
        prompt_logprobs(PromptInfo(num_prompt_tokens=2, logprobs=[0.0, -1.0], ranks=[0, 1]))
    assert raised.value.status == 502


def test_they_come_with_the_first_output_only():
    info = PromptInfo(num_prompt_tokens=1)
    assert lift_from_grpc(call_with(prompt_logprobs=0), answer(prompt=info), 1).prompt_logprobs is None


# --- transfer parameters -----------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(max_size=5) | st.just(1.5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def as_text(params):
    """Tells 1 from 1.0 and from true; the order of keys is nobody's."""
    return json.dumps(params, sort_keys=True)


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=4))
def test_transfer_parameters_come_back_as_they_went(params):
    """Protobuf makes doubles of all numbers; what went in as an integer is one again."""
    request = lower_to_grpc(make_call(kv_transfer_params=params, ec_transfer_params=params), index=0, max_model_len=100)
    finish = FinishInfo(kv_transfer_params=request.kv.kv_transfer_params, ec_transfer_params=request.kv.ec_transfer_params)
    output = lift_from_grpc(call_with(), answer(finish), 0)
    assert as_text(output.kv_transfer_params) == as_text(params)
    assert as_text(output.ec_transfer_params) == as_text(params)


def test_a_fraction_and_a_number_beyond_2_to_the_53_stay_doubles():
    params = {"fraction": 0.5, "huge": 2.0**60, "port": 5600.0}
    output = lift_from_grpc(call_with(), answer(FinishInfo(kv_transfer_params=ParseDict(params, Struct()))), 0)
    assert as_text(output.kv_transfer_params) == '{"fraction": 0.5, "huge": 1.152921504606847e+18, "port": 5600}'


def test_a_number_that_json_cannot_hold_is_the_workers_fault():
    finish = FinishInfo()
    finish.kv_transfer_params["x"] = math.nan
    with pytest.raises(CallError) as raised:
        lift_from_grpc(call_with(), answer(finish), 0)
    assert raised.value.status == 502
