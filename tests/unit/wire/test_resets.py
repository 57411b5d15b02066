from core.wire.grpc.resets import BURST, ResetBudget


def test_the_first_resets_go_out_at_once_and_the_rest_waits():
    budget = ResetBudget()
    taken = [budget.take(stream_id) for stream_id in range(1, 2 * BURST + 10, 2)]
    assert taken == [True] * BURST + [False] * 5
    assert budget.strained


def test_resets_of_accepted_streams_are_free():
    budget = ResetBudget()
    budget.accepted(1001)
    assert all(budget.take(stream_id) for stream_id in range(1, 1002, 2))
    assert not budget.strained


def test_a_later_reply_vouches_for_the_streams_before_it():
    budget = ResetBudget()
    for stream_id in range(1, 2 * BURST, 2):
        assert budget.take(stream_id)
    budget.accepted(2 * BURST - 1)
    assert budget.take(2 * BURST + 1)


def test_one_ping_at_a_time_asks_for_all_that_waits():
    budget = ResetBudget()
    assert not budget.ask(99)
    for stream_id in range(1, 100, 2):
        budget.take(stream_id)
    assert budget.ask(99)
    assert not budget.ask(99)
    assert budget.answered() == list(range(2 * BURST + 1, 100, 2))
    assert not budget.strained


def test_streams_opened_after_the_ping_wait_for_the_next_one():
    budget = ResetBudget()
    for stream_id in range(1, 2 * BURST + 3, 2):
        budget.take(stream_id)
    assert budget.ask(2 * BURST + 1)
    later = list(range(1001, 1001 + 2 * BURST + 4, 2))
    assert not any(budget.take(stream_id) for stream_id in later)
    assert budget.answered() == [2 * BURST + 1, *later[:BURST]]
    assert budget.strained
    assert budget.ask(2001)
    assert budget.answered() == later[BURST:]


def test_a_stray_answer_changes_nothing():
    budget = ResetBudget()
    assert budget.answered() == []
    assert budget.take(1)
