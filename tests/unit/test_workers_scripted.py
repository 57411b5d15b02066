"""The scripted engine behind the real server: it does what its documentation says, and what vLLM 0.33 does.

Other tests rely on it to be right; so here the real server's replies are checked against the script.
"""

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import pytest

from core.wire.generated import inference_pb2 as pb
from tests import workers
from tests.proxy import wait_for
from tests.workers import RunningWorker, tiny_model
from tests.workers.scripted_engine import Behaviour

pytestmark = pytest.mark.real

PROMPT = list(b"Hello, w!")


class Client:
    """A worker's two wires, blocking."""

    def __init__(self, worker: RunningWorker) -> None:
        self.worker = worker
        self.http = httpx.Client(base_url=worker.http, timeout=20)
        self.channel = grpc.insecure_channel(worker.grpc)
        self._encode: Callable[[pb.GenerateRequest], bytes] = pb.GenerateRequest.SerializeToString
        self._decode: Callable[[bytes], pb.GenerateResponse] = pb.GenerateResponse.FromString

    def close(self) -> None:
        self.http.close()
        self.channel.close()

    def post(self, path: str, body: Any = None) -> Any:
        reply = self.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def generate(self, prompt: list[int], **sampling: Any) -> dict[str, Any]:
        body = {"token_ids": prompt, "sampling_params": {"max_tokens": 4, "temperature": 0.0} | sampling}
        return self.post("/inference/v1/generate", body)

    def choice(self, prompt: list[int], **sampling: Any) -> dict[str, Any]:
        return self.generate(prompt, **sampling)["choices"][0]

    def chunks(self, prompt: list[int], **sampling: Any) -> list[dict[str, Any]]:
        body = {"token_ids": prompt, "stream": True, "sampling_params": {"max_tokens": 4, "temperature": 0.0} | sampling}
        reply = self.http.post("/inference/v1/generate", json=body)
        *events, last = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
        assert last == "[DONE]"
        return [json.loads(event) for event in events]

    def unary(self, prompt: list[int], max_tokens: int = 4, **fields: Any) -> grpc.Future:
        method = self.channel.unary_unary("/vllm.Inference/Generate", self._encode, self._decode)
        return method.future(self._request(prompt, max_tokens, fields), timeout=20)

    def stream(self, prompt: list[int], max_tokens: int = 4, **fields: Any) -> Any:
        method = self.channel.unary_stream("/vllm.Inference/GenerateStream", self._encode, self._decode)
        return method(self._request(prompt, max_tokens, fields), timeout=20)

    def settled_at(self, requests: int) -> None:
        """Wait until the worker's metrics speak of so many requests."""
        wait_for(lambda: self.worker.running_requests() == requests)

    def _request(self, prompt: list[int], max_tokens: int, fields: dict[str, Any]) -> pb.GenerateRequest:
        response = pb.ResponseOptions(output_token_ids=True)
        common: dict[str, Any] = {"stopping": pb.StoppingCriteria(max_new_tokens=max_tokens), "response": response}
        return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), **common | fields)


@pytest.fixture
def client(scripted_worker) -> Iterator[Client]:
    """The session's scripted worker, in its first state afterwards."""
    client = Client(scripted_worker)
    yield client
    scripted_worker.order("script_reset")
    client.close()


@pytest.fixture
def own_client(request) -> Iterator[Client]:
    """A scripted worker that a test may break; parametrise it indirectly with its settings."""
    with workers.scripted(**getattr(request, "param", {})) as worker:
        client = Client(worker)
        yield client
        client.close()


def test_both_wires_and_both_shapes_give_the_same_tokens(client):
    expected = client.choice(PROMPT)["token_ids"]
    assert len(expected) == 4
    assert [token for chunk in client.chunks(PROMPT) for token in chunk["choices"][0]["token_ids"]] == expected
    assert list(client.unary(PROMPT).result().outputs.token_ids) == expected
    assert [token for message in client.stream(PROMPT) for token in message.outputs.token_ids] == expected


