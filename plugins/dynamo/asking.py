"""How an operation is done: by another route of headrace, for the same workers, in the name of the same client."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, structs

from core import Administration, HTTPRequest, Method, Routes, Worker, WorkerControl, who, whom

S = TypeVar("S", bound=Struct)
T = TypeVar("T")


class Refused(Exception):
    """The body of an operation is wrong; no worker has heard of it."""


class Asking:
    """One operation's request: for which workers, and what it may ask. `scope` is what stands before the operation in its path."""

    def __init__(self, routes: Routes, administration: Administration, request: HTTPRequest, scope: str) -> None:
        self._routes = routes
        self._administration = administration
        self._scope = scope
        self.request = request

    def workers(self, *, update: bool = False) -> list[Worker]:
        """The workers that are meant, see `Administration.select`."""
        return whom(self._administration, self.request, update=update)

    async def post(self, path: str, body: Any = None, **query: "str | Sequence[str] | None") -> Any:
        """The JSON that this route answers. A query's value may be a list, and `None` leaves it out. Raises what `Routes.ask` does."""
        return await self._ask("POST", path, body, query)

    async def get(self, path: str) -> Any:
        """The same with GET."""
        return await self._ask("GET", path, None, {})

    def of_all(self) -> "Asking":
        """The same request, for routes that are there for all workers alone."""
        return Asking(self._routes, self._administration, self.request, "")

    async def read(self, name: str, workers: Sequence[Worker], question: Callable[[WorkerControl], Awaitable[T]]) -> list[T]:
        """Each worker's answer to what changes nothing. Raises: `CallError`."""
        return await self._administration.read(name, workers, question)

    async def call_method(self, body: Mapping[str, Any], *, version: str | None) -> None:
        """What `/collective_rpc` does, and label the weights afterwards. Raises: `CallError`."""
        workers = self.workers(update=True)
        await self._administration.methods.call(workers, body, by=who(self.request), version=version)

    async def _ask(self, method: Method, path: str, body: Any, query: Mapping[str, "str | Sequence[str] | None"]) -> Any:
        repeated = {name: [value] if isinstance(value, str) else list(value) for name, value in query.items() if value is not None}
        single = {name: values[0] for name, values in repeated.items() if values}
        if model := self.request.query.get("model"):
            single["model"] = model
        content = b"" if body is None else msgspec.json.encode(body)
        reply = await self._routes.ask(
            structs.replace(self.request, method=method, path=f"{self._scope}{path}", query=single, repeated=repeated, body=content)
        )
        return msgspec.json.decode(reply.body) if reply.body and reply.content_type == "application/json" else None


def read(body: Mapping[str, Any], type_: type[S]) -> S:
    """The keys of a body that an operation knows. Raises: `Refused`."""
    try:
        return msgspec.convert(body, type_)
    except msgspec.ValidationError as error:
        raise Refused(str(error)) from error
