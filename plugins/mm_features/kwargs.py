"""The `kwargs` of one item, as vLLM 0.33 reads them: named fields, each with its data and how items are joined to a batch.

Checked without building a tensor: a tensor's bytes are counted, never read.
"""

from collections.abc import Callable
from math import prod
from typing import Any, Final

from plugins.mm_features.msgpack import Extension, Malformed, walk

#: The extension type of a tensor's bytes.
_TENSOR: Final = 3
_MAX_DIMENSIONS: Final = 16
#: dtype → bytes of one element.
_DTYPES: Final = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64"), 8),
}


def check_kwargs(data: bytes) -> None:
    """Raises: `Malformed`, which says what the worker wouldn't take."""
    fields = walk(data)
    if not isinstance(fields, dict) or not fields:
        raise Malformed("it is no map with at least one field")
    for name, field in fields.items():
        if not name:
            raise Malformed("a field has no name")
        try:
            _check_field(field)
        except Malformed as error:
            raise Malformed(f"field {name[:64]!r}: {error}") from error


def _check_field(field: Any) -> None:
    if not isinstance(field, dict) or field.keys() != {"data", "field"}:
        raise Malformed("it is no map of `data` and `field`")
    _check_data(field["data"])
    _check_factory(field["field"])


def _check_data(data: Any) -> None:
    match data:
        case [str(dtype), shape, content]:
            _check_tensor(dtype, shape, content)
        case list():
            for item in data:
                _check_data(item)
        case float():
            pass
        case _ if not _is_whole(data):
            raise Malformed("its data are no tensor, number, or list of these")


def _check_tensor(dtype: str, shape: Any, content: Any) -> None:
    if dtype not in _DTYPES:
        raise Malformed(f"a tensor's dtype is {dtype[:32]!r}; known are {', '.join(_DTYPES)}")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(_is_whole(n) and 0 <= n < 2**32 for n in shape):
        raise Malformed(f"a tensor's shape is no list of up to {_MAX_DIMENSIONS} lengths")
    if not isinstance(content, Extension) or content.type != _TENSOR:
        raise Malformed(f"a tensor's bytes don't stand in line, as an extension of type {_TENSOR}")
    if content.size != (expected := prod(shape) * _DTYPES[dtype]):
        raise Malformed(f"a tensor of {dtype} and shape {shape} has {content.size} bytes instead of {expected}")


def _check_factory(factory: Any) -> None:
    match factory:
        case [str(name), dict(keywords)] if name in _FACTORIES and keywords.keys() <= _FACTORIES[name].keys():
            pass
        case _:
            raise Malformed(f"its `field` is none of {', '.join(_FACTORIES)} with their keywords")
    for keyword, (is_right, what) in _FACTORIES[name].items():
        if keyword in keywords and not is_right(keywords[keyword]):
            raise Malformed(f"`{keyword}` is no {what}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_slice(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(end is None or _is_whole(end) for end in value)


def _are_slices(value: Any) -> bool:
    return isinstance(value, list) and all(_is_slice(part) or (isinstance(part, list) and all(map(_is_slice, part))) for part in value)


_Check = tuple[Callable[[Any], bool], str]
_ON_CPU: Final[dict[str, _Check]] = {"keep_on_cpu": (lambda value: isinstance(value, bool), "boolean")}
#: How items are joined → the keywords that it takes, each with its check.
_FACTORIES: Final[dict[str, dict[str, _Check]]] = {
    "batched": _ON_CPU,
    "flat": {"slices": (_are_slices, "list of [start, stop, step]"), "dim": (_is_whole, "number"), **_ON_CPU},
    "shared": {"batch_size": (lambda value: _is_whole(value) and value > 0, "positive number"), **_ON_CPU},
}
