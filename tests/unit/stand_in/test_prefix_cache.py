"""What `num_cached_tokens` says: full blocks of a prefix that was seen under the same salt and adapter."""

from hypothesis import given
from hypothesis import strategies as st

from core.wire.generated import vllm
from plugins.stand_in.engine.prefix_cache import Namespace, PrefixCache
from tests.unit.stand_in.serving import Worker, over_asyncio, request, worker

PROMPT = tuple(range(1, 50))  # three blocks of 16 and one token more


async def cached(stand_in: Worker, text: str = "", prompt: tuple[int, ...] = PROMPT) -> int:
    response = await stand_in.generate(request(text, prompt=prompt, tokens=1))
    return response.outputs.finish_info.num_cached_tokens


@over_asyncio
async def test_full_blocks_of_a_known_prefix_are_cached():
    async with worker() as stand_in:
        assert await cached(stand_in) == 0
        assert await cached(stand_in) == 48
        assert await cached(stand_in, prompt=(*PROMPT[:40], 7, 7, 7)) == 32
        assert await cached(stand_in, prompt=(9, *PROMPT)) == 0


@over_asyncio
async def test_the_last_token_of_a_prompt_is_always_computed():
    async with worker() as stand_in:
        await cached(stand_in, prompt=PROMPT[:48])
        assert await cached(stand_in, prompt=PROMPT[:48]) == 32


@over_asyncio
async def test_the_answer_is_cached_for_the_next_turn():
    async with worker() as stand_in:
        answer = await stand_in.tokens(request("stopping { ignore_eos: true }", prompt=PROMPT, tokens=64))
        # The last token was never computed on.
        assert await cached(stand_in, prompt=(*PROMPT, *answer)) == (len(PROMPT) + 63) // 16 * 16


@over_asyncio
async def test_salt_and_adapter_keep_blocks_apart():
    async with worker() as stand_in:
        await stand_in.control.load_lora(vllm.LoadLoraRequest(lora_name="a", source_path="hub/a"))
        for text in ("", 'kv { cache_salt: "1" }', 'kv { cache_salt: "2" }', 'lora_name: "a"'):
            assert await cached(stand_in, text) == 0
            assert await cached(stand_in, text) == 48


@over_asyncio
async def test_bypassing_reads_nothing_and_still_writes():
    async with worker() as stand_in:
        for _ in range(2):
            assert await cached(stand_in, "kv { bypass_prefix_cache: true }") == 0
        assert await cached(stand_in) == 48
        assert await cached(stand_in, "response { prompt_logprobs: true }") == 0


@over_asyncio
async def test_a_pause_clears_the_cache_unless_it_is_told_not_to():
    async with worker() as stand_in:
        await cached(stand_in)
        await stand_in.post("/pause", clear_cache="false")
        await stand_in.post("/resume")
        assert await cached(stand_in) == 48
        await stand_in.control.pause_generation(vllm.PauseGenerationRequest())
        await stand_in.post("/resume")
        assert await cached(stand_in) == 0
        assert (await stand_in.post("/reset_prefix_cache")).json() == {"success": True}
        assert await cached(stand_in) == 0


@over_asyncio
async def test_the_metrics_count_looked_up_and_found_tokens():
    async with worker() as stand_in:
        for _ in range(2):
            await cached(stand_in)
        metrics = (await stand_in.http.get("/metrics")).text
        assert 'vllm:prefix_cache_queries_total{model_name="stand-in",engine="0"} 98' in metrics
        assert 'vllm:prefix_cache_hits_total{model_name="stand-in",engine="0"} 48' in metrics


@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=12), st.integers(0, 4))
def test_the_cache_never_finds_more_than_was_stored_and_keeps_to_its_bound(prompts, capacity):
    cache = PrefixCache(block_size=2, capacity=capacity)
    stored: list[list[int]] = []
    for prompt in prompts:
        found = cache.find(prompt, Namespace())
        assert found % 2 == 0
        assert found <= 2 * capacity
        assert found == 0 or any(old[:found] == prompt[:found] for old in stored)
        cache.store(prompt, Namespace())
        stored.append(prompt)
