"""How a training script gives its weights to every worker of a headrace: `publish(state_dict, version)`, whatever the transport.

    with BroadcastPublisher("http://headrace:8000") as weights:
        for step, batch in enumerate(batches):
            train(model, batch)
            weights.publish(model.state_dict(), version=step)

Each weight transport has a publisher of this shape in its `trainer` module: `plugins.weights_filesystem.trainer.FilesystemPublisher`,
`plugins.weights_nccl.trainer.BroadcastPublisher`, `plugins.weights_nixl.trainer.NixlPublisher`. They need torch, httpx and what the
transport needs, and nothing of headrace but the modules of their own folder and this one: they run wherever the trainer does.

A new one inherits from `Publisher`, asks for an update with `self._ask(…)`, and until it has ended calls `Update.check()` in every loop
that waits for the workers: that is how it hears that a worker, or headrace, has failed, instead of waiting for ever.
"""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import httpx

if TYPE_CHECKING:
    from torch import Tensor  # pyright: ignore[reportMissingImports] - not in this project's environment, in every trainer's

#: Seconds between two looks at an update: at first, and at most.
_SOON, _SELDOM = 0.02, 0.5
#: Seconds for headrace to answer a question that it can answer at once.
_ANSWER: Final = 60.0


class PublishFailed(Exception):
    """Not every worker has the weights. The text says why; `workers` are those that failed, each with its reason.

    Whoever failed is quarantined by headrace until an update succeeds on it; the others go on. Publishing again is safe.
    """

    def __init__(self, message: str, workers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.workers = dict(workers or {})


class Publisher(ABC):
    """Publishes to the headrace at `url`: to the workers of `model` where its fleet serves several, or to those of a `cohort`.

    `mode` is what becomes of calls in flight: `keep` freezes them, `wait` lets them finish before, `abort` ends them. With `clear_cache`
    the workers forget cached prefixes, which earlier weights have computed; calls with a salt for each version don't need that. `patience`
    is how many seconds headrace may be unreachable.

    One process publishes: with a sharded model, the one that gathers the whole tensors. Not for several threads at once.
    """

    #: `transport` in `POST /fleet/updates`.
    transport: str

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        cohort: str = "",
        mode: Literal["keep", "wait", "abort"] = "keep",
        clear_cache: bool = False,
        patience: float = 30.0,
    ) -> None:
        self._headrace = httpx.Client(base_url=url, timeout=_ANSWER)
        #: What every update of this publisher has in common.
        self._fixed: dict[str, Any] = {"transport": self.transport, "mode": mode, "clear_cache": clear_cache}
        #: Says in every request which workers are meant.
        self._workers = {name: value for name, value in (("model", model), ("cohort", cohort)) if value}
        self._patience = patience

    @abstractmethod
    def publish(self, weights: "Mapping[str, Tensor]", version: str | int) -> None:
        """Give these weights to all workers, and return when all of them have the version and take calls again.

        The names are those of a checkpoint (Hugging Face's `state_dict()`), the tensors whole, on whatever device. They are only read.

        Raises: `PublishFailed`; `TypeError` for what isn't a whole tensor.
        """

    def close(self) -> None:
        """Let go of what the publisher holds. The workers keep their weights."""
        self._headrace.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tell_workers(self, method: str, seconds: float) -> None:
        """Call a method of every worker's, should that be possible at once: for what is polite and not necessary."""
        path = f"/cohorts/{cohort}/collective_rpc" if (cohort := self._workers.get("cohort")) else "/collective_rpc"
        with contextlib.suppress(httpx.HTTPError):
            self._headrace.post(path, json={"method": method}, params={"model": self._workers.get("model", "")}, timeout=seconds)

    def _ask(self, version: str | int, **options: Any) -> "Update":
        """Ask headrace for an update; it begins at once. `options` are the transport's own. Raises: `PublishFailed`."""
        return Update(self._headrace, self._patience, {"version": str(version), **self._fixed, **self._workers, **options})


class Update:
    """An update at headrace, from the question on."""

    def __init__(self, headrace: httpx.Client, patience: float, body: Mapping[str, Any]) -> None:
        self._headrace = headrace
        self._patience = patience
        self._version = body["version"]
        self._pause, self._next = _SOON, time.monotonic()
        #: As `GET /fleet/updates/<id>` last told.
        self.told: dict[str, Any] = self._answer(lambda: headrace.post("/fleet/updates", json=body))

    @property
    def has_ended(self) -> bool:
        """Whether it had, when headrace was last asked."""
        return self.told["status"] != "running"

    def check(self) -> None:
        """Ask headrace how it goes, unless that was only a moment ago: cheap enough for every round of a loop.

        Raises: `PublishFailed` as soon as one worker has failed, or headrace can't be reached.
        """
        if not self.has_ended and time.monotonic() >= self._next:
            self._look()
        self._demand_success()

    def wait(self) -> None:
        """Wait until all workers have the weights and take calls again.

        Raises: `PublishFailed`, when all is over for every worker, or headrace can't be reached.
        """
        self._pause = _SOON
        while not self.has_ended:
            self._look()
            if not self.has_ended:
                time.sleep(self._pause)
        self._demand_success()

    def _look(self) -> None:
        self.told = self._answer(lambda: self._headrace.get(f"/fleet/updates/{self.told['id']}"))
        self._pause = min(self._pause * 1.5, _SELDOM)
        self._next = time.monotonic() + self._pause

    def _demand_success(self) -> None:
        failed = {worker: one["reason"] for worker, one in self.told["workers"].items() if one["status"] == "failed"}
        if failed or self.told["status"] == "failed":
            reason = self.told["error"] or "; ".join(f"{worker}: {reason}" for worker, reason in failed.items())
            raise PublishFailed(f"version {self._version}: {reason}", failed)

    def _answer(self, ask: Callable[[], httpx.Response]) -> dict[str, Any]:
        """What headrace answers; asked again while it can't be reached. Asking for the same update again joins it."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                response = ask()
            except httpx.TransportError as error:
                if time.monotonic() > deadline:
                    raise PublishFailed(f"version {self._version}: headrace can't be reached: {error or type(error).__name__}") from error
                time.sleep(_SELDOM)
            else:
                if response.is_success:
                    return response.json()
                raise PublishFailed(f"version {self._version}: headrace answers {response.status_code}: {_message(response)}")


def whole(weights: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    """The tensors, detached. Raises: `TypeError` for one that is a share of one (FSDP's, say): it has to be gathered before."""
    for name, tensor in weights.items():
        if hasattr(tensor, "full_tensor"):
            raise TypeError(f"{name}: a sharded tensor; gather the whole one first (full_tensor(), or a full state dict)")
    return {name: tensor.detach() for name, tensor in weights.items()}


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return response.text[:500]
