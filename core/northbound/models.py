"""What calls may put into `model`: the names that the workers serve, and what plugins add."""

from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct

from core.fleet.worker import Worker
from core.registry import Registry


class ModelCard(Struct, kw_only=True):
    """An entry of `GET /v1/models`, with vLLM's keys."""

    id: str
    object: Literal["model"] = "model"
    #: Unix time, in seconds.
    created: int = 0
    owned_by: str = "headrace"
    #: Path or hub name of what is served.
    root: str | None = None
    #: The model that an adapter belongs to.
    parent: str | None = None
    #: In tokens.
    max_model_len: int | None = None


def list_models(workers: Iterable[Worker], registry: Registry) -> list[ModelCard]:
    """One card per name over these workers, then those that plugins add (`list_models`) to their models, or to none.

    A name that a worker serves keeps the worker's card.

    Of different context lengths, the shortest is what every worker takes; a plugin's card without one gets that of its parent.
    Raises: `CallError`.
    """
    cards = _served(workers)
    added: list[Sequence[ModelCard]] = registry.call("list_models")
    for card in (card for some in added for card in some):
        if card.parent is not None and card.parent not in cards:
            continue
        if card.max_model_len is None and card.parent is not None:
            card.max_model_len = cards[card.parent].max_model_len
        cards.setdefault(card.id, card)
    return list(cards.values())


def _served(workers: Iterable[Worker]) -> dict[str, ModelCard]:
    cards: dict[str, ModelCard] = {}
    for worker in workers:
        info = worker.info
        if info is None or worker.state in ("starting", "gone"):
            continue
        for name in info.models:
            new = ModelCard(id=name, created=int(worker.introduced_at), root=info.model_id, max_model_len=info.max_model_len)
            card = cards.setdefault(name, new)
            card.max_model_len = min(card.max_model_len or info.max_model_len, info.max_model_len)
    return cards
