"""Knows which token each policy version gives first, and watches that nobody gets one of older weights than it was told of."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx

from tests import workers
from tests.proxy import RunningProxy, wait_for

PROMPT = [72, 105]
UPDATE = {"update_info": {"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]}}
INIT = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1}


def first_token(url: str) -> list[int]:
    """The first token of a greedy answer; none when the call was aborted."""
    with httpx.Client(base_url=url, timeout=60) as client:
        return _ask(client, "")


def _ask(client: httpx.Client, salt: str) -> list[int]:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1, "temperature": 0}, **({"cache_salt": salt} if salt else {})}
    response = client.post("/inference/v1/generate", json=body)
    response.raise_for_status()
    return response.json()["choices"][0]["token_ids"]


def by_path(post: Callable[[str, Any], Any], version: str) -> None:
    """Weights that a worker reads by itself."""
    post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": f"/checkpoints/{version}"}})
    post("/update_weight_version", {"new_version": version})


def by_steps(post: Callable[[str, Any], Any], version: str) -> None:
    """Weights that a trainer sends, by vLLM's own steps."""
    post("/start_weight_update", None)
    post("/update_weights", UPDATE)
    post("/finish_weight_update", {"weight_version": version})


def tokens_by_version(bring: Callable[[Callable[[str, Any], Any], str], None], count: int) -> dict[str, int]:
    """So many versions whose first tokens differ, and their tokens, in the order in which they are to be brought."""
    with workers.stand_in() as worker, httpx.Client(base_url=worker.http, timeout=60) as client:

        def post(path: str, body: Any) -> None:
            client.post(path, json=body).raise_for_status()

        post("/init_weight_transfer_engine", {"init_info": {**INIT, "world_size": 2}})
        found = {"default": _ask(client, "")[0]}
        number = 0
        while len(found) <= count:
            number += 1
            bring(post, str(number))
            [token] = _ask(client, "")
            if token not in found.values():
                found[str(number)] = token
    return found


class Watch:
    """What clients are told, and how many answers they have got."""

    def __init__(self) -> None:
        self.version = "default"
        self.answers = 0

    def go_on(self) -> None:
        """Wait until calls that were made after this are answered."""
        before = self.answers
        wait_for(lambda: self.answers > before + 8, 60)


@contextlib.contextmanager
def watched(proxy: RunningProxy, tokens: Mapping[str, int]) -> Iterator[Watch]:
    """Four clients call all the time, each with the salt of the version that it was last told of (`Watch.version`).

    At the end everybody was answered, and nobody got a token of weights that are older than its salt.
    """
    watch = Watch()
    order = list(tokens)
    stop = threading.Event()
    wrong: list[Any] = []

    def call() -> None:
        with httpx.Client(base_url=proxy.url, timeout=60) as client:
            while not stop.is_set():
                version = watch.version
                try:
                    got = _ask(client, f"v{version}")
                except httpx.HTTPError as error:
                    wrong.append(error)
                    continue
                watch.answers += 1
                if not set(got) <= {tokens[one] for one in order[order.index(version) :]}:
                    wrong.append((version, got))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield watch
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=70)
    assert not any(thread.is_alive() for thread in threads), "a call hangs"
    assert wrong == []
