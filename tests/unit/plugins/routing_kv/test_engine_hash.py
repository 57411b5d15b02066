"""Block hashes as vLLM computes them. These are what vLLM 0.31's own functions give; a real engine's are compared in tests/e2e."""

import pytest

from plugins.routing_kv.engine_hash import block_hashes, event_hash

#: Numbers of every length that CBOR has for them.
TOKENS = [1, 23, 24, 255, 256, 65_536, 70_000, 3]


@pytest.mark.parametrize(
    ("identity", "digests", "numbers"),
    [
        ({}, ["c1493911ccb324f9", "aa7194f6ab9908fc"], [3129330480506261839, 3771074765382862535]),
        ({"salt": "7"}, ["6e0a6209192aa3c2", "9322061a233fd3be"], [2945652773852097569, 10337856404591460485]),
        (
            {"salt": "7", "adapter": ("math", "/adapters/math"), "media": [("cat", 2, 4), ("dog", 7, 1)]},
            ["f09187dfc652ba64", "250e1a71a09e0c04"],
            [3093903034394005155, 16172427822211109710],
        ),
    ],
    ids=["plain", "salted", "everything"],
)
def test_the_hashes_are_those_of_vllm(identity, digests, numbers):
    hashes = block_hashes(TOKENS, 4, **identity)
    assert [digest.hex()[:16] for digest in hashes] == digests
    assert [event_hash(digest) for digest in hashes] == numbers
    assert block_hashes([*TOKENS, 1], 4, **identity) == hashes
    assert block_hashes(TOKENS, 4, **identity, seed="another") != hashes
