"""Adapters: `load_lora`, `unload_lora` and `list_loras` of `/engine/update`, and `POST /v1/loras`.

Plugin `lora` does it, on every worker of a model or on none, whichever of them was asked. A failure is a 200 that says so; but for files
that aren't there (yet: network file systems take their time) it is a 404, after which trainers ask again.
"""

from collections.abc import Mapping
from hashlib import blake2b
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from core import CallError
from plugins.dynamo.asking import Asking, Refused, read


class Source(Struct):
    """Where an adapter comes from: `file:///absolute`, or `hf://owner/name`."""

    uri: str


class Load(Struct):
    """Body of `load_lora`. `load_inplace` replaces an adapter of that name."""

    lora_name: str
    source: Source
    load_inplace: bool | None = None


class Unload(Struct):
    """Body of `unload_lora`."""

    lora_name: str


class LoraFailed(Exception):
    """An adapter was not loaded, unloaded or listed; the status and the body of the reply."""

    def __init__(self, error: "CallError | Refused", lora_name: Any) -> None:
        missing = isinstance(error, CallError) and error.status == HTTPStatus.NOT_FOUND and error.param == "lora_path"
        self.status = HTTPStatus.NOT_FOUND if missing else HTTPStatus.OK
        message = error.message if isinstance(error, CallError) else str(error)
        self.body = {"status": "error", "message": message, "lora_name": lora_name}
        super().__init__(message)


async def load_lora(asking: Asking, body: Mapping[str, Any]) -> dict[str, Any]:
    """Load an adapter. The same source again is no error, and changes nothing."""
    try:
        asked = read(body, Load)
        name, inplace = asked.lora_name.strip(), bool(asked.load_inplace)
        models = _models(asking)
        base = name if name in models else models[0]
        sent = {"lora_name": name, "lora_path": path_of(asked.source.uri), "load_inplace": inplace, "base_model": base}
        await asking.of_all().post("/v1/load_lora_adapter", sent)
    except (CallError, Refused) as error:
        raise LoraFailed(error, body.get("lora_name")) from error
    return {**_succeeded(name, "loaded"), "hot_swap": inplace}


async def unload_lora(asking: Asking, body: Mapping[str, Any]) -> dict[str, Any]:
    """Unload an adapter."""
    try:
        name = read(body, Unload).lora_name
        await _demand_ours(asking, name)
        await asking.of_all().post("/v1/unload_lora_adapter", {"lora_name": name})
    except (CallError, Refused) as error:
        raise LoraFailed(error, body.get("lora_name")) from error
    return _succeeded(name, "unloaded")


async def list_loras(asking: Asking, body: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - it has no arguments
    """The adapters that are loaded, of this model."""
    models = _models(asking)
    names = sorted(name for name, base in (await _loaded(asking)).items() if base in models)
    return {"status": "success", "count": len(names), "loras": {name: _id(name) for name in names}}


async def _loaded(asking: Asking) -> dict[str, str]:
    """All adapters of the fleet, each with the model that it is for."""
    return {lora["lora_name"]: lora["base_model"] for lora in (await asking.of_all().get("/v1/loras"))["loras"]}


async def _demand_ours(asking: Asking, name: str) -> None:
    """Raises: `Refused` for an adapter of another model; one that isn't there is the affair of plugin `lora`."""
    models = _models(asking)
    if (base := (await _loaded(asking)).get(name, models[0])) not in models:
        raise Refused(f"lora_name: the adapter {name!r} is for {base}, and not for {models[0]}")


def _models(asking: Asking) -> list[str]:
    """The names of the model of the workers that were asked."""
    return list(dict.fromkeys(name for worker in asking.workers() for name in worker.models))


def path_of(uri: str) -> str:
    """What the workers load. Raises: `Refused` for a URI that names neither a folder nor a hub's adapter."""
    parts = urlsplit(uri)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/") and not parts.query and not parts.fragment:
        return unquote(parts.path)
    if parts.scheme == "hf" and parts.netloc and parts.path.strip("/") and not parts.query and not parts.fragment:
        return f"{parts.netloc}/{parts.path.strip('/')}"
    raise Refused(f"source.uri: {uri!r} is neither file:///absolute/path nor hf://owner/name")


def _succeeded(name: str, what: str) -> dict[str, Any]:
    return {"status": "success", "message": f"LoRA adapter '{name}' was {what}", "lora_name": name, "lora_id": _id(name)}


def _id(name: str) -> int:
    """A number for the name; each worker has one of its own for it."""
    return int.from_bytes(blake2b(name.encode(), digest_size=4).digest()) >> 1 or 1


LORAS: Final = {operation.__name__: operation for operation in (load_lora, unload_lora, list_loras)}
