"""A call that breaks two rules is refused for the one that vllm-rs 0.33.0 checks first.

The order was found by breaking two rules at a time on the real server.
"""

from itertools import pairwise

import pytest

from plugins.stand_in.engine.adapters import Adapters
from plugins.stand_in.engine.checks import check
from plugins.stand_in.engine.refusal import Refused
from plugins.stand_in.options import Options
from plugins.stand_in.over_grpc.request import to_call
from tests.unit.stand_in.serving import request

OPTIONS = Options(vocab_size=300, max_model_len=2048)

# What breaks each rule, with a word of its refusal; in the order of the checks.
RULES = [
    ('model: "nobody"', "not found"),
    ("sampling { num_sequences: 2 }", "num_sequences"),
    ('decoding { json: "{" }', "json schema"),
    ("response { prompt_logprobs: true prompt_candidates { token_ids { ids: 1 } } }", "prompt_candidates"),
    ('lora_name: "nobody"', "not loaded"),
    ("media { modality: IMAGE }", "source is required"),
    ('stopping { stop_strings: "" }', "stop strings"),
    ('kv { cache_salt: "@" }', "cache_salt"),
    ("truncate_prompt_tokens: 5000", "truncate_prompt_tokens"),
    ("token_ids { ids: 300 }", "in prompt"),
    ("response { output_logprobs: true output_candidates { top_n: 30 } }", "requested logprobs"),
    ("response { prompt_logprobs: true prompt_candidates { top_n: 30 } }", "requested prompt_logprobs"),
    ('decoding { grammar: "" }', "grammar"),
    (f"token_ids {{ ids: {[1] * 2048} }}", "maximum context length"),
    ("stopping { min_new_tokens: 50 }", "min_tokens"),
    ("stopping { thinking_token_budget: -2 }", "thinking_token_budget"),
    ("temperature: 9", "temperature"),
    ("sampling { top_p: 9 }", "top_p"),
    ("sampling { min_p: 9 }", "min_p"),
    ("decoding { frequency_penalty: 9 }", "frequency_penalty"),
    ("decoding { presence_penalty: 9 }", "presence_penalty"),
    ("decoding { repetition_penalty: -9 }", "repetition_penalty"),
    ("stopping { stop_token_ids: 300 }", "in stop_token_ids"),
    ("decoding { allowed_token_ids: 300 }", "in allowed_token_ids"),
    ("decoding { logit_bias { key: 300 value: 1 } }", "in logit_bias"),
    ("decoding { bad_words_token_ids { } }", "empty sequences"),
    ("decoding { bad_words_token_ids { ids: 300 } }", "in bad_words"),
]


def refusal(text: str) -> str:
    with pytest.raises(Refused) as caught:
        check(to_call(request(text), OPTIONS, Adapters(enabled=True, reserved=OPTIONS.names)), OPTIONS)
    return caught.value.message


@pytest.mark.parametrize(("first", "second"), list(pairwise(RULES)), ids=lambda rule: rule[1])
def test_the_earlier_rule_wins(first, second):
    assert first[1] in refusal(second[0] + " " + first[0])
    assert second[1] in refusal(second[0])


def test_a_missing_prompt_comes_before_everything_but_the_model():
    message = request('lora_name: "nobody"')
    message.ClearField("token_ids")
    with pytest.raises(Refused, match="prompt is required"):
        to_call(message, OPTIONS, Adapters(enabled=True, reserved=OPTIONS.names))
