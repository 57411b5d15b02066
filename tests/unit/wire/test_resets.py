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


def test_each_answer_releases_another_burst():
    budget = ResetBudget()
    assert not budget.ask()
    streams = list(range(1, 6 * BURST, 2))
    assert [stream_id for stream_id in streams if budget.take(stream_id)] == streams[:BURST]
    assert budget.ask()
    assert not budget.ask()
    assert budget.answered() == streams[BURST : 2 * BURST]
    assert budget.strained
    assert budget.ask()
    assert budget.answered() == streams[2 * BURST :]
    assert not budget.strained
    assert not budget.ask()


def test_a_reply_releases_all_streams_before_it_with_the_next_answer():
    budget = ResetBudget()
    streams = list(range(1, 200, 2))
    for stream_id in streams:
        budget.take(stream_id)
    assert budget.ask()
    budget.accepted(199)
    assert budget.answered() == streams[BURST:]


def test_a_stray_answer_changes_nothing():
    budget = ResetBudget()
    assert budget.answered() == []
    assert budget.take(1)
