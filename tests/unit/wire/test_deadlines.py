import trio
from trio.testing import wait_all_tasks_blocked

from core.wire.grpc.deadlines import Deadlines


async def test_functions_are_called_in_the_order_of_their_times(nursery, autojump_clock):
    deadlines = Deadlines()
    nursery.start_soon(deadlines.run)
    fired: list[tuple[int, float]] = []
    for at in (3, 1, 2):
        deadlines.add(at, lambda at=at: fired.append((at, trio.current_time())))
    await trio.sleep(5)
    assert fired == [(1, 1.0), (2, 2.0), (3, 3.0)]
    nursery.cancel_scope.cancel()


async def test_a_cancelled_timer_never_fires(nursery, autojump_clock):
    deadlines = Deadlines()
    nursery.start_soon(deadlines.run)
    fired: list[int] = []
    first = deadlines.add(1, lambda: fired.append(1))
    deadlines.add(2, lambda: fired.append(2))
    first.cancel()
    first.cancel()
    await trio.sleep(5)
    assert fired == [2]
    nursery.cancel_scope.cancel()


async def test_a_timer_added_in_the_past_fires_at_once(nursery, autojump_clock):
    deadlines = Deadlines()
    nursery.start_soon(deadlines.run)
    await trio.sleep(10)
    fired: list[float] = []
    deadlines.add(1, lambda: fired.append(trio.current_time()))
    await wait_all_tasks_blocked()
    assert fired == [10.0]
    nursery.cancel_scope.cancel()


async def test_cancelled_timers_do_not_pile_up():
    deadlines = Deadlines()
    keep = [deadlines.add(10_000, lambda: None) for _ in range(50)]
    for _ in range(10_000):
        deadlines.add(5_000, lambda: None).cancel()
    assert len(deadlines) < 500
    assert all(timer.live for timer in keep)
