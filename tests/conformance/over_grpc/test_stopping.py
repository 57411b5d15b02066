"""When an output ends, and what is said about why."""

from core.wire.generated import inference_pb2 as pb
from tests.conformance.over_grpc.client import PROMPT, request
from tests.conformance.over_grpc.coverage import exercises
from tests.workers.scripted_engine import Behaviour
from tests.workers.tiny_model import IM_END

LENGTH, STOP, ABORTED = pb.FinishInfo.LENGTH, pb.FinishInfo.STOP, pb.FinishInfo.ABORTED


@exercises("GenerateRequest.stopping", "StoppingCriteria.max_new_tokens")
async def test_without_a_limit_the_context_is_filled(client):
    prompt = list(PROMPT) * 220
    room = client.worker.max_model_len - len(prompt)
    for limit in (0, room, room + 1000):
        info = (await client.generate(request(prompt=prompt, tokens=limit))).outputs.finish_info
        assert (info.num_output_tokens, info.finish_reason) == (room, LENGTH)


async def test_a_limit_of_length_names_no_cause(client):
    assert (await client.generate(request())).outputs.finish_info.WhichOneof("stop_reason") is None


@exercises("StoppingCriteria.stop_token_ids", "FinishInfo.stop_token_id")
async def test_a_stop_id_ends_the_output_and_is_its_last_token(client):
    output = await client.tokens(request(tokens=12))
    stop = output[5]
    outputs = (await client.generate(request(f"stopping {{ stop_token_ids: {stop} }}", tokens=12))).outputs
    assert list(outputs.token_ids) == output[: output.index(stop) + 1]
    assert (outputs.finish_info.finish_reason, outputs.finish_info.stop_token_id) == (STOP, stop)


@exercises("StoppingCriteria.min_new_tokens")
async def test_a_minimum_puts_off_the_end(client):
    stop = (await client.tokens(request()))[0]
    asked = f"stopping {{ stop_token_ids: {stop} min_new_tokens: 5 }}"
    outputs = (await client.generate(request(asked, tokens=12))).outputs
    assert outputs.num_tokens >= 5


@exercises("StoppingCriteria.stop_strings", "FinishInfo.stop_string")
async def test_a_stop_string_ends_the_output_and_is_left_out_of_the_text(client):
    text, string, stopped = await _stopped(client, "")
    assert stopped.text == text[: text.index(string)]
    assert (stopped.finish_info.finish_reason, stopped.finish_info.stop_string) == (STOP, string)


@exercises("StoppingCriteria.include_stop_strings")
async def test_a_stop_string_can_stay_in_the_text(client):
    text, string, stopped = await _stopped(client, "include_stop_strings: true")
    assert stopped.text == text[: text.index(string) + len(string)]


async def test_the_tokens_end_with_the_one_that_completed_the_stop_string(scripted):
    outputs = (await scripted.generate(request('stopping { stop_strings: "bc" }', prompt=[Behaviour.ECHO, *b"abcdef"], tokens=6))).outputs
    assert (bytes(outputs.token_ids), outputs.text) == (b"abc", "a")


async def test_text_is_held_back_while_a_stop_string_could_begin_in_it(scripted):
    asked = request('stopping { stop_strings: "zzz" }', prompt=[Behaviour.ECHO, *b"abcd"], tokens=4)
    messages = await scripted.stream(asked)
    assert [message.outputs.text for message in messages] == ["", "", "", "a", "bcd"]
    assert [message.outputs.num_tokens for message in messages] == [0, 1, 1, 1, 1]


@exercises("FinishInfo.eos_token_id")
async def test_an_end_of_sequence_is_named_and_stays_in_the_ids(scripted):
    outputs = (await scripted.generate(request("stopping { ignore_eos: false }", prompt=[Behaviour.EOS], tokens=9))).outputs
    assert (outputs.num_tokens, outputs.token_ids[-1], len(outputs.text)) == (3, IM_END, 2)
    assert (outputs.finish_info.finish_reason, outputs.finish_info.eos_token_id) == (STOP, IM_END)


@exercises("StoppingCriteria.ignore_eos")
async def test_an_end_of_sequence_can_be_ignored(scripted):
    outputs = (await scripted.generate(request(prompt=[Behaviour.EOS], tokens=9))).outputs
    assert (outputs.num_tokens, outputs.finish_info.finish_reason) == (9, LENGTH)


@exercises("ResponseOptions.skip_special_tokens")
async def test_special_tokens_are_left_out_of_the_text_unless_asked_for(scripted):
    prompt = [Behaviour.ECHO, 97, IM_END, 98]
    texts = [
        (await scripted.generate(request(f"response {{ skip_special_tokens: {skip} }}", prompt=prompt, tokens=3))).outputs.text
        for skip in ("true", "false")
    ]
    assert texts == ["ab", "a<|im_end|>b"]


async def test_a_repetition_counts_as_aborted(scripted):
    info = (await scripted.generate(request(prompt=[Behaviour.REPETITION], tokens=9))).outputs.finish_info
    assert (info.finish_reason, info.num_output_tokens, info.WhichOneof("stop_reason")) == (ABORTED, 3, None)


async def _stopped(client, options):
    """The text of a long output, a string out of its middle, and the output that stops there."""
    text = (await client.generate(request(tokens=40))).outputs.text
    # What was decoded from broken bytes may come out otherwise when it is cut, so the string is of ASCII.
    string = next(text[i : i + 2] for i in range(4, len(text)) if text[i : i + 2].isascii() and len(text[i : i + 2]) == 2)
    asked = request(f"stopping {{ {options} }}", tokens=40)
    asked.stopping.stop_strings.append(string)
    return text, string, (await client.generate(asked)).outputs
