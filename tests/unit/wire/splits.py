"""Cutting a byte string anywhere, for tests that say that it makes no difference."""

from itertools import pairwise


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """The pieces of `data` between these places (taken modulo its length)."""
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:stop] for start, stop in pairwise(edges)]
