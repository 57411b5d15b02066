"""What connectors of a KV or an encoder cache are told, and tell."""

from google.protobuf.json_format import MessageToDict, ParseDict

from tests.conformance.over_grpc.client import PROMPT, request
from tests.conformance.over_grpc.coverage import exercises

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_port": None}


def with_kv(params, **fields):
    message = request(**fields)
    ParseDict(params, message.kv.kv_transfer_params)
    return message


@exercises("KVCacheParameters.kv_transfer_params", "FinishInfo.kv_transfer_params")
async def test_a_prefill_call_returns_what_its_decode_call_needs(client):
    if client.worker.kind == "engine":
        # This engine has no connector: it takes the parameters and returns none.
        outputs = (await client.generate(with_kv(PREFILL, tokens=1))).outputs
        assert not outputs.finish_info.HasField("kv_transfer_params")
        return
    for reply in (await client.generate(with_kv(PREFILL, tokens=1)), (await client.stream(with_kv(PREFILL, tokens=1)))[-1]):
        params = MessageToDict(reply.outputs.finish_info.kv_transfer_params)
        assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
        assert params["remote_port"] == int(params["remote_port"]) > 0
        assert params["remote_block_ids"] == [[0.0]]
        assert (await client.generate(with_kv(params))).outputs.num_tokens == 4


async def test_whole_numbers_reach_the_engine_as_integers(scripted):
    given = {"port": 5600, "large": 2**53 - 1, "half": 0.5, "none": None, "deep": {"list": [1, 2.5, "3"]}}
    since = len(scripted.worker.engine_events())
    await scripted.generate(with_kv(given))
    taken = scripted.worker.wait_for_event("add", since=since)["sampling_params"]["extra_args"]["kv_transfer_params"]
    assert taken == given
    assert [type(taken[key]) for key in ("port", "large", "half")] == [int, int, float]


@exercises("KVCacheParameters.ec_transfer_params", "FinishInfo.ec_transfer_params")
async def test_parameters_of_an_encoder_cache_go_both_ways(scripted):
    message = request(prompt=PROMPT)
    ParseDict({"ec_items": [], "step": 3}, message.kv.ec_transfer_params)
    since = len(scripted.worker.engine_events())
    reply = await scripted.generate(message)
    sampling = scripted.worker.wait_for_event("add", since=since)["sampling_params"]
    assert sampling["extra_args"]["ec_transfer_params"] == {"ec_items": [], "step": 3}
    assert MessageToDict(reply.outputs.finish_info.ec_transfer_params) == {"ec_items": [], "step": 3.0}