def test_prompt_and_seed_change_the_output(client):
    outputs = {tuple(client.choice(PROMPT, max_tokens=8, seed=seed)["token_ids"]) for seed in (1, 2)}
    outputs.add(tuple(client.choice([*PROMPT, 65], max_tokens=8, seed=1)["token_ids"]))
    assert len(outputs) == 3


def test_the_salt_changes_the_cached_tokens_and_not_the_output(client):
    prompt = list(range(32, 96))

    def call(salt: str) -> tuple[list[int], int]:
        outputs = client.unary(prompt, kv=pb.KVCacheParameters(cache_salt=salt)).result().outputs
        return list(outputs.token_ids), outputs.finish_info.num_cached_tokens

    first, cached = call("a")
    assert cached == 0
    assert call("a") == (first, 48)
    assert call("b") == (first, 0)
    client.post("/reset_prefix_cache")
    assert call("a") == (first, 0)


def test_logprobs_follow_from_the_ranks(client):
    content = client.choice(PROMPT, max_tokens=16, temperature=1.0, logprobs=5)["logprobs"]["content"]
    assert {entry["rank"] for entry in content} == {1, 2, 3}
    for entry in content:
        for candidate in entry["top_logprobs"]:
            assert candidate["logprob"] == pytest.approx(-candidate["rank"] * math.log(2))
            assert candidate["token_id"] - entry["token_id"] == candidate["rank"] - entry["rank"]


def test_logprobs_of_selected_tokens_agree_with_their_ranks(client):
    response = pb.ResponseOptions(
        output_token_ids=True, output_logprobs=True, output_candidates=pb.CandidateTokens(token_ids=pb.TokenIds(ids=[66, 300]))
    )
    outputs = client.unary(PROMPT, response=response).result().outputs
    for token, rank, row in zip(outputs.token_ids, outputs.ranks, outputs.candidate_tokens, strict=True):
        for candidate in row.tokens:
            distance = (candidate.id - token) % tiny_model.VOCAB_SIZE
            assert candidate.logprob == pytest.approx(-(rank + distance) * math.log(2), rel=1e-5)


def test_prompt_logprobs_have_the_documented_ranks(client):
    first, *rest = client.generate(PROMPT, prompt_logprobs=0)["prompt_logprobs"]
    assert first is None
    assert [entry[str(token)]["rank"] for token, entry in zip(PROMPT[1:], rest, strict=True)] == [1 + token % 5 for token in PROMPT[1:]]


def test_scored_prompt_ids_come_back_in_their_rows(client):
    reply = client.generate(list(b"abc"), prompt_logprob_token_ids=[[98, 99], [98, 99]])
    assert reply["prompt_token_id_logprobs"] is not None


@pytest.mark.parametrize(
    ("prompt", "reason", "length"),
    [
        ([Behaviour.ERROR, 2], "error", 2),
        ([Behaviour.STOP_ID], "stop", 3),
        ([Behaviour.EOS], "stop", 3),
        ([Behaviour.REPETITION], "repetition", 3),
        ([Behaviour.ECHO, *b"he"], "stop", 3),
        ([Behaviour.ECHO, *b"hello"], "length", 4),
        ([Behaviour.SLOW, 1], "length", 4),
    ],
)
def test_behaviours_end_as_documented(client, prompt, reason, length):
    choice = client.choice(prompt)
    assert (choice["finish_reason"], len(choice["token_ids"])) == (reason, length)


def test_an_eos_is_left_out_when_it_is_to_be_ignored(client):
    choice = client.choice([Behaviour.EOS], ignore_eos=True)
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 4)


def test_a_stop_id_ends_the_output_with_that_token(client):
    choice = client.choice([Behaviour.ECHO, *b"abcdef"], stop_token_ids=[ord("c")])
    assert (bytes(choice["token_ids"]), choice["stop_reason"]) == (b"abc", ord("c"))


