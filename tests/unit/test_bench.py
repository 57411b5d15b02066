"""The benchmark's own arithmetic: a wrong number here would be believed."""

import http.server
import json
import os
import subprocess
import sys
import threading
import time

import msgspec
import pytest
import trio

from bench import echo
from bench.cases import PACE_SECONDS, Case, WrongReply, cases
from bench.compare import compare
from bench.load import LoadFailed, Reply, post, run
from bench.processes import cpu_seconds, family, resident_bytes
from bench.results import Memory, Missing, Results, Row, Sample, percentile
from bench.table import render

UNARY = Case("unary", prompt=3, output=2, concurrency=1, requests=1, logprobs=1)
STREAM = Case("streamed", prompt=3, output=2, concurrency=1, requests=1, stream=True)


def sample(**changes: float | None) -> Sample:
    fields = {"rate": 100.0, "p50": 1.0, "p99": 2.0, "proxy_cpu": 1.0, "worker_cpu": 0.5, "load_cpu": 0.1, "writes": 1.0}
    return Sample(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


def row(target: str, *cpu: float | None, stream: bool = False) -> Row:
    samples = [sample(proxy_cpu=value) for value in cpu]
    return Row(case="200 → 500", target=target, logprobs=None, concurrency=4, output=500, stream=stream, requests=8, samples=samples)


def reply(tokens: int, scored: int) -> bytes:
    choice = {"index": 0, "token_ids": [1] * tokens, "logprobs": {"content": [{"token_id": 1}] * scored}}
    return json.dumps({"choices": [choice]}).encode()


def events(*token_counts: int, end: str = "data: [DONE]\n\n") -> bytes:
    texts = [json.dumps({"choices": [{"token_ids": [1] * count}]}) for count in token_counts]
    return ("".join(f"data: {text}\n\n" for text in texts) + end).encode()


@pytest.mark.parametrize(
    ("share", "expected"), [(0.5, 50), (0.99, 99), (0.07, 7), (1.0, 100), (0.001, 1)], ids=["p50", "p99", "p7", "p100", "p0.1"]
)
def test_a_percentile_is_the_nearest_rank(share, expected):
    assert percentile(list(range(100, 0, -1)), share) == expected


def test_a_percentile_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one value"):
        percentile([], 0.5)


def test_a_reply_with_every_token_and_logprob_passes():
    UNARY.check(reply(2, 2), "generate")


@pytest.mark.parametrize(("tokens", "scored", "text"), [(1, 2, "1 tokens"), (3, 2, "3 tokens"), (2, 1, "1 log-prob")])
def test_an_incomplete_reply_is_refused(tokens, scored, text):
    with pytest.raises(WrongReply, match=text):
        UNARY.check(reply(tokens, scored), "generate")


def test_a_stream_with_every_token_passes():
    STREAM.check(events(1, 1), "generate")


@pytest.mark.parametrize("broken", [events(1), events(1, 2), events(1, 1, end=""), b""], ids=["short", "long", "cut off", "empty"])
def test_an_incomplete_stream_is_refused(broken):
    with pytest.raises(WrongReply):
        STREAM.check(broken, "generate")


def test_a_stream_of_text_is_proved_by_its_usage():
    texts = [{"choices": [{"text": "ab"}]}, {"choices": [], "usage": {"completion_tokens": 2}}]
    STREAM.check("".join(f"data: {json.dumps(text)}\n\n" for text in [*texts, "x"][:2]).encode() + b"data: [DONE]\n\n", "completions")


def test_every_case_asks_for_what_its_check_demands():
    for case in cases():
        body = msgspec.json.decode(case.bodies("generate")[0])
        assert len(body["token_ids"]) == case.prompt
        assert body["stream"] is case.stream
        assert body["sampling_params"]["max_tokens"] == case.output
        assert body["sampling_params"].get("logprobs") == case.logprobs
        assert body["sampling_params"]["ignore_eos"] is True


def test_chunks_are_joined_and_counted():
    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nab\n\r\n2\r\ncd\r\n0\r\n\r\n"
    assert Reply(0.1, raw).body() == (b"ab\ncd", 2)


class Server:
    """A server on a thread that answers every POST with the same status and body."""

    def __init__(self, status: int, body: bytes, *, chunked: bool = False) -> None:
        requests = self.requests = []

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                requests.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(status)
                if chunked:
                    self.send_header("transfer-encoding", "chunked")
                    self.end_headers()
                    for byte in body:
                        self.wfile.write(b"1\r\n%c\r\n" % byte)
                    self.wfile.write(b"0\r\n\r\n")
                else:
                    self.send_header("content-length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = ("127.0.0.1", self._server.server_address[1])

    def __enter__(self) -> "Server":
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.mark.parametrize("chunked", [False, True], ids=["with a length", "chunked"])
def test_the_load_generator_sends_as_many_requests_as_asked_and_keeps_the_replies(chunked):
    with Server(200, b"hello", chunked=chunked) as server:
        load = run(server.address, [post("x", "/", b"one"), post("x", "/", b"two")], count=7, concurrency=2)
        assert [one.body()[0] for one in load.replies] == [b"hello"] * 7
        assert sorted(server.requests) == [b"one"] * 4 + [b"two"] * 3
        assert 0 < max(one.seconds for one in load.replies) <= load.seconds


def test_the_load_generator_reports_a_refusal_with_its_text():
    with Server(503, b"no worker is ready") as server, pytest.raises(LoadFailed, match=r"^503 Service Unavailable: no worker is ready$"):
        run(server.address, [post("x", "/", b"")], count=1, concurrency=1)


def test_cpu_time_is_that_of_the_process_with_its_children():
    spin = "import time\nwhile time.process_time() < 0.1: pass\nprint('spun', flush=True); input()"
    nest = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}])"
    with subprocess.Popen([sys.executable, "-c", nest], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        pids = family([process.pid])
        assert len(pids) == 2
        assert cpu_seconds(pids) >= 0.1
        assert resident_bytes(pids) > resident_bytes([process.pid]) > 1_000_000
        process.stdin.close()


def test_cpu_time_of_this_process_is_what_the_clock_says():
    before = time.process_time()
    measured = cpu_seconds([os.getpid()])
    assert before <= measured <= time.process_time()


def test_cpu_time_of_a_process_that_is_gone_is_refused():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    with pytest.raises(ProcessLookupError, match=f"{process.pid}"):
        cpu_seconds([process.pid])


def test_the_table_shows_medians_and_ratios_to_dynamo():
    text = render(Results(machine={"cpu": "any"}, rows=[row("direct", None), row("headrace", 1.0, 9.0, 2.0), row("dynamo", 4.0)]))
    (line,) = [line for line in text.splitlines() if line.startswith("  headrace")]
    assert line.split()[4:7] == ["2.00", "-", "0.50"]


def test_the_table_shows_streams_in_microseconds_a_token():
    text = render(Results(machine={}, rows=[row("headrace", 50.0, stream=True)]))
    (line,) = [line for line in text.splitlines() if line.startswith("  headrace")]
    assert line.split()[4:7] == ["50.0", "100", "-"]


def test_the_table_compares_streams_with_the_yardstick():
    rows = [row("headrace", 60.0, stream=True), row("hypercorn alone", 40.0, stream=True)]
    (line,) = [line for line in render(Results(machine={}, rows=rows)).splitlines() if line.startswith("  headrace")]
    assert line.split()[6:8] == ["-", "1.50"]


async def test_the_yardstick_writes_each_token_by_itself_at_the_pace_of_the_engine(autojump_clock):
    parts, times = [], []

    async def receive():
        return {"type": "http.request", "body": STREAM.bodies("generate")[0]}

    async def send(message):
        parts.append(message.get("body", b""))
        times.append(trio.current_time())

    await echo.app({"type": "http", "method": "POST"}, receive, send)
    STREAM.check(b"".join(parts), "generate")
    assert times[2] - times[1] == pytest.approx(PACE_SECONDS)


def test_the_table_says_why_a_peer_has_no_numbers():
    results = Results(machine={}, missing=[Missing("dynamo", None, "no wheel")], memory=[Memory("headrace", 10, 1 << 20, 2 << 20)])
    text = render(results)
    assert "dynamo: no wheel" in text
    assert "104858" in text  # bytes a request


def test_a_comparison_shows_the_change_of_rows_that_both_have():
    before = Results(machine={"commit": "a", "cpu": "c"}, rows=[row("headrace", 2.0), row("dynamo", 4.0)])
    after = Results(machine={"commit": "b", "cpu": "c"}, rows=[row("headrace", 1.0), row("vllm-router", 1.0)])
    text = compare(before, after)
    assert "2.00 → 1.00 (-50 %)" in text
    assert "commit: a → b" in text
    assert not {"dynamo", "vllm-router", "cpu"} & set(text.replace(":", "").split())


def test_results_survive_being_written():
    results = Results(machine={"cpu": "c"}, rows=[row("direct", None)], missing=[Missing("dynamo", None, "why")])
    assert msgspec.json.decode(msgspec.json.encode(results), type=Results) == results
