"""Each worker that is there is followed, and no other, as soon as somebody wants to know."""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import trio
import zmq
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from structlog.testing import capture_logs
from trio.testing import wait_all_tasks_blocked

from core import Proxy, Worker
from core.registry import Loaded, Registry
from core.settings import Settings as HeadraceSettings
from core.settings import WorkerSettings
from core.wire.generated.vllm import GetKvEventSourcesRequest, GetKvEventSourcesResponse, KvEventSource
from plugins.routing_kv import KV, Settings
from plugins.routing_kv import addresses as addresses_module
from plugins.routing_kv.sockets import Socket
from plugins.routing_kv.sources import SourceSettings
from plugins.routing_round_robin import RoundRobin
from tests.unit.plugins.routing_kv.prompts import call_of
from tests.unit.plugins.routing_kv.publisher import Publisher, publishing
from tests.unit.plugins.routing_kv.test_policy import worker_of
from tests.unit.plugins.routing_kv.test_subscription import block
from tests.workers.processes import free_ports


class Control:
    """Tells these answers, one after the other, and then nothing."""

    def __init__(self, *answers: Exception | list[KvEventSource]) -> None:
        self._answers = list(answers)
        self.asked = 0

    async def get_kv_event_sources(self, message: GetKvEventSourcesRequest) -> GetKvEventSourcesResponse:
        self.asked += 1
        answer = self._answers.pop(0) if self._answers else []
        if isinstance(answer, Exception):
            raise answer
        return GetKvEventSourcesResponse(sources=answer)


def told(endpoint: str, **members: Any) -> KvEventSource:
    return KvEventSource(transport="zmq", endpoint=endpoint, **members)


def with_control(worker: Worker, control: Control) -> Worker:
    worker.control = control  # pyright: ignore[reportAttributeAccessIssue]
    return worker


def blocks(kv: KV, worker: Worker, rank: int | None = None) -> int:
    return kv._places.at(worker, rank).feed.holder.blocks("GPU")


async def until(condition) -> None:
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110 - what ZeroMQ's own thread brings can only be looked for
            await trio.sleep(0.005)


async def test_nobody_is_asked_before_a_call_needs_it(autojump_clock, nursery):
    kv, control = KV(Settings()), Control()
    worker = with_control(worker_of("a"), control)
    kv.worker_joined(worker)
    nursery.start_soon(kv._followers.run)
    await wait_all_tasks_blocked()
    assert control.asked == 0
    kv.choose_worker(call_of(range(10)), [worker])
    await wait_all_tasks_blocked()
    assert control.asked == 1
    another = with_control(worker_of("b"), Control())
    kv.worker_joined(another)
    await wait_all_tasks_blocked()
    assert another.control.asked == 1  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    nursery.cancel_scope.cancel()


async def test_a_worker_that_does_not_answer_is_asked_again_less_and_less_often(autojump_clock, nursery):
    errors = [GRPCError(Status.UNAVAILABLE)] * 100
    kv, control = KV(Settings()), Control(*errors)
    worker = with_control(worker_of("a"), control)
    kv._followers.need()
    kv.worker_joined(worker)
    nursery.start_soon(kv._followers.run)
    await trio.sleep(62)
    assert control.asked == 1 + 5 + 1  # after 1, 3, 7, 15, 31 and 61 seconds
    kv.worker_left(worker)
    await trio.sleep(100)
    assert control.asked == 7
    nursery.cancel_scope.cancel()


async def test_each_rank_of_a_worker_is_followed_into_its_own_place(nursery):
    kv = KV(Settings(), clock=time.monotonic)
    kv._followers.need()
    async with publishing() as (first, one), publishing() as (second, other):
        sources = [
            told(one.events, data_parallel_rank=4),
            told(other.events, data_parallel_rank=5),
            told(other.events, data_parallel_rank=9),
        ]
        worker = with_control(worker_of("a", ranks=(4, 5)), Control(sources))
        kv.worker_joined(worker)
        nursery.start_soon(kv._followers.run)
        await first.subscribed()
        await second.subscribed()
        first.publish(block(1))
        second.publish(block(1), block(2))
        await until(lambda: (blocks(kv, worker, 4), blocks(kv, worker, 5)) == (1, 2))
        nursery.cancel_scope.cancel()


async def test_a_worker_that_left_is_forgotten_swept_away_and_followed_anew_when_it_comes_back(nursery):
    kv = KV(Settings(), clock=time.monotonic)
    kv._followers.need()
    async with publishing() as (publisher, addresses):
        worker = with_control(worker_of("a"), Control([told(addresses.events)], [told(addresses.events)]))
        nursery.start_soon(kv._followers.run)
        kv.worker_joined(worker)
        await publisher.subscribed()
        publisher.publish(*(block(number) for number in range(3)))
        await until(lambda: blocks(kv, worker) == 3)
        kv.worker_left(worker)
        index = kv._caches.index
        await until(lambda: index.pairs == index.blocks("GPU") == 0)
        await publisher.subscribed()  # that is how it says that a subscriber has gone
        kv.worker_joined(worker)
        await publisher.subscribed()
        publisher.publish(block(7))
        await until(lambda: blocks(kv, worker) == 1)
        nursery.cancel_scope.cancel()