def test_a_stop_string_ends_the_engine_request(client):
    since = len(client.worker.engine_events())
    stopping = pb.StoppingCriteria(max_new_tokens=20, stop_strings=["bc"])
    outputs = client.unary([Behaviour.ECHO, *b"abcdefghijkl"], stopping=stopping).result().outputs
    assert (outputs.text, outputs.finish_info.stop_string) == ("a", "bc")
    assert client.worker.wait_for_event("add", since=since)["sampling_params"].get("stop") is None


@pytest.mark.parametrize(
    ("behaviour", "status", "code"),
    [(Behaviour.VALIDATION_ERROR, 400, grpc.StatusCode.INVALID_ARGUMENT), (Behaviour.PAUSED_ERROR, 503, grpc.StatusCode.UNAVAILABLE)],
)
def test_typed_errors_reach_both_wires(client, behaviour, status, code):
    body = {"token_ids": [behaviour], "sampling_params": {}}
    assert client.http.post("/inference/v1/generate", json=body).status_code == status
    assert client.unary([behaviour]).exception().code() is code


def test_a_broken_logprob_is_not_a_number(client):
    response = pb.ResponseOptions(output_logprobs=True)
    outputs = client.unary([Behaviour.NAN_LOGPROB], response=response).result().outputs
    assert all(math.isnan(value) for value in outputs.logprobs)
    assert list(outputs.ranks) == [0] * 4


def test_routed_experts_cover_prompt_and_output_but_the_last_token(client):
    assert client.choice([Behaviour.ROUTED_EXPERTS, 65, 66])["routed_experts"].startswith("k05VTVBZ")
    assert client.choice(PROMPT)["routed_experts"] is None


def test_sampling_masks_list_what_was_allowed(client):
    choice = client.choice([Behaviour.SAMPLING_MASK, 65])
    assert choice["sampling_mask"] == [[token, token + 1] for token in choice["token_ids"]]


def test_a_version_change_shows_as_two_spans(client):
    spans = client.choice([Behaviour.VERSION_CHANGE])["weight_versions"]
    assert spans == [{"version": "default", "start": 0, "end": 2}, {"version": "default-next", "start": 2, "end": 4}]


def test_what_reached_the_engine_is_logged_under_vllms_names(client):
    since = len(client.worker.engine_events())
    client.unary(PROMPT, request_id="r1", kv=pb.KVCacheParameters(cache_salt="v7"), priority=3).result()
    added = client.worker.wait_for_event("add", since=since)
    assert added["request_id"].startswith("r1-")
    assert (added["prompt_token_ids"], added["cache_salt"], added["priority"]) == (PROMPT, "v7", 3)
    finished = client.worker.wait_for_event("finish", since=since)
    assert (finished["request_id"], finished["reason"]) == (added["request_id"], "length")


def test_a_cancelled_request_leaves_the_engine(client):
    since = len(client.worker.engine_events())
    call = client.unary([Behaviour.SILENT])
    added = client.worker.wait_for_event("add", since=since)
    client.settled_at(1)
    call.cancel()
    assert client.worker.wait_for_event("abort", since=since)["request_ids"] == [added["request_id"]]
    client.settled_at(0)


def test_a_stalled_request_gives_its_tokens_and_then_nothing(client):
    messages = client.stream([Behaviour.STALL, 2])
    assert [next(messages).outputs.num_tokens for _ in range(3)] == [0, 1, 1]
    client.settled_at(1)
    messages.cancel()


def test_requests_beyond_the_limit_wait():
    with workers.scripted(max_num_seqs=1) as worker:
        client = Client(worker)
        calls = [client.unary([Behaviour.SILENT]) for _ in range(3)]
        client.settled_at(3)
        metrics = client.http.get("/metrics").text
        assert 'vllm:num_requests_waiting{model_name="tiny",engine="0"} 2' in metrics
        for call in calls:
            call.cancel()
        client.settled_at(0)
        client.close()


