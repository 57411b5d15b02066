"""One worker to a server, with hypercorn's own way of starting workers."""

import multiprocessing
import signal
import sys

import pytest

from core.serving.single import SecondWorker, claim_process
from tests.unit.serving.hosts import launched

APP = "tests.unit.serving.hosted_app"
WORKERS = ("asyncio", "trio")


def hypercorn(*options):
    return launched([sys.executable, "-m", "hypercorn", "-b", "127.0.0.1:0", *options, APP])


@pytest.mark.parametrize("worker", WORKERS)
async def test_a_second_worker_ends_the_server_with_the_reason(worker):
    async with hypercorn("-k", worker, "-w", "2") as server:
        await server.printed("SecondWorker: another worker of this server .* run one worker")
        # The end of the output is the end of every process that could write to it.
        await server.ended()


@pytest.mark.parametrize("worker", WORKERS)
async def test_a_worker_that_is_started_again_is_welcome(worker):
    async with hypercorn("-k", worker) as server:
        await server.printed("Running on")
        server.process.send_signal(signal.SIGHUP)
        await server.event("closed")
        await server.printed("Running on", count=2)
        server.terminate()
        assert await server.ended() == 0


def _claim(results):
    try:
        claim_process()
        claim_process()
    except SecondWorker:
        results.send("refused")
    else:
        results.send("claimed")
    results.recv()


def test_the_place_is_free_again_when_its_holder_was_killed():
    spawn = multiprocessing.get_context("spawn")
    answers = []
    for _ in range(2):
        ours, theirs = spawn.Pipe()
        with ours, theirs:
            child = spawn.Process(target=_claim, args=(theirs,))
            child.start()
            answers.append(ours.recv())
            child.kill()
            child.join()
    assert answers == ["claimed", "claimed"]


def test_a_process_without_a_parent_server_claims_nothing():
    claim_process()
