"""The KV events that a stand-in publishes are those of its prefix cache, in vLLM's form, and can be replayed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from core.wire.generated import vllm
from plugins.stand_in.kv_events import KVEventsConfig
from tests.unit.stand_in.serving import Worker, over_asyncio, request, worker

CONFIG = KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:0", replay_endpoint="tcp://*:0", topic="kv")
PROMPT = list(range(1, 42))  # two blocks of 16 and some tokens
END = b"\xff" * 8


class Subscriber:
    def __init__(self, context: zmq.asyncio.Context, events: str, replay: str, rank: int = 0) -> None:
        self._replay = replay
        self._rank = rank
        self._context = context
        self.socket = context.socket(zmq.SUB)
        self.socket.connect(events)
        self.socket.subscribe(b"kv")

    async def replayed(self, start: int = 0) -> list[tuple[int, list[dict[str, Any]]]]:
        """The numbers and events of the batches that are kept."""
        batches = []
        with self._context.socket(zmq.DEALER) as socket:
            socket.connect(self._replay)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            while (frames := await socket.recv_multipart())[2] != END:
                assert frames[:2] == [b"", b"kv"]
                batches.append((int.from_bytes(frames[2], "big"), events_of(frames[3], self._rank)))
            assert frames == [b"", b"", END, b""]
        return batches


def events_of(payload: bytes, rank: int = 0) -> list[dict[str, Any]]:
    timestamp, events, published_by = msgspec.msgpack.decode(payload)
    assert isinstance(timestamp, float)
    assert published_by == rank
    return events


@asynccontextmanager
async def publishing(**options: Any) -> AsyncIterator[tuple[Worker, Subscriber]]:
    async with worker(kv_events=CONFIG, **options) as stand_in:
        [source] = (await stand_in.control.get_kv_event_sources(vllm.GetKvEventSourcesRequest())).sources
        with zmq.asyncio.Context() as context:
            subscriber = Subscriber(context, source.endpoint, source.replay_endpoint)
            yield stand_in, subscriber
            subscriber.socket.close(linger=0)


async def ask(stand_in: Worker, prompt: list[int] = PROMPT, text: str = "") -> None:
    await stand_in.generate(request(text, prompt=prompt, tokens=1))


def stored(hashes: list[int], **members: Any) -> dict[str, Any]:
    plain = {"type": "BlockStored", "parent_block_hash": None, "block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": None}
    more = {"extra_keys": [None] * len(hashes), "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    return {**plain, "block_hashes": hashes, **more, **members}


@over_asyncio
async def test_new_blocks_are_announced_once_and_continue_those_before_them():
    async with publishing() as (stand_in, subscriber):
        await ask(stand_in)
        await ask(stand_in)
        await ask(stand_in, [*PROMPT, *range(100, 110)])
        [(number, [first]), (next_number, [second])] = await subscriber.replayed()
        assert (number, next_number) == (0, 1)
        assert first == stored(first["block_hashes"], token_ids=PROMPT[:32])
        assert len(set(first["block_hashes"])) == 2
        continued = {"parent_block_hash": first["block_hashes"][1], "token_ids": [*PROMPT[32:], *range(100, 107)]}
        assert second == stored(second["block_hashes"], **continued)


@over_asyncio
async def test_salts_and_adapters_are_in_the_extra_keys():
    async with publishing() as (stand_in, subscriber):
        await stand_in.control.load_lora(vllm.LoadLoraRequest(lora_name="math", source_path="hub/math"))
        await ask(stand_in, text='kv { cache_salt: "7" }')
        await ask(stand_in, text='lora_name: "math" kv { cache_salt: "7" }')
        [(_, [salted]), (_, [adapted])] = await subscriber.replayed()
        assert (salted["extra_keys"], salted["lora_name"]) == ([["7"], None], None)
        assert (adapted["extra_keys"], adapted["lora_name"], adapted["lora_id"]) == ([["math", "7"], ["math"]], "math", 1)


@over_asyncio
async def test_evicted_blocks_and_a_reset_are_announced():
    async with publishing(cache_blocks=2) as (stand_in, subscriber):
        await ask(stand_in)
        await ask(stand_in, [*range(200, 216), 1])
        await stand_in.http.post("/reset_prefix_cache")
        [(_, [first]), (_, [_, removed]), (_, [cleared])] = await subscriber.replayed()
        assert removed == {"type": "BlockRemoved", "block_hashes": first["block_hashes"][:1], "medium": "GPU", "group_idx": 0}
        assert cleared == {"type": "AllBlocksCleared"}
        assert await subscriber.replayed(2) == [(2, [cleared])]


@over_asyncio
async def test_subscribers_get_what_is_published_after_they_came():
    async with publishing() as (stand_in, subscriber):
        number = 0
        while not await subscriber.socket.poll(50):  # ZeroMQ drops what it publishes before the subscription has reached it
            number += 1
            await ask(stand_in, [number, *PROMPT])
        topic, received, payload = await subscriber.socket.recv_multipart()
        replayed = dict(await subscriber.replayed())
        assert (topic, events_of(payload)) == (b"kv", replayed[int.from_bytes(received, "big")])


@over_asyncio
async def test_both_wires_tell_where_it_publishes():
    async with publishing() as (stand_in, _):
        [source] = (await stand_in.control.get_kv_event_sources(vllm.GetKvEventSourcesRequest())).sources
        told = (await stand_in.http.get("/kv_event_sources")).json()
        assert told["0"]["endpoint"] == source.endpoint
        assert told["0"]["replay_endpoint"] == source.replay_endpoint
        assert (source.transport, source.topic, source.encoding, source.data_parallel_rank) == ("zmq", "kv", "msgpack", 0)


@over_asyncio
async def test_an_address_that_is_taken_is_an_error():
    async with publishing() as (stand_in, _):
        [source] = (await stand_in.control.get_kv_event_sources(vllm.GetKvEventSourcesRequest())).sources
        taken = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://*:{source.endpoint.rpartition(':')[2]}")
        with pytest.raises((OSError, ExceptionGroup)):
            async with worker(kv_events=taken):
                pass


@over_asyncio
async def test_each_rank_publishes_what_it_has_at_a_place_of_its_own():
    async with worker(kv_events=CONFIG, data_parallel_size=2) as stand_in:
        for rank, prompt in (("1", PROMPT), ("0", [*range(200, 216), 1])):
            await stand_in.generate(request(prompt=prompt, tokens=1), x_data_parallel_rank=rank)
        sources = (await stand_in.control.get_kv_event_sources(vllm.GetKvEventSourcesRequest())).sources
        assert [source.data_parallel_rank for source in sources] == [0, 1]
        told = (await stand_in.http.get("/kv_event_sources")).json()
        assert [told[str(rank)]["endpoint"] for rank in (0, 1)] == [source.endpoint for source in sources]
        found = []
        with zmq.asyncio.Context() as context:
            for source in sources:
                subscriber = Subscriber(context, source.endpoint, source.replay_endpoint, source.data_parallel_rank or 0)
                [(_, [stored])] = await subscriber.replayed()
                found.append(stored["token_ids"])
                subscriber.socket.close(linger=0)
        assert found == [list(range(200, 216)), PROMPT[:32]]


def test_the_ports_of_a_rank_are_those_of_the_first_and_its_number():
    config = KVEventsConfig(endpoint="tcp://*:5557", replay_endpoint="tcp://*:5560")
    second = config.at_rank(2)
    assert (second.endpoint, second.replay_endpoint) == ("tcp://*:5559", "tcp://*:5562")
    assert config.at_rank(0) == config
    free = KVEventsConfig(endpoint="tcp://*:0")
    assert free.at_rank(1) == free
    pipe = KVEventsConfig(endpoint="ipc:///tmp/events")
    assert pipe.at_rank(0) == pipe
    with pytest.raises(OSError, match="no port"):
        pipe.at_rank(1)
