"""What was sent is remembered for a while, and never longer."""

from plugins.routing_kv.index import SHARDS
from plugins.routing_kv.predictions import Predictions


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def remembered(predictions: Predictions, name: int) -> int:
    bits = 0
    for table in predictions.tables():
        bits |= table[name % SHARDS].get(name, 0)
    return bits


def test_what_was_sent_is_remembered_once_to_twice_the_time():
    clock = Clock()
    predictions = Predictions(10.0, 1_000, clock)
    bit, other = predictions.take_bit(), predictions.take_bit()
    predictions.note([1, 2], bit)
    predictions.note([2], other)
    assert [remembered(predictions, name) for name in (1, 2, 3)] == [bit, bit | other, 0]
    clock.now += 10
    predictions.note([1], other)
    assert [remembered(predictions, name) for name in (1, 2)] == [bit | other, bit | other]
    clock.now += 10
    assert [remembered(predictions, name) for name in (1, 2)] == [other, 0]
    clock.now += 25
    assert predictions.tables() == []


def test_when_too_much_was_sent_the_oldest_is_forgotten_before_its_time():
    predictions = Predictions(10.0, 10, Clock())
    bit = predictions.take_bit()
    for name in range(100):
        predictions.note([name], bit)
        assert len(predictions) <= 10
    assert remembered(predictions, 99)
    assert not remembered(predictions, 50)


def test_a_bit_is_used_again_when_nothing_is_remembered_under_it():
    clock = Clock()
    predictions = Predictions(10.0, 1_000, clock)
    bit = predictions.take_bit()
    predictions.note([1], bit)
    predictions.give_back(bit)
    assert predictions.take_bit() != bit
    clock.now += 20
    assert predictions.take_bit() == bit
    assert not remembered(predictions, 1)
