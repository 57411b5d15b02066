"""`/engine/<name>`: the routes of Dynamo's Python workers, by which Prime-RL drives them; whatever they do, they answer `status: ok`.

`engine_rpc` in a body names the method of Prime-RL's worker extension that is meant.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from plugins.dynamo import controls
from plugins.dynamo.asking import Asking, Refused, read

_OK: Final = {"status": "ok"}
_Version = Annotated[str, Meta(pattern=r"\S", max_length=1000)]


class FromDisk(Struct):
    """Body of `update_weights_from_disk`; without `engine_rpc` it is vLLM's own `reload_weights`."""

    model_path: str
    weight_version: _Version | None = None
    engine_rpc: Literal["update_weights_from_path", "reload_weights"] = "reload_weights"


class FromDistributed(Struct):
    """Body of `update_weights_from_distributed`."""

    engine_rpc: Literal["update_weights_from_path"]
    weight_dir: str | None = None
    weight_version: _Version | None = None


class InitGroup(Struct):
    """Of the body of `init_weights_update_group`, what isn't an argument of the method."""

    engine_rpc: Literal["init_broadcaster"]


async def pause_generation(asking: Asking, body: Mapping[str, Any]) -> dict[str, Any]:
    """Pause all of them or none."""
    await controls.pause_generation(asking, body)
    return _OK


async def resume_generation(asking: Asking, body: Mapping[str, Any]) -> dict[str, Any]:
    """Resume them."""
    await controls.resume_generation(asking, body)
    return _OK


async def get_weight_version(asking: Asking, body: Mapping[str, Any]) -> dict[str, Any]:
    """The label of the weights."""
    return {**_OK, "version": (await controls.get_weight_version(asking, body))["weight_version"]}


async def flush_cache(asking: Asking, body: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - it has no arguments
    """Forget every cached prefix."""
    if not (await asking.post("/reset_prefix_cache"))["success"]:
        raise Refused("the cache of a worker is in use")
    return _OK


async def update_weights_from_disk(asking: Asking, body: Mapping[str, Any]) -> dict[str, Any]:
    """Load a checkpoint."""
    asked = read(body, FromDisk)
    where: dict[str, Any] = (
        {"kwargs": {"weights_path": asked.model_path}} if asked.engine_rpc == "reload_weights" else {"args": [asked.model_path]}
    )
    await asking.call_method({"method": asked.engine_rpc, **where}, version=asked.weight_version)
    return _OK


async def update_weights_from_distributed(asking: Asking, body: Mapping[str, Any]) -> dict[str, Any]:
    """Receive the weights from the group that the workers have joined."""
    asked = read(body, FromDistributed)
    await asking.call_method({"method": asked.engine_rpc, "args": [asked.weight_dir]}, version=asked.weight_version)
    return _OK


async def init_weights_update_group(asking: Asking, body: Mapping[str, Any]) -> dict[str, Any]:
    """Join the trainer's group; plugin `prime-rl` numbers the whole fleet's ranks."""
    method = read(body, InitGroup).engine_rpc
    await asking.post("/collective_rpc", {"method": method, "kwargs": {key: value for key, value in body.items() if key != "engine_rpc"}})
    return _OK


OF_PYTHON: Final = {
    operation.__name__: operation
    for operation in (
        pause_generation,
        resume_generation,
        get_weight_version,
        flush_cache,
        update_weights_from_disk,
        update_weights_from_distributed,
        init_weights_update_group,
    )
}
