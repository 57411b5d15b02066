"""Text and stop strings: what is held back, what is cut, and what a stream shows meanwhile.

Biases force the text; the expectations are what vllm-rs 0.33.0 sends for the same text.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.wire.generated import inference_pb2 as pb
from plugins.stand_in.engine.stops import StopStrings
from plugins.stand_in.engine.text import Detokenizer
from tests.unit.stand_in.serving import over_asyncio, request, worker

#: Makes the answer "abababab…": each letter is a bad word after itself.
ABAB = """
decoding { allowed_token_ids: [97, 98] bad_words_token_ids { ids: [97, 97] } bad_words_token_ids { ids: [98, 98] } }
"""


async def texts(stand_in, stopping: str) -> tuple[list[str], pb.GenerateResponse]:
    _, *messages = await stand_in.messages(request(f"{ABAB} stopping {{ {stopping} }}", tokens=6))
    return [message.outputs.text for message in messages], messages[-1]


@over_asyncio
async def test_the_answer_is_cut_before_the_stop_string_and_ends_with_the_token_that_completed_it():
    async with worker() as stand_in:
        whole = (await stand_in.generate(request(ABAB, tokens=6))).outputs.text
        a, b = whole[:2]
        found, last = await texts(stand_in, f'stop_strings: "{b}{a}{b}"')
        assert found == ["", "", a, ""]
        assert last.outputs.finish_info.finish_reason == pb.FinishInfo.STOP
        assert last.outputs.finish_info.stop_string == b + a + b
        assert last.outputs.finish_info.num_output_tokens == 4


@over_asyncio
async def test_an_included_stop_string_is_part_of_the_text_and_nothing_is_held_back():
    async with worker() as stand_in:
        a, b = (await stand_in.generate(request(ABAB, tokens=6))).outputs.text[:2]
        found, _ = await texts(stand_in, f'stop_strings: "{b}{a}{b}" include_stop_strings: true')
        assert found == [a, b, a, b]


@over_asyncio
async def test_text_lags_behind_by_the_longest_stop_string_less_one_and_catches_up_at_the_end():
    async with worker() as stand_in:
        a, b = (await stand_in.generate(request(ABAB, tokens=6))).outputs.text[:2]
        found, last = await texts(stand_in, 'stop_strings: ["zzzz", "y"]')
        assert found == ["", "", "", a, b, a + b + a + b]
        assert last.outputs.finish_info.finish_reason == pb.FinishInfo.LENGTH


@over_asyncio
async def test_a_stop_string_counts_without_text_and_more_than_the_length():
    async with worker() as stand_in:
        a, b = (await stand_in.generate(request(ABAB, tokens=6))).outputs.text[:2]
        text = f'{ABAB} stopping {{ stop_strings: "{a}{b}" }} response {{ output_text: false }}'
        outputs = (await stand_in.generate(request(text, tokens=2))).outputs
        assert (outputs.text, outputs.finish_info.stop_string) == ("", a + b)


@over_asyncio
async def test_stop_strings_in_the_first_min_tokens_go_by():
    async with worker() as stand_in:
        a, b = (await stand_in.generate(request(ABAB, tokens=6))).outputs.text[:2]
        text = f'{ABAB} stopping {{ stop_strings: "{a}{b}" min_new_tokens: 3 }}'
        assert (await stand_in.generate(request(text, tokens=6))).outputs.finish_info.num_output_tokens == 4


@pytest.mark.parametrize(("strings", "text", "found"), [(["de", "cde"], "c", "de"), (["cde", "de"], "", "cde"), (["e", "de"], "cd", "e")])
def test_of_strings_that_end_with_the_same_token_the_first_in_the_list_counts(strings, text, found):
    stops = StopStrings(strings, include=False)
    pushed = [stops.push(token) for token in "cde"]
    assert ("".join(passed for passed, _ in pushed), pushed[-1][1]) == (text, found)


def test_what_is_held_back_is_counted_in_bytes_and_never_cuts_a_character():
    stops = StopStrings(["éé"], include=False)
    assert [stops.push(token)[0] for token in "abcdé€f"] == ["", "", "", "a", "bc", "dé", ""]


@given(st.text("aé€", max_size=12), st.lists(st.text("aé€", min_size=1, max_size=3), max_size=3))
def test_the_text_is_cut_where_the_first_stop_string_begins(text, strings):
    stops = StopStrings(strings, include=False)
    passed, found = "", None
    for token in text:
        more, found = stops.push(token)
        passed += more
        if found is not None:
            break
    if found is None:
        assert passed + stops.rest() == text
        assert not any(string in text for string in strings)
    else:
        ends = [text.find(string) + len(string) for string in strings if string in text]
        assert len(passed + found) == min(ends)
        assert text.startswith(passed + found)


@pytest.mark.parametrize(
    ("prompt", "tokens", "text"),
    [
        ((), "é".encode(), ["", "é"]),
        ("é".encode()[:1], "é".encode()[1:], ["é"]),
        ("xé".encode(), b"y", ["y"]),
        ((), (0xC3, 300), ["", "\ufffd w300"]),
    ],
)
def test_a_character_comes_out_with_its_last_byte(prompt, tokens, text):
    detokenizer = Detokenizer(prompt, 256, skip_special=True)
    assert [detokenizer.push(token) for token in tokens] == text
