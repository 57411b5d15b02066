"""`/engine/update/…`: new weights, step by step, as vLLM has them."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from plugins.dynamo.asking import Asking, read


class Init(Struct):
    """Body of `init_weight_transfer_engine`."""

    init_info: dict[str, Any]


class Update(Struct):
    """Body of `update_weights`."""

    update_info: dict[str, Any]


class Finish(Struct):
    """Body of `finish_weight_update`."""

    weight_version: str | None = None


class Label(Struct):
    """Body of `update_weight_version`."""

    new_version: Annotated[str, Meta(pattern=r"\S")]


async def init_weight_transfer_engine(asking: Asking, body: Mapping[str, Any]) -> dict[str, Any]:
    """Join the trainer's group; for the whole fleet headrace numbers the ranks."""
    return await asking.post("/init_weight_transfer_engine", {"init_info": read(body, Init).init_info})


async def start_weight_update(asking: Asking, body: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - it has no arguments
    """Make ready for new weights."""
    return await asking.post("/start_weight_update")


async def start_draft_weight_update(asking: Asking, body: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - it has no arguments
    """The same for those of the draft model."""
    return await asking.post("/start_draft_weight_update")


async def update_weights(asking: Asking, body: Mapping[str, Any]) -> dict[str, Any]:
    """Receive weights."""
    return await asking.post("/update_weights", {"update_info": read(body, Update).update_info})


async def finish_weight_update(asking: Asking, body: Mapping[str, Any]) -> dict[str, Any]:
    """The weights are complete, and are labelled if there is a version."""
    version = read(body, Finish).weight_version
    return await asking.post("/finish_weight_update", {} if version is None else {"weight_version": version})


async def update_weight_version(asking: Asking, body: Mapping[str, Any]) -> dict[str, Any]:
    """Label the weights that are there."""
    return await asking.post("/update_weight_version", {"new_version": read(body, Label).new_version})


UPDATES: Final = {
    operation.__name__: operation
    for operation in (
        init_weight_transfer_engine,
        start_weight_update,
        start_draft_weight_update,
        update_weights,
        finish_weight_update,
        update_weight_version,
    )
}
