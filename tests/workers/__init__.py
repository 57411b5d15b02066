"""Workers to run headrace against, as context managers for fixtures, benchmarks and scripts.

* `stand_in()`: our own worker without a model, ready in a second;
* `scripted()`: the real `vllm-rs` server with a scripted engine behind it, ready in a second;
* `engine()`: the real `vllm-rs` server and the real vLLM engine on the CPU with a tiny random model, ready in 25 to 70 s;
* `seeing_engine()` and `routing_engine()`: the same with a model that sees, and with a mixture of experts whose routing is reported;
* `encoding_engine()`: one of several `seeing_engine()`, of which some look at pictures for the others;
* `receiving_engine()`: the same as `engine()`, with our worker extensions;
* `handing_engine()`: the same as `engine()`, one of several that hand KV blocks over to each other.

Each yields a `RunningWorker`. They block: from trio, use a fixture that isn't async, or a thread. The real ones are installed on first
use (`components.py`), which may take minutes; `why_not` says beforehand whether that's possible at all.
"""

from pathlib import Path

from tests.workers import components
from tests.workers.components import InstallFailed
from tests.workers.launch import (
    encoding_engine,
    engine,
    handing_engine,
    receiving_engine,
    routing_engine,
    scripted,
    seeing_engine,
    stand_in,
)
from tests.workers.processes import StartFailed
from tests.workers.running import Kind, RunningWorker

__all__ = [
    "InstallFailed",
    "Kind",
    "RunningWorker",
    "StartFailed",
    "adapter",
    "checkpoint",
    "encoding_engine",
    "engine",
    "handing_engine",
    "receiving_engine",
    "routing_engine",
    "scripted",
    "seeing_engine",
    "stand_in",
    "why_no_hand_over",
    "why_no_variants",
    "why_not",
]


def why_not(kind: Kind) -> str | None:
    """Why this kind of worker can't be had on this machine; `None` when it can, be it after a download."""
    match kind:
        case "stand-in":
            return None
        case "scripted":
            return components.why_not("vllm-rs")
        case "engine":
            return components.why_not("engine")


def why_no_variants() -> str | None:
    """Why engines with other models (`seeing_engine`, …) can't be had on this machine; `None` when they can, be it after a download."""
    return components.why_not("variants")


def why_no_hand_over() -> str | None:
    """Why `handing_engine` can't be had on this machine; `None` when it can, be it after a download."""
    return components.why_not("nixl")


def checkpoint(number: int) -> Path:
    """The folder of the tiny model with one of its two sets of weights, 0 and 1; the engine worker starts with 0.

    Raises: `InstallFailed`.
    """
    return components.models() / f"checkpoint-{number}"


def adapter() -> Path:
    """The folder of a LoRA adapter for the tiny model.

    Raises: `InstallFailed`.
    """
    return components.models() / "adapter"
