"""What every publisher has in common: it asks headrace for an update, and hears how that goes."""

from collections.abc import Callable, Mapping
from typing import Any

import httpx
import msgspec
import pytest

from plugins.publishing import Publisher, PublishFailed, Update, whole

APPLYING = {"status": "applying", "reason": ""}
DONE = {"status": "done", "reason": ""}
FAILED = {"status": "failed", "reason": "no space"}


class Paper(Publisher):
    """Publishes nothing: the tests hold its update in their hands."""

    transport = "paper"

    def publish(self, weights: Mapping[str, Any], version: str | int) -> None:
        self._ask(version, path="/w").wait()

    def ask(self, version: str | int = 7) -> Update:
        return self._ask(version)


class Headrace:
    """Answers the first request with the first answer, and so on, the last one again and again."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = msgspec.json.decode(request.content) if request.content else None
        self.asked.append((request.method, request.url.path, body))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, httpx.Response) else httpx.Response(202, json=answer)


def told(status: str, error: str | None = None, **workers: Any) -> dict[str, Any]:
    return {"id": "u1", "status": status, "error": error, "workers": workers}


@pytest.fixture
def publisher_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Paper]:
    """A publisher that speaks to this headrace, for which no time passes while it waits."""
    now = [0.0]
    monkeypatch.setattr("plugins.publishing.time.monotonic", lambda: now[0])
    monkeypatch.setattr("plugins.publishing.time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def make(headrace: Headrace, **options: Any) -> Paper:
        publisher = Paper("http://headrace:8000", **options)
        publisher._headrace = httpx.Client(base_url="http://headrace:8000", transport=httpx.MockTransport(headrace))
        return publisher

    return make


def test_it_asks_once_and_looks_until_all_workers_have_the_weights(publisher_of):
    headrace = Headrace(told("running", a=APPLYING), told("running", a=APPLYING), told("running", a=DONE), told("succeeded", a=DONE))
    publisher_of(headrace).publish({}, 7)
    body = {"version": "7", "transport": "paper", "mode": "keep", "clear_cache": False, "path": "/w"}
    assert headrace.asked == [("POST", "/fleet/updates", body), *[("GET", "/fleet/updates/u1", None)] * 3]


def test_it_says_for_whom_and_how(publisher_of):
    headrace = Headrace(told("succeeded"))
    publisher_of(headrace, model="tiny", cohort="left", mode="wait", clear_cache=True).ask()
    wanted = {"version": "7", "transport": "paper", "model": "tiny", "cohort": "left", "mode": "wait", "clear_cache": True}
    assert headrace.asked[0][2] == wanted


def test_a_check_tells_of_a_worker_that_failed_while_others_have_not_ended(publisher_of):
    update = publisher_of(Headrace(told("running", a=APPLYING), told("running", a=FAILED, b=APPLYING))).ask()
    with pytest.raises(PublishFailed, match="version 7: a: no space") as failed:
        update.check()
    assert failed.value.workers == {"a": "no space"}
    assert not update.has_ended


def test_waiting_ends_when_all_is_over_and_names_who_failed(publisher_of):
    headrace = Headrace(
        told("running", a=FAILED, b=APPLYING), told("running", a=FAILED, b=APPLYING), told("failed", "it failed", a=FAILED, b=DONE)
    )
    update = publisher_of(headrace).ask()
    with pytest.raises(PublishFailed, match="version 7: it failed") as failed:
        update.wait()
    assert (failed.value.workers, update.has_ended) == ({"a": "no space"}, True)


def test_checks_in_a_loop_ask_headrace_only_now_and_then(publisher_of):
    headrace = Headrace(told("running", a=APPLYING))
    update = publisher_of(headrace).ask()
    for _ in range(1000):
        update.check()
    assert len(headrace.asked) == 2


def test_what_headrace_refuses_is_told_in_its_words(publisher_of):
    refusal = httpx.Response(
        400, json={"error": {"message": "path: it is not allowed", "type": "BadRequestError", "param": "path", "code": 400}}
    )
    with pytest.raises(PublishFailed, match="version 7: headrace answers 400: path: it is not allowed"):
        publisher_of(Headrace(refusal)).ask()


def test_an_answer_that_is_no_error_of_headraces_is_told_as_it_is(publisher_of):
    with pytest.raises(PublishFailed, match="version 7: headrace answers 502: Bad gateway"):
        publisher_of(Headrace(httpx.Response(502, text="Bad gateway"))).ask()


def test_a_headrace_that_is_away_for_a_moment_is_asked_again(publisher_of):
    away = httpx.ConnectError("refused")
    headrace = Headrace(away, away, told("running", a=APPLYING), away, told("succeeded", a=DONE))
    publisher_of(headrace).publish({}, "7")
    assert [method for method, *_ in headrace.asked] == ["POST", "POST", "POST", "GET", "GET"]


@pytest.mark.parametrize("after", [0, 1])
def test_a_headrace_that_stays_away_is_given_up(publisher_of, after: int):
    headrace = Headrace(*[told("running", a=APPLYING)] * after, httpx.ConnectError("refused"))
    with pytest.raises(PublishFailed, match="version 7: headrace can't be reached: refused"):
        publisher_of(headrace, patience=5.0).publish({}, 7)
    assert 10 <= len(headrace.asked) - after <= 12


def test_leaving_the_block_closes_it(publisher_of):
    with publisher_of(Headrace(told("succeeded"))) as publisher:
        publisher.publish({}, 7)
    with pytest.raises(RuntimeError, match="closed"):
        publisher.publish({}, 8)


def test_tensors_are_detached_and_shares_of_one_refused():
    class Tensor:
        def detach(self) -> str:
            return "detached"

    class Shard(Tensor):
        def full_tensor(self) -> None: ...

    weights: Any = {"w": Tensor()}
    assert whole(weights) == {"w": "detached"}
    with pytest.raises(TypeError, match="v: a sharded tensor"):
        whole({**weights, "v": Shard()})
