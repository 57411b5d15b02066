"""Weights, compared; for modules that run in the engine's environment, which has torch."""

# pyright: reportMissingImports=false

from collections.abc import Mapping

from torch import Tensor


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether the names, in their order, types, shapes and values are the same."""
    return list(one) == list(other) and all(
        one[name].dtype == other[name].dtype and one[name].shape == other[name].shape and one[name].equal(other[name]) for name in one
    )
