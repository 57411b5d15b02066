"""Data-parallel ranks: one that the client asks for, or one that a policy chooses."""

import pytest
from msgspec.structs import replace

from core.errors import BadRequest, NoWorker
from core.hookspecs import Choice, hookimpl
from core.settings import WorkerSettings
from tests.unit.core.lanes import ScriptedLane, output
from tests.unit.core.rig import Browser, Rig, make_call, make_worker

BODY = {"token_ids": [1, 2, 3], "sampling_params": {}}


def with_ranks(name, *ranks):
    worker = make_worker(name, ScriptedLane([output(7, finish="stop")]))
    assert worker.info
    worker.info = replace(worker.info, ranks=ranks)
    return worker


class LastRank:
    @hookimpl
    def choose_worker(self, workers) -> Choice:
        return Choice(workers[0], "last rank", workers[0].info.ranks[-1])


def asked_ranks(worker) -> list[int]:
    return worker.lanes[0].ranks


async def test_a_rank_that_a_policy_chooses_goes_to_the_worker():
    worker = with_ranks("a", 0, 1)
    await Browser(BODY).ask(Rig(worker, plugins=[LastRank()], policies=["p0"]))
    assert asked_ranks(worker) == [1]


async def test_without_a_rank_the_worker_chooses():
    worker = with_ranks("a", 0, 1)
    await Browser(BODY).ask(Rig(worker))
    assert asked_ranks(worker) == []


async def test_a_rank_that_the_client_asks_for_goes_to_a_worker_that_has_it():
    workers = with_ranks("a", 0, 1), with_ranks("b", 2, 3)
    browser = await Browser(BODY, {"x-data-parallel-rank": "3"}).ask(Rig(*workers))
    assert browser.headers["x-headrace-worker"] == "b"
    assert [asked_ranks(worker) for worker in workers] == [[], [3]]


def test_the_clients_rank_is_stronger_than_the_policys_and_is_what_plugins_are_told():
    rig = Rig(with_ranks("a", 0, 1), plugins=[LastRank()], policies=["p0"])
    assert rig.placer.place(make_call(data_parallel_rank=0), {}).choice.rank == 0


def test_a_rank_is_validated_on_a_worker_without_grpc_too_as_soon_as_it_tells_its_ranks():
    known, unknown = with_ranks("a", 0, 1), with_ranks("b", 0)
    for worker in (known, unknown):
        worker.settings = WorkerSettings(http="http://w", id=worker.id)
    assert Rig(unknown).placer.place(make_call(data_parallel_rank=7), {}).worker is unknown
    with pytest.raises(BadRequest, match="there is no rank 7 on any worker; there are 0, 1"):
        Rig(known).placer.place(make_call(data_parallel_rank=7), {})


def test_a_rank_that_exists_on_nobody_is_a_400_with_those_that_do():
    rig = Rig(with_ranks("a", 0, 1), with_ranks("b", 2))
    with pytest.raises(BadRequest, match="x-data-parallel-rank: there is no rank 7 on any worker; there are 0, 1, 2") as raised:
        rig.placer.place(make_call(data_parallel_rank=7), {})
    assert raised.value.param == "x-data-parallel-rank"


def test_a_rank_whose_worker_is_gone_is_a_503():
    gone = with_ranks("b", 1)
    rig = Rig(with_ranks("a", 0), gone)
    rig.move(gone, "gone")
    with pytest.raises(NoWorker, match=r"no worker is ready: a has no rank 1, b is gone \(in a test\)"):
        rig.placer.place(make_call(data_parallel_rank=1), {})


def test_a_worker_without_grpc_does_not_tell_its_ranks_so_it_may_have_any():
    worker = make_worker("a", ScriptedLane([]))
    worker.settings = WorkerSettings(http="http://127.0.0.1:8000", id="a")
    assert Rig(worker).placer.place(make_call(data_parallel_rank=5), {}).choice.rank == 5
