"""The engine's methods that a front end calls by name (utility calls), with vLLM 0.33's semantics."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.workers.scripted_engine.script import Script
from tests.workers.scripted_engine.weights import Weights

if TYPE_CHECKING:
    from tests.workers.scripted_engine.engine import Engine

_MEMORY = frozenset({"weights", "kv_cache"})

_UTILITIES = frozenset(
    """
    pause_generation resume_scheduler is_scheduler_paused sleep wake_up is_sleeping release_kv_cache_memory
    add_lora remove_lora list_loras set_weight_version get_weight_version collective_rpc
    reset_prefix_cache reset_mm_cache reset_encoder_cache
    """.split()  # noqa: SIM905 - a list of literals would take one line a name
)

_WORKER_METHODS = frozenset(
    """
    init_weight_transfer_engine shutdown_weight_transfer_engine start_weight_update update_weights finish_weight_update
    reload_weights compute_weight_checksums
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True)
class WhenIdle:
    """The result of a utility that is answered, with nothing, once no request runs any more; `then` is done before."""

    then: Callable[[], None]


class PauseState(Enum):
    """What the scheduler still does."""

    RUNNING = auto()
    #: running requests go on, none is admitted
    NO_ADMISSION = auto()
    #: nothing moves
    FROZEN = auto()


class WorkerFailed(Exception):
    """A worker method failed; the text is wrapped as vLLM's executor wraps it."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"Worker failed with error '{cause}', please check the stack trace above for the root cause")


class Administration:
    """Pause and sleep, weights, adapters, caches.

    Tests give their orders through `/collective_rpc`, as if they were worker methods: `script_fail` and `script_stall` (see `Script`),
    and `script_reset`, which takes back those orders, pause, sleep, weights and adapters. The front end has its own list of
    adapters, which `script_reset` doesn't reach.
    """

    def __init__(self, engine: "Engine", *, failing: list[str], extension_methods: list[str]) -> None:
        self._engine = engine
        self._script = Script(failing)
        self._extension_methods = frozenset(extension_methods)
        self.script_reset()

    def script_reset(self) -> None:
        """Return to the state of a fresh engine."""
        self._script.reset()
        self.pause_state = PauseState.RUNNING
        self.rejects_new = False
        self.asleep: frozenset[str] = frozenset()
        self.weights = Weights()
        self._loras: dict[int, str] = {}

    @property
    def frozen(self) -> bool:
        """Whether running requests stand still."""
        return self.pause_state is PauseState.FROZEN or bool(self.asleep)

    def call(self, method: str, args: list[Any]) -> Any:
        """Call a utility by name; the result may be a `WhenIdle`.

        Raises: whatever the method raises; `AttributeError` when there's no such method.
        """
        if method not in _UTILITIES:
            raise AttributeError(f"'EngineCoreProc' object has no attribute {method!r}")
        self._script.obey(method)
        return getattr(self, method)(*args)

    def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> WhenIdle | None:
        """Pause as a user does: after `abort` and `wait` new requests are refused, after `keep` they queue."""
        pending = self._pause(mode, lambda: self._clear_cache(clear_cache))
        self.rejects_new = mode != "keep"
        return pending

    def resume_scheduler(self) -> None:
        """Schedule again; not an error when nothing was paused."""
        self.pause_state = PauseState.RUNNING
        self.rejects_new = False

    def is_scheduler_paused(self) -> bool:
        """Whether the scheduler is paused in any mode."""
        return self.pause_state is not PauseState.RUNNING

    def sleep(self, level: int = 1, mode: str = "abort") -> WhenIdle | None:
        """Pause, and from level 1 on give the memory back. New requests queue."""
        return self._pause(mode, lambda: self._fall_asleep(level))

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Wake what the tags name, everything without tags, and resume once nothing sleeps. Says whether nothing does."""
        self.asleep -= _MEMORY if tags is None else frozenset(tags)
        if not self.asleep:
            self.resume_scheduler()
        return not self.asleep

    def is_sleeping(self) -> bool:
        """Whether memory was given back; vLLM says yes as well while the scheduler is only paused."""
        return bool(self.asleep) or self.is_scheduler_paused()

    def release_kv_cache_memory(self) -> None:
        """Give only the KV cache's memory back; needs a completed pause."""
        if not self.is_scheduler_paused() or self._engine.running:
            raise RuntimeError("release_kv_cache_memory() requires a completed pause first")
        self.asleep = frozenset({"kv_cache"})

    def add_lora(self, lora: list[Any]) -> bool:
        """Load an adapter. A path on this machine must hold an `adapter_config.json`; nothing is read from it."""
        name, lora_id, path = lora[:3]
        if path.startswith("/") and not (Path(path) / "adapter_config.json").exists():
            raise WorkerFailed(ValueError(f"Loading lora {name} failed: No adapter found for {path}"))
        self._loras[lora_id] = name
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Drop an adapter; says whether it was there."""
        return self._loras.pop(lora_id, None) is not None

    def list_loras(self) -> list[int]:
        """The ids of the adapters that are loaded."""
        return sorted(self._loras)

    def set_weight_version(self, version: str) -> None:
        """Label the weights."""
        self.weights.version = version

    def get_weight_version(self) -> str:
        """The weights' label."""
        return self.weights.version

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget the cache; refused while requests use it, unless they're to be reset too."""
        if self._engine.running and not reset_running_requests:
            return False
        self._engine.cache.reset()
        return True

    def reset_mm_cache(self) -> None:
        """There's no such cache."""

    def reset_encoder_cache(self) -> None:
        """There's no such cache."""

    def collective_rpc(self, method: str, timeout: float | None = None, args: Any = (), kwargs: dict[str, Any] | None = None) -> list[Any]:
        """Call a worker method on every GPU; returns one result for each.

        Raises: `WorkerFailed` when it fails, also for a method that neither vLLM's worker nor a configured extension has.
        """
        try:
            self._script.obey(method)
            result = self._worker_method(method)(*args, **(kwargs or {}))
        except Exception as error:
            if method == "update_weights":
                self.weights.fail_update()
            raise WorkerFailed(error) from error
        return [result] * self._engine.settings.world_size

    def _worker_method(self, method: str) -> Callable[..., Any]:
        if method in _WORKER_METHODS:
            return getattr(self.weights, method)
        if method in self._extension_methods:
            return self.weights.extension_method
        orders = {"script_fail": self._script.fail, "script_stall": self._script.stall, "script_reset": self.script_reset}
        if method in orders:
            return orders[method]
        raise AttributeError(f"'CPUWorker' object has no attribute '{method}'")

    def _pause(self, mode: str, then: Callable[[], None]) -> WhenIdle | None:
        if mode not in ("abort", "wait", "keep"):
            raise ValueError(f"Invalid pause mode: {mode}")
        if mode == "abort":
            self._engine.abort_all()
        self.pause_state = PauseState.FROZEN if mode == "keep" else PauseState.NO_ADMISSION
        if mode == "wait" and self._engine.running:
            return WhenIdle(then)
        then()
        return None

    def _clear_cache(self, wanted: bool) -> None:
        if wanted:
            self._engine.cache.reset()

    def _fall_asleep(self, level: int) -> None:
        if level >= 1:
            self._engine.cache.reset()
            self.asleep = _MEMORY
