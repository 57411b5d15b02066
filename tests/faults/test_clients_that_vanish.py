"""A client that is gone, however it went, takes its call out of headrace and out of the engine."""

import pytest

from tests.faults.clients import body, call, client_process, raw
from tests.proxy import headrace, wait_for
from tests.workers.scripted_engine import Behaviour

#: A token every 50 ms, for longer than any test waits.
SLOW = body([Behaviour.SLOW, 5], 1000)
SILENT = body([Behaviour.SILENT], 10)


def nothing_is_left(proxy, worker):
    wait_for(lambda: worker.running_requests() == 0)
    wait_for(lambda: proxy.in_flight() == 0)


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
def test_a_client_killed_before_the_first_token_leaves_nothing(scripted_proxy, scripted_worker, stream):
    call_id = f"silent-{stream}"
    with client_process(scripted_proxy, raw(SILENT | {"stream": stream}, call_id)) as client:
        client.wait_for("sent")
        wait_for(lambda: scripted_worker.running_requests() == 1)
        assert scripted_proxy.in_flight() == 1
        client.kill()
        nothing_is_left(scripted_proxy, scripted_worker)
    assert scripted_proxy.settled(call_id)["outcome"] == "client-gone"


def test_a_client_killed_while_it_waits_for_a_unary_reply_leaves_nothing(scripted_proxy, scripted_worker):
    with client_process(scripted_proxy, raw(SLOW, "slow")) as client:
        wait_for(lambda: scripted_worker.running_requests() == 1)
        client.kill()
        nothing_is_left(scripted_proxy, scripted_worker)
    assert scripted_proxy.settled("slow")["outcome"] == "client-gone"


def test_a_client_killed_in_the_middle_of_a_stream_leaves_nothing(scripted_proxy, scripted_worker):
    with client_process(scripted_proxy, raw(SLOW | {"stream": True}, "stream")) as client:
        client.wait_for("received")
        client.kill()
        nothing_is_left(scripted_proxy, scripted_worker)
    settled = scripted_proxy.settled("stream")
    assert (settled["outcome"], settled["output"] >= 1) == ("client-gone", True)


def test_every_output_of_a_call_ends_with_its_client(scripted_proxy, scripted_worker):
    with client_process(scripted_proxy, raw(body([Behaviour.SILENT], 10, n=4))) as client:
        wait_for(lambda: scripted_worker.running_requests() == 4)
        client.kill()
        nothing_is_left(scripted_proxy, scripted_worker)


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_call(scripted_proxy, scripted_worker):
    with scripted_proxy.connect() as connection:
        connection.sendall(raw(SLOW)[:-10])
    nothing_is_left(scripted_proxy, scripted_worker)
    assert call(scripted_proxy, body(b"Hello", 3)).status_code == 200


def test_the_real_engine_is_left_too(engine_worker):
    with headrace(engine_worker) as proxy:
        for stream in (False, True):
            with client_process(proxy, raw(body(b"Hello", 1900, stream=stream))) as client:
                wait_for(lambda: engine_worker.running_requests() == 1, seconds=30)
                client.kill()
                wait_for(lambda: engine_worker.running_requests() == 0, seconds=30)
                wait_for(lambda: proxy.in_flight() == 0)