def test_pausing_with_abort_ends_running_requests_and_refuses_new_ones(client):
    call = client.unary([Behaviour.SILENT])
    client.settled_at(1)
    client.post("/pause?mode=abort")
    assert call.result().outputs.finish_info.finish_reason == pb.FinishInfo.FinishReason.ABORTED
    assert client.unary(PROMPT).exception().code() is grpc.StatusCode.UNAVAILABLE
    client.post("/resume")
    assert client.unary(PROMPT).result().outputs.num_tokens == 4


def test_pausing_with_wait_answers_when_running_requests_are_done(client):
    messages = client.stream([Behaviour.SLOW, 5])
    next(messages)
    assert client.post("/pause?mode=wait") == {"status": "paused"}
    client.settled_at(0)
    assert [message.outputs.num_tokens for message in messages] == [1] * 4
    assert client.unary(PROMPT).exception().code() is grpc.StatusCode.UNAVAILABLE


def test_pausing_with_keep_freezes_running_requests_and_queues_new_ones(client):
    since = len(client.worker.engine_events())
    running = client.stream([Behaviour.SLOW, 1], max_tokens=20)
    next(running)
    client.post("/pause?mode=keep")
    queued = client.unary(PROMPT)
    wait_for(lambda: len([event for event in client.worker.engine_events()[since:] if event["event"] == "add"]) == 2)
    assert not [event for event in client.worker.engine_events()[since:] if event["event"] == "finish"]
    client.post("/resume")
    assert queued.result().outputs.num_tokens == 4
    assert sum(message.outputs.num_tokens for message in running) == 20


def test_sleep_queues_requests_until_everything_is_awake(client):
    client.post("/sleep?level=1&mode=wait")
    queued = client.unary(PROMPT)
    assert client.post("/wake_up?tags=weights")["status"] == "sleeping"
    assert not queued.done()
    assert client.post("/wake_up")["status"] == "awake"
    assert queued.result().outputs.num_tokens == 4


def update_weights(client: Client, content: str) -> None:
    client.post("/init_weight_transfer_engine", {"init_info": {}})
    client.post("/start_weight_update")
    client.post("/update_weights", {"update_info": {"names": [content]}})
    client.post("/finish_weight_update", {"weight_version": content})


def test_a_weight_update_changes_the_output_and_the_label(client):
    client.post("/pause?mode=keep")
    outputs = set()
    for content in ("a", "b"):
        update_weights(client, content)
        client.post("/resume")
        choice = client.choice(PROMPT, max_tokens=8)
        outputs.add(tuple(choice["token_ids"]))
        assert choice["weight_versions"] == [{"version": content, "start": 0, "end": 8}]
        client.post("/pause?mode=keep")
    client.post("/collective_rpc", {"method": "reload_weights"})
    client.post("/resume")
    outputs.add(tuple(client.choice(PROMPT, max_tokens=8)["token_ids"]))
    assert len(outputs) == 3


def test_a_forward_pass_during_an_update_kills_the_engine(own_client):
    own_client.post("/start_weight_update")
    assert own_client.unary(PROMPT).exception().code() is grpc.StatusCode.INTERNAL
    assert own_client.worker.wait_for_event("died")["announced"]
    assert own_client.http.get("/health").status_code == 503


def test_a_failed_update_leaves_the_weights_broken_and_no_update_open(client):
    client.post("/pause")
    client.post("/init_weight_transfer_engine", {"init_info": {}})
    client.worker.order("script_fail", "update_weights", 1, "peer went away")
    client.post("/start_weight_update")
    reply = client.http.post("/update_weights", json={"update_info": {}})
    assert (reply.status_code, "peer went away" in reply.text) == (500, True)
    assert client.http.post("/finish_weight_update").status_code == 500
    update_weights(client, "again")
    client.post("/resume")
    assert client.choice(PROMPT)["weight_versions"][0]["version"] == "again"


def test_a_scripted_failure_happens_as_often_as_ordered(client):
    client.worker.order("script_fail", "pause_generation", 2)
    assert [client.http.post("/pause").status_code for _ in range(3)] == [500, 500, 200]


