"""Which worker a call goes to, and why."""

import time
from collections.abc import Sequence

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from core import Call, Choice, Worker, WorkerInfo, WorkerSettings
from plugins.routing_kv import KV, Settings
from plugins.routing_kv.events import Cleared, EngineHash, Removed, Stored
from tests.unit.plugins.routing_kv.prompts import BLOCK, call_of, stored

TOKENS = list(range(50, 50 + 6 * BLOCK))


def worker_of(name: str, *, ranks: Sequence[int] = (0,), block_size: int = BLOCK) -> Worker:
    worker = Worker(WorkerSettings(grpc="127.0.0.1:50051", id=name))
    worker.info = WorkerInfo(models=("m",), model_id="m", max_model_len=1000, kv_block_size=block_size, ranks=tuple(ranks))
    worker.policy_version = "1"
    return worker


class Bed:
    """The policy with some workers that are there."""

    def __init__(self, *workers: Worker, **settings) -> None:
        self.now = time.monotonic()
        self.kv = KV(Settings(**settings), clock=lambda: self.now)
        self.calls: dict[int, Call] = {}
        self.workers = list(workers) or [worker_of("a"), worker_of("b"), worker_of("c")]
        for worker in self.workers:
            self.kv.worker_joined(worker)

    def tell(self, worker: int, *events, rank: int | None = None, whole: bool = True) -> "Bed":
        feed = self.kv._places.at(self.workers[worker], rank).feed
        feed.whole = whole
        for event in events:
            feed.apply(event)
        return self

    def choose(self, call) -> Choice:
        return self.kv.choose_worker(call, self.workers)

    def start(self, call) -> Choice:
        choice = self.choose(call)
        self.kv.attempt_started(call, choice)
        self.calls[id(choice)] = call
        return choice

    def end(self, *choices: Choice, output_tokens: int = 0) -> None:
        for choice in choices:
            self.kv.attempt_ended(self.calls[id(choice)], choice, output_tokens)

    def answer(self, call) -> str:
        """Where the call goes and why, all of it."""
        choice = self.start(call)
        self.end(choice)
        return f"{choice.worker.id}: {choice.reason}"


def test_a_call_goes_where_most_of_its_prompt_is_cached():
    bed = Bed().tell(1, stored(TOKENS[: 2 * BLOCK])).tell(2, stored(TOKENS[: 4 * BLOCK]))
    assert bed.answer(call_of(TOKENS)) == "c: kv: 4 of 6 blocks"
    bed.tell(2, Removed([100], "GPU"))
    assert bed.choose(call_of(TOKENS, salt="7")).reason == "kv: 0 of 6 blocks"


def test_a_salt_that_depends_on_the_worker_is_each_workers_own():
    """An older version's blocks are no overlap, where the salt is the policy version."""
    bed = Bed().tell(0, stored(TOKENS, salt="1")).tell(1, stored(TOKENS[: 2 * BLOCK], salt="2", first_hash=200)).tell(2)
    call = call_of(TOKENS)
    call.identity = replace(call.identity, per_worker=lambda worker: worker.policy_version or "")
    assert bed.answer(call) == "a: kv: 6 of 6 blocks"
    for worker in bed.workers:
        worker.policy_version = "2"
    assert bed.choose(call).reason == "kv: 2 of 6 blocks"
    bed.workers[1].policy_version = "3"
    assert bed.answer(call).endswith("kv: 0 of 6 blocks")


def test_what_was_sent_under_an_older_salt_of_the_worker_is_not_guessed_to_be_there():
    bed = Bed(worker_of("a")).tell(0)
    call = call_of(TOKENS)
    call.identity = replace(call.identity, per_worker=lambda worker: worker.policy_version or "")
    bed.start(call)
    assert bed.choose(call).reason == "kv: 6 of 6 blocks, guessed"
    bed.workers[0].policy_version = "2"
    assert bed.choose(call).reason == "kv: 0 of 6 blocks"


def test_what_is_on_its_way_counts_for_whoever_comes_next():
    """A group of rollouts of one prompt goes to one worker, though nothing is cached yet."""
    bed = Bed().tell(0).tell(1).tell(2)
    first, *others = [bed.start(call_of(TOKENS)) for _ in range(3)]
    assert [(choice.worker, choice.reason) for choice in others] == [(first.worker, "kv: 6 of 6 blocks, guessed")] * 2
    bed.now += 60  # its events haven't said that it has it
    assert bed.choose(call_of(TOKENS)).reason == "kv: 0 of 6 blocks"


