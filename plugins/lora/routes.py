"""The administration of adapters over HTTP: vLLM's routes, fleet-wide, and Prime-RL's."""

from typing import Annotated, TypeVar
from urllib.parse import unquote

import msgspec
from msgspec import Meta, Struct

from core import BadRequest, CallError, Fleet, HTTPReply, HTTPRequest, NotFound, NoWorker, Routes, refusing
from plugins.lora.adapters import Adapters
from plugins.lora.finishing import Finisher
from plugins.lora.names import check_name
from plugins.lora.source import Paths

T = TypeVar("T", bound=Struct)
_Text = Annotated[str, Meta(max_length=4096)]


class LoadBody(Struct, forbid_unknown_fields=True):
    """Body of both load routes; vLLM's, and the model that the adapter is for."""

    lora_name: str
    lora_path: _Text
    load_inplace: bool | None = None
    is_3d_lora_weight: bool | None = None
    base_model: str | None = None


class UnloadBody(Struct, forbid_unknown_fields=True):
    """Body of the unload route."""

    lora_name: str
    lora_int_id: int | None = None


class AdapterRoutes:
    """The handlers. What they began goes on when the client has gone."""

    def __init__(self, adapters: Adapters, paths: Paths, finisher: Finisher, fleet: Fleet) -> None:
        self._fleet = fleet
        self._adapters = adapters
        self._paths = paths
        self._finisher = finisher

    def add_to(self, routes: Routes) -> None:
        """Serve them."""
        routes.add("POST", "/v1/load_lora_adapter", self.load)
        routes.add("POST", "/v1/unload_lora_adapter", self.unload)
        routes.add("GET", "/v1/loras", self.list)
        routes.add("POST", "/load_lora_adapter", self.load_for_prime_rl)
        # A trainer that speaks to each worker means all of them: the first one's load is what the others' join.
        routes.add("POST", "/workers/<id>/load_lora_adapter", self.load_for_prime_rl)

    async def load(self, request: HTTPRequest) -> HTTPReply:
        """Load an adapter on every worker."""
        body = _read(request, LoadBody)
        await self._load(body, in_place=bool(body.load_inplace))
        return _success(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def load_for_prime_rl(self, request: HTTPRequest) -> HTTPReply:
        """Load an adapter, in the place of one of that name. Prime-RL asks again after a 404 or a 500, and gives up at a 503."""
        body = _read(request, LoadBody)
        if (id_ := unquote(request.parameters.get("id", ""))) and id_ not in self._fleet.workers:
            raise NotFound(f"there is no worker {id_!r}; the fleet has {', '.join(self._fleet.workers) or 'none'}")
        try:
            await self._load(body, in_place=True)
        except NoWorker as error:
            raise CallError(500, error.message) from error
        return HTTPReply.json({"status": "ok"})

    async def unload(self, request: HTTPRequest) -> HTTPReply:
        """Unload an adapter from every worker."""
        body = _read(request, UnloadBody)
        if body.lora_int_id is not None:
            raise BadRequest("lora_int_id: each worker has an id of its own for an adapter; send lora_name alone", param="lora_int_id")
        await self._finisher.finish(lambda: self._adapters.unload(body.lora_name))
        return _success(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def list(self, request: HTTPRequest) -> HTTPReply:  # noqa: ARG002 - a handler has this argument
        """What is loaded, and where."""
        current = self._adapters.versions.current
        return HTTPReply.json(
            {
                "loras": [
                    {
                        "lora_name": version.name,
                        "lora_path": version.source.path,
                        "base_model": version.base,
                        "on_workers": version.on_workers,
                        "workers": sorted(worker.id for worker in version.holders),
                        "calls": version.calls,
                    }
                    for _, version in sorted(current.items())
                ]
            }
        )

    async def _load(self, body: LoadBody, *, in_place: bool) -> None:
        check_name(body.lora_name)
        source = await self._paths.source(body.lora_path, is_3d=bool(body.is_3d_lora_weight))
        # Who writes new weights to an old place says load_inplace; where headrace can't see what they are, that counts.
        reload = bool(body.load_inplace)

        async def load() -> None:
            await self._adapters.load(body.lora_name, source, base=body.base_model, in_place=in_place, reload=reload)
            # Nobody needs to wait until the version before is gone.
            self._finisher.start(self._adapters.sweep)

        await self._finisher.finish(load)


def _read(request: HTTPRequest, type_: type[T]) -> T:
    with refusing("", type_):
        return msgspec.json.decode(request.body, type=type_)


def _success(text: str) -> HTTPReply:
    return HTTPReply(text.encode(), content_type="text/plain; charset=utf-8")