def test_a_stall_blocks_the_engine_until_it_is_over(client):
    client.worker.order("script_stall", "reset_prefix_cache", 0.3)
    started = time.monotonic()
    client.post("/reset_prefix_cache")
    assert time.monotonic() - started >= 0.3


@pytest.mark.parametrize("own_client", [{"fail": ["reset_prefix_cache"], "extension_methods": ["pull"]}], indirect=True)
def test_failing_utilities_and_extension_methods_can_be_set_from_the_start(own_client):
    assert own_client.http.post("/reset_prefix_cache").status_code == 500
    before = own_client.choice(PROMPT, max_tokens=8)["token_ids"]
    own_client.post("/collective_rpc", {"method": "pull", "kwargs": {"step": 1}})
    assert own_client.choice(PROMPT, max_tokens=8)["token_ids"] != before
    assert own_client.http.post("/collective_rpc", json={"method": "push"}).status_code == 500


def test_an_adapter_changes_the_output(client, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    adapter = {"lora_name": "a", "lora_path": str(tmp_path)}
    assert client.http.post("/v1/load_lora_adapter", json=adapter).status_code == 200
    try:
        with_adapter = list(client.unary(PROMPT, lora_name="a", max_tokens=8).result().outputs.token_ids)
    finally:
        assert client.http.post("/v1/unload_lora_adapter", json=adapter).status_code == 200
    assert with_adapter != client.choice(PROMPT, max_tokens=8)["token_ids"]
    assert client.http.post("/v1/load_lora_adapter", json=adapter | {"lora_path": str(tmp_path.parent)}).status_code == 500


def test_an_engine_that_announces_its_death_takes_the_server_down(own_client):
    assert own_client.unary([Behaviour.DEATH]).exception().code() is grpc.StatusCode.INTERNAL
    assert own_client.http.get("/health").status_code == 503


def test_an_engine_that_is_gone_at_once_is_not_noticed(own_client):
    call = own_client.unary([Behaviour.EXIT])
    assert not own_client.worker.wait_for_event("died")["announced"]
    assert own_client.http.get("/health").status_code == 200
    assert not call.done()
    call.cancel()


@pytest.mark.parametrize("own_client", [{"data_parallel_size": 2, "world_size": 3}], indirect=True)
def test_every_rank_has_its_own_engine(own_client):
    for rank in (0, 1):
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
        own_client.http.post("/inference/v1/generate", json=body, headers={"x-data-parallel-rank": str(rank)})
    assert [event["rank"] for event in own_client.worker.engine_events("add")] == [0, 1]
    assert own_client.http.get("/get_world_size").json() == {"world_size": 6}
    assert own_client.post("/collective_rpc", {"method": "reload_weights"})["results"] == [None] * 6


@pytest.mark.parametrize("own_client", [{"scale_out": False, "lora": False, "weight_transfer": ""}], indirect=True)
def test_a_worker_can_lack_what_is_optional(own_client):
    body = {"token_ids": PROMPT, "sampling_params": {}}
    assert own_client.http.post("/inference/v1/generate", json=body).status_code == 403
    assert own_client.unary(PROMPT, lora_name="a").exception().code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("own_client", [{"fast": True, "tokens_per_step": 32, "max_model_len": 5000}], indirect=True)
def test_a_fast_engine_gives_many_tokens_at_once_and_logs_nothing(own_client):
    messages = [message.outputs.num_tokens for message in own_client.stream(PROMPT, max_tokens=100)]
    assert messages == [0, 32, 32, 32, 4]
    content = own_client.choice(PROMPT, max_tokens=4800, logprobs=1)["logprobs"]["content"]
    assert len(content) == 4800
    with pytest.raises(ValueError, match="logs no engine events"):
        own_client.worker.engine_events()


def test_a_worker_that_is_killed_is_gone(own_client):
    call = own_client.unary([Behaviour.SILENT])
    own_client.settled_at(1)
    own_client.worker.send_signal(signal.SIGKILL)
    assert call.exception().code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(ConnectionError, match="doesn't answer"):
        own_client.worker.running_requests()
