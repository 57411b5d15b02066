"""What an encode worker's connector tells the next worker: where that finds what was made of each of the media."""

from typing import Any

from tests.workers.scripted_engine.wire import Finish, Output, Request


def ec_items(identifiers: list[str]) -> list[dict[str, Any]]:
    """An item for each of the media. Its numbers are such that may be lost on their way: 0.33's server reads `mm_hash`, nobody the rest."""
    return [
        {
            "mm_hash": identifier,
            "item_indices": [index],
            "image_grid_thw": [1, 4, 4],
            "peer_host": "127.0.0.1",
            "peer_port": 5601,
            "size_bytes": 2**40 + 1,
            "share": 0.25,
            "salt": None,
        }
        for index, identifier in enumerate(identifiers)
    ]


def end_with_what_was_seen(request: Request, output: Output) -> None:
    """End a request as vLLM's encode workers do: by STOP, without a token."""
    output.token_ids, output.logprobs, output.finish = [], None, Finish.STOP
    output.ec_transfer_params = {"ec_items": ec_items([feature["identifier"] for feature in request.mm_features or []])}
