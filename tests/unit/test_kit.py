"""The plugin test kit: what a third party's tests can see of a call."""

from core import Choice, hookimpl
from core.errors import WorkerLost
from core.testing import in_memory, recording_worker


class LastRank:
    @hookimpl
    def choose_worker(self, workers) -> Choice:
        return Choice(workers[0], "last rank", workers[0].info.ranks[-1])


async def test_a_recording_lane_notes_the_rank_that_a_policy_has_chosen():
    worker, lane = recording_worker("a", ranks=(0, 1))
    async with in_memory({"last-rank": LastRank()}, workers=[(worker, lane)], policies=["last-rank"]) as headrace:
        assert (await headrace.generate()).status_code == 200
        await headrace.generate(headers={"x-data-parallel-rank": "0"})
        assert (await headrace.client.post("/fleet/route", json={"token_ids": [1], "sampling_params": {}})).status_code == 200
        await headrace.generate(stream=True)
    assert lane.ranks == [1, 0, 1]
    assert len(lane.calls) == len(lane.requests) == 3


async def test_without_a_rank_none_is_noted():
    worker, lane = recording_worker("a", ranks=(0, 1))
    async with in_memory({}, workers=[(worker, lane)]) as headrace:
        await headrace.generate()
    assert lane.ranks == [None]


async def test_the_next_error_is_the_next_calls_on_whichever_rank():
    worker, lane = recording_worker("a", ranks=(0, 1))
    lane.next_error = WorkerLost("gone")
    async with in_memory(
        {"last-rank": LastRank()}, workers=[(worker, lane)], policies=["last-rank"], settings="[routing]\nretries = 0"
    ) as headrace:
        assert [(await headrace.generate()).status_code for _ in range(2)] == [503, 200]
    assert lane.next_error is None
    assert lane.ranks == [1]