def test_a_worker_without_events_is_believed_to_have_what_was_sent_there_for_longer():
    bed = Bed(believe_seconds=120)
    first = bed.answer(call_of(TOKENS))[0]
    bed.now += 60
    assert bed.answer(call_of(TOKENS)) == f"{first}: kv: 6 of 6 blocks, guessed"
    bed.now += 300
    assert bed.choose(call_of(TOKENS)).reason == "kv: 0 of 6 blocks"


def test_a_worker_whose_weights_have_changed_is_believed_to_have_nothing():
    bed = Bed()
    first = bed.start(call_of(TOKENS))
    first.worker.policy_version = "2"
    assert bed.choose(call_of(TOKENS)).reason == "kv: 0 of 6 blocks"


def test_load_outweighs_the_cache_in_the_end():
    bed = Bed(load_weight=0.5, output_tokens=4).tell(0, stored(TOKENS))
    one_call = BLOCK // 2 + 4  # what is left of the prompt, and its output
    places = [bed.start(call_of([*TOKENS, 1, 2])).worker.id for _ in range(10)]
    # The others have to compute all of it; their cost is reached after so many calls.
    assert places[: len(TOKENS) * 2 // one_call] == ["a"] * (len(TOKENS) * 2 // one_call)
    assert set(places) - {"a"}


def test_calls_that_nobody_has_anything_of_are_spread_by_load_and_by_turns():
    bed = Bed()
    long = bed.start(call_of(range(1000, 1900)))
    short = [bed.start(call_of(range(start, start + 40))) for start in range(2000, 3200, 100)]
    assert sum(choice.worker is long.worker for choice in short) <= 2
    bed.end(long, *short)
    bed.now += 3600
    assert [bed.answer(call_of(range(start, start + 40)))[0] for start in (5000, 6000, 7000)] in (list("abc"), list("bca"), list("cab"))


def test_what_was_computed_lately_counts_as_load_and_is_forgotten_by_halves():
    bed = Bed(recent_seconds=10.0)
    choice = bed.start(call_of(TOKENS))
    place = bed.kv._places.at(choice.worker, None)
    bed.end(choice, output_tokens=7)
    assert (place.load, place.work) == (0, len(TOKENS) + 7)
    bed.now += 10
    bed.choose(call_of([1]))
    assert place.work == pytest.approx((len(TOKENS) + 7) / 2)
    assert bed.choose(call_of(range(1000, 1040))).worker is not choice.worker


def test_load_is_what_the_attempts_that_run_have_to_compute():
    bed = Bed(output_tokens=10).tell(0, stored(TOKENS))
    call = call_of([*TOKENS, 1, 2])
    call.sampling.n = 3
    choices = [bed.start(call) for _ in range(2)]
    place = bed.kv._places.of(bed.workers[0])[0]
    assert (place.load, place.calls) == (2 * (2 + 3 * 8), 2)
    bed.end(*choices, choices[0])
    assert (place.load, place.calls) == (0, 0)


def test_an_output_is_expected_to_be_as_long_as_the_last_ones():
    bed = Bed(output_tokens=100)
    call = call_of([1, 2])
    call.sampling.max_tokens = None
    call.sampling.n = 2
    place = bed.kv._places.of(bed.start(call).worker)[0]
    assert place.load == 2 + 2 * 100
    for _ in range(500):
        bed.end(bed.start(call), output_tokens=2 * 20)
    place = bed.kv._places.of((choice := bed.start(call)).worker)[0]
    before = place.load
    bed.end(choice)
    assert before - place.load == 2 + 2 * 20
    bed.end(bed.start(call), output_tokens=0)  # a call that failed tells nothing
    assert round(bed.kv._output) == 20


def test_another_policys_choice_counts_too():
    bed = Bed()
    choice = Choice(bed.workers[1], "mine")
    bed.kv.attempt_started(call_of(TOKENS), choice)
    assert bed.choose(call_of(TOKENS)).worker is bed.workers[1]


def test_choosing_changes_nothing():
    bed = Bed()
    assert len({bed.choose(call_of(TOKENS)).worker for _ in range(3)}) == 1
    assert all(place.load == place.calls == 0 for place in bed.kv._places)


@pytest.mark.parametrize(
    ("in_gpu", "best"),
    [(1, "b: kv: 6 of 6 blocks"), (4, "b: kv: 6 of 6 blocks"), (5, "c: kv: 5 of 6 blocks"), (6, "c: kv: 6 of 6 blocks")],
)
def test_blocks_in_other_media_count_for_less(in_gpu, best):
    """The second has 4.5 blocks' worth in CPU memory, the first 1.5 in storage."""
    bed = Bed(cpu_weight=0.75, storage_weight=0.25)
    blocks: list[EngineHash] = [100, 101, 102, 103, 104, 105]
    for worker, medium in ((0, "STORAGE"), (1, "CPU")):
        bed.tell(worker, stored(TOKENS), Stored(blocks, [], 0, medium=medium), Removed(blocks, "GPU"))
    assert bed.tell(2, stored(TOKENS[: in_gpu * BLOCK])).answer(call_of(TOKENS)) == best


def test_media_that_only_the_worker_can_place_are_sent_where_they_were_sent():
    bed = Bed().tell(0, stored(TOKENS)).tell(1).tell(2)
    call = call_of(TOKENS, media=[("cat", 1, 2)])
    call.identity = type(call.identity)(media=("cat",))
    first = bed.answer(call)[0]
    bed.now += 60
    assert bed.answer(call) == f"{first}: kv: 6 of 6 blocks, guessed"


def test_a_prompt_of_less_than_a_block_goes_to_the_least_loaded():
    bed = Bed()
    busy = bed.start(call_of(range(100)))
    choice = bed.choose(call_of([1, 2]))
    assert choice.reason == "kv: least loaded"
    assert choice.worker is not busy.worker


def test_a_relayed_call_has_no_tokens_and_goes_to_the_least_loaded():
    assert Bed().answer(call_of([], relayed=True)).endswith("kv: least loaded")


def test_workers_may_have_blocks_of_different_sizes():
    bed = Bed(worker_of("a", block_size=2 * BLOCK), worker_of("b"))
    bed.tell(0, stored(TOKENS, block_size=2 * BLOCK)).tell(1, stored(TOKENS[: 3 * BLOCK]))
    assert bed.answer(call_of(TOKENS)) == "a: kv: 3 of 3 blocks"
    bed.tell(0, Cleared())
    bed.now += 60
    assert bed.answer(call_of(TOKENS)) == "b: kv: 3 of 6 blocks"


def test_the_size_of_a_block_is_what_events_say_and_else_the_settings():
    bed = Bed(worker_of("a", block_size=0), block_size=3)
    assert bed.choose(call_of(TOKENS)).reason == "kv: 0 of 8 blocks"
    assert bed.tell(0, stored(TOKENS)).choose(call_of(TOKENS)).reason == "kv: 6 of 6 blocks"


class TestRanks:
    @pytest.fixture
    def bed(self) -> Bed:
        return Bed(worker_of("a", ranks=(0, 1)), worker_of("b", ranks=(2, 3)))

    def test_the_rank_that_has_the_prompt_is_chosen(self, bed):
        bed.tell(1, stored(TOKENS), rank=3).tell(1, stored(TOKENS[:BLOCK]), rank=2)
        assert bed.choose(call_of(TOKENS)) == Choice(bed.workers[1], "kv: 6 of 6 blocks", 3, 6 * BLOCK)

    def test_ranks_have_loads_of_their_own(self, bed):
        chosen = [bed.start(call_of(range(start, start + 40))).rank for start in (0, 100, 200, 300)]
        assert sorted(chosen) == [0, 1, 2, 3]

    def test_a_rank_that_the_client_asks_for_is_the_only_place(self, bed):
        bed.tell(1, stored(TOKENS), rank=3)
        assert bed.choose(call_of(TOKENS, data_parallel_rank=2)).rank in (0, 2)  # a worker that doesn't have it is not eligible
        bed.workers = bed.workers[1:]
        assert bed.choose(call_of(TOKENS, data_parallel_rank=2)) == Choice(bed.workers[0], "kv: 0 of 6 blocks", 2, 0)


def test_a_worker_that_comes_back_has_nothing():
    bed = Bed().tell(0, stored(TOKENS))
    running = bed.start(call_of(TOKENS))
    bed.kv.worker_left(bed.workers[0])
    bed.kv.worker_joined(bed.workers[0])
    assert bed.choose(call_of(TOKENS)).reason == "kv: 0 of 6 blocks"
    bed.end(running)
    assert bed.kv._places.of(bed.workers[0])[0].load == 0


def test_metrics_tell_what_is_known_and_how_often_it_helped():
    bed = Bed().tell(0, stored(TOKENS))
    registry = CollectorRegistry()
    bed.kv.collect_metrics(registry)
    bed.answer(call_of([*TOKENS, 1]))
    values = {
        ("headrace_kv_blocks", ("a", "0", "GPU")): 6,
        ("headrace_kv_index_blocks", ("GPU",)): 6,
        ("headrace_kv_prompt_tokens_total", ()): 25,
        ("headrace_kv_expected_tokens_total", ()): 24,
    }
    labels = {3: ("worker", "rank", "medium"), 1: ("medium",), 0: ()}
    for (name, given), value in values.items():
        assert registry.get_sample_value(name, dict(zip(labels[len(given)], given, strict=True))) == value
