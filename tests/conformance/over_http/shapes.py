"""What two replies have to have in common: keys in their order, types, lengths. Not the tokens, and not the numbers.

`as_0_31` says how the same reply looks in 0.31.
"""

from typing import Any

JSON = Any


def shape(value: JSON) -> JSON:
    """A reply with a word for each value. Objects are lists of pairs, so that their order counts."""
    match value:
        case dict() if value and all(key.isdigit() for key in value):
            # Prompt log-probabilities: token id → entry, in no order, and how many there are depends on the model.
            return {"token id": shape(next(iter(value.values())))}
        case dict():
            return [(key, "number" if key == "logprob" else shape(item)) for key, item in value.items()]
        case list():
            return [shape(item) for item in value]
        case None:
            return None
        case _:
            return type(value).__name__


def as_0_31(value: JSON) -> JSON:
    """The shape of the same thing in 0.31."""
    if not isinstance(value, list):
        return {key: as_0_31(item) for key, item in value.items()} if isinstance(value, dict) else value
    if not value or not all(isinstance(item, tuple) for item in value):
        return [as_0_31(item) for item in value]
    keys = [key for key, _ in value]
    if keys[:1] == ["token_id"]:
        return _token_0_31(dict(value))
    if keys[:1] == ["index"]:
        value = [(key, item) for key, item in value if key != "weight_versions" and (item is not None or key == "logprobs")]
    return [(key, as_0_31(item)) for key, item in value]


def _token_0_31(fields: dict[str, JSON]) -> JSON:
    """Tokens go by their name and its bytes, and have no ranks."""
    token = [("token", "str"), ("logprob", "number"), ("bytes", "characters")]
    return [*token, ("top_logprobs", [token])] if "top_logprobs" in fields else token


def without_counts(value: JSON) -> JSON:
    """A shape of 0.31 in which what has another length than in 0.33 counts as one: a token's name, and its candidates."""
    match value:
        case ("bytes", _):
            return ("bytes", "characters")
        case ("top_logprobs", [first, *_]):
            return ("top_logprobs", [without_counts(first)])
        case (str(key), item):
            return (key, without_counts(item))
        case dict():
            return {key: without_counts(item) for key, item in value.items()}
        case list():
            return [without_counts(item) for item in value]
        case _:
            return value
