"""`/engine/control/…`: pausing, sleeping, and what the weights are called."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from plugins.dynamo.asking import Asking, read

_Mode = Literal["abort", "wait", "keep"]


class Pause(Struct):
    """Body of `pause_generation`. What is left out, vLLM decides."""

    mode: _Mode = "abort"
    clear_cache: bool | None = None


class Sleep(Struct):
    """Body of `sleep`."""

    level: Annotated[int, Meta(ge=0, le=2)] | None = None
    mode: _Mode = "abort"


class WakeUp(Struct):
    """Body of `wake_up`; without tags everything."""

    tags: list[Literal["weights", "kv_cache", "scheduling"]] | None = None


async def pause_generation(asking: Asking, body: Mapping[str, Any]) -> dict[str, Any]:
    """Pause all of them or none."""
    asked = read(body, Pause)
    await asking.post("/pause", mode=asked.mode, clear_cache=None if asked.clear_cache is None else str(asked.clear_cache).lower())
    return {"status": "paused"}


async def resume_generation(asking: Asking, body: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - it has no arguments
    """Resume them; one that sleeps goes on sleeping, and the reply says so."""
    await asking.post("/resume")
    asleep = all(worker.info and worker.info.supports_sleep for worker in asking.workers()) and await _is(asking, "is_sleeping")
    return {"status": "resumed", "is_sleeping": True} if asleep else {"status": "resumed"}


async def is_paused(asking: Asking, body: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - it has no arguments
    """Whether all of them are."""
    return {"is_paused": await _is(asking, "is_paused")}


async def is_sleeping(asking: Asking, body: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - it has no arguments
    """Whether all of them do."""
    return {"is_sleeping": await _is(asking, "is_sleeping")}


async def sleep(asking: Asking, body: Mapping[str, Any]) -> dict[str, Any]:
    """Give memory back."""
    asked = read(body, Sleep)
    await asking.post("/sleep", level=None if asked.level is None else str(asked.level), mode=asked.mode)
    return {"status": "sleeping"}


async def wake_up(asking: Asking, body: Mapping[str, Any]) -> dict[str, Any]:
    """Take memory again."""
    woken = await asking.post("/wake_up", tags=read(body, WakeUp).tags)
    return {"status": "awake"} if woken["status"] == "awake" else {"status": "partially_awake", "is_sleeping": True}


async def get_weight_version(asking: Asking, body: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - it has no arguments
    """The one label that the weights have; trainers ask for it until it is theirs, also while the workers' differ."""
    workers = asking.workers()
    sound = [worker for worker in workers if worker.state != "quarantined"] or workers
    labels = await asking.read("weight_info", sound, lambda control: control.policy_version())
    return {"weight_version": ", ".join(sorted(set(labels)))}


async def _is(asking: Asking, what: str) -> bool:
    return (await asking.get(f"/{what}"))[what]


CONTROLS: Final = {
    operation.__name__: operation
    for operation in (pause_generation, resume_generation, is_paused, is_sleeping, sleep, wake_up, get_weight_version)
}
