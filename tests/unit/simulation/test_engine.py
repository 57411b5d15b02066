"""The worker model, where its numbers can be worked out by hand."""

from collections.abc import AsyncIterator

import pytest
import trio

from core.call import Call, SamplingParams
from core.simulation.engine import EngineModel, PrefixCache, SimulatedEngine, Timing
from core.simulation.trace import Turn

MODEL = EngineModel(
    prefill_tokens_per_second=100, decode_seconds=0.1, decode_seconds_per_call=0.1, max_running=2, kv_blocks=100, block_size=10
)


@pytest.fixture
async def engine(nursery: trio.Nursery) -> AsyncIterator[SimulatedEngine]:
    engine = SimulatedEngine("w0", MODEL)
    nursery.start_soon(engine.run)
    yield engine
    nursery.cancel_scope.cancel()


async def generate(engine: SimulatedEngine, blocks: list[int], output_tokens: int = 1, **fields: object) -> Timing:
    turn = Turn(session="s", at=0.0, blocks=blocks, prompt_tokens=10 * len(blocks), output_tokens=output_tokens, **fields)  # pyright: ignore[reportArgumentType]
    call = Call(id="c", token_ids=[], sampling=SamplingParams(), notes={"simulation": (turn, Timing(trio.current_time()))})
    await engine.generate(call, engine.lower(call, 0), 0)
    return call.notes["simulation"][1]


async def test_a_call_takes_its_prefill_and_its_tokens(engine, autojump_clock):
    timing = await generate(engine, [1, 2], 5)
    assert (timing.prefilled, timing.first_token, timing.ended) == pytest.approx((0.0, 0.2, 0.7))
    assert engine.computed_tokens == 25


async def test_what_is_cached_is_not_prefilled(engine, autojump_clock):
    await generate(engine, [1, 2])
    timing = await generate(engine, [1, 2, 3])
    assert timing.cached_tokens == 20
    assert timing.first_token - timing.prefilled == pytest.approx(0.1)


async def test_another_salt_shares_nothing(engine, autojump_clock):
    await generate(engine, [1, 2], salt="1")
    assert (await generate(engine, [1, 2], salt="2")).cached_tokens == 0


async def test_what_a_call_has_said_is_cached_for_the_next_turn(engine, autojump_clock):
    await generate(engine, [1], output_blocks=[2])
    assert (await generate(engine, [1, 2, 3])).cached_tokens == 20


async def test_prefills_follow_one_another_and_calls_slow_each_other_down(engine, autojump_clock):
    timings: list[Timing] = []

    async def one(block: int) -> None:
        timings.append(await generate(engine, [block], 10))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one, 1)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(one, 2)
    first, second = timings
    assert second.prefilled == pytest.approx(0.1)
    # The first decodes one token alone until 0.2 s, then both take 0.2 s a token; the second has its last one for itself.
    assert first.ended == pytest.approx(0.2 + 9 * 0.2)
    assert second.ended == pytest.approx(first.ended + 0.1)


async def test_who_finds_the_batch_full_waits(engine, autojump_clock):
    timings: list[Timing] = []

    async def one(block: int) -> None:
        timings.append(await generate(engine, [block], 10))

    async with trio.open_nursery() as nursery:
        for block in range(3):
            nursery.start_soon(one, block)
    assert timings[2].prefilled == pytest.approx(timings[0].ended)


def test_the_least_recently_used_blocks_go_first():
    cache = PrefixCache(3)
    cache.store([1, 2], "")
    cache.store([3], "")
    cache.store([1], "")
    cache.store([4], "")
    assert cache.cached([1], "") == 1
    assert cache.cached([2], "") == 0


def test_the_head_of_a_prompt_outlives_its_tail():
    cache = PrefixCache(2)
    cache.store([1, 2, 3], "")
    assert cache.cached([1, 2, 3], "") == 2