async def test_a_source_of_no_worker_is_warned_of():
    kv = KV(Settings(sources={"a": SourceSettings(endpoint="tcp://h:1"), "x": SourceSettings(endpoint="tcp://h:2")}))
    workers = [WorkerSettings(grpc="h:3", id="a"), WorkerSettings(grpc="h:4", id="b")]
    registry = Registry([Loaded("round-robin", RoundRobin()), Loaded("kv", kv)], ["round-robin"])
    with capture_logs() as lines:
        registry.services(Proxy(HeadraceSettings(workers=workers), registry))
    assert [(line["event"], line["worker"], line["reason"]) for line in lines] == [
        ("kv.source_of_nobody", "x", "no worker has this id; there are a, b")
    ]


async def test_an_address_that_cant_be_costs_that_worker_only(nursery):
    async with publishing() as (publisher, addresses):
        kv = KV(Settings(), clock=time.monotonic)
        kv._followers.need()
        endpoints = {"a": "tcp://nowhere", "b": addresses.events}
        workers = [with_control(worker_of(name), Control([told(endpoint)])) for name, endpoint in endpoints.items()]
        for worker in workers:
            kv.worker_joined(worker)
        nursery.start_soon(kv._followers.run)
        await publisher.subscribed()
        publisher.publish(block(1))
        await until(lambda: blocks(kv, workers[1]) == 1)
        nursery.cancel_scope.cancel()


def connecting(endpoint: str, *topics: str) -> tuple[KV, list[Worker]]:
    """Workers whose engines connect to one address, each with a topic."""
    kv = KV(Settings(), clock=time.monotonic)
    kv._followers.need()
    workers = [with_control(worker_of(name), Control([told(endpoint, topic=topic)])) for name, topic in zip("ab", topics, strict=False)]
    return kv, workers


@asynccontextmanager
async def engine(endpoint: str, topic: str = "") -> AsyncIterator[Publisher]:
    """It connects."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with Socket(context, zmq.XPUB) as pub:
            pub.raw.connect(endpoint)
            yield Publisher(pub, None, topic)
    finally:
        context.destroy(linger=0)


async def heard(publisher: Publisher, kv: KV, worker: Worker) -> None:
    """Publish until something arrives: who has connected isn't told who listens now."""

    def arrived() -> bool:
        publisher.publish(block(1))
        return blocks(kv, worker) == 1

    await until(arrived)


@contextmanager
def refusals() -> Iterator[list[tuple[str, str]]]:
    """Who is not followed, and why: filled at the end."""
    found: list[tuple[str, str]] = []
    with capture_logs() as lines:
        yield found
        found += sorted((line["worker"], line["reason"]) for line in lines if line["event"] == "kv.not_subscribed")


async def test_engines_that_nothing_tells_apart_are_followed_by_nobody_until_one_of_them_leaves(nursery, monkeypatch):
    monkeypatch.setattr(addresses_module, "_HANDOVER", 0.05)
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    kv, (a, b) = connecting(endpoint, "kv", "kv")
    async with engine(endpoint, "kv") as first:
        kv.worker_joined(a)
        nursery.start_soon(kv._followers.run)
        await first.subscribed()
        first.publish(block(1))
        await until(lambda: blocks(kv, a) == 1)
        with refusals() as found:
            kv.worker_joined(b)
            await until(lambda: blocks(kv, a) == 0)
            await trio.sleep(0.2)  # longer than the handover
        assert found == [
            ("a", "the events of b come to this address, too: give each engine a port of its own"),
            ("b", "the events of a come to this address, too: give each engine a port of its own"),
        ]
        assert not kv._places.at(a, None).feed.whole
        kv.worker_left(a)
        await heard(first, kv, b)
        nursery.cancel_scope.cancel()


async def test_a_second_topic_of_an_address_that_headrace_has_bound_is_an_error(nursery, monkeypatch):
    monkeypatch.setattr(addresses_module, "_HANDOVER", 0.05)
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    kv, (a, b) = connecting(endpoint, "kv@a", "kv@b")
    async with engine(endpoint, "kv@a") as first:
        kv.worker_joined(a)
        nursery.start_soon(kv._followers.run)
        await first.subscribed()
        with refusals() as found:
            kv.worker_joined(b)
            await trio.sleep(0.2)  # longer than the handover
        assert found == [("b", "the events of a come to this address, too: give each engine a port of its own")]
        first.publish(block(1))
        await until(lambda: blocks(kv, a) == 1)
        nursery.cancel_scope.cancel()


async def test_a_worker_that_comes_back_at_once_has_its_address_again(nursery):
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    kv, (a,) = connecting(endpoint, "kv")
    async with engine(endpoint, "kv") as publisher:
        nursery.start_soon(kv._followers.run)
        for _ in range(10):
            with refusals() as found:
                kv.worker_joined(with_control(a, Control([told(endpoint, topic="kv")])))
                await heard(publisher, kv, a)
            assert found == []
            kv.worker_left(a)
        nursery.cancel_scope.cancel()
