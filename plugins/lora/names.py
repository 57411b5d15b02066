"""Two names for one adapter: what clients call it, and what workers call each version of it.

The first version of `math` is `math` on the workers, the next ones are `math@1`, `math@2`, …: a version never replaces another one in
place. So calls in flight keep theirs, a load over gRPC (which has no in-place flag) is like one over HTTP, nothing has to be undone on the
workers that go on with the old version, and blocks of the KV cache, whose keys hold the adapter's name, are never taken for another
version's (vLLM up to 0.32: only the name; 0.33: the path too). A name that the workers serve as their model's can't be an adapter's (vLLM
0.33 refuses it), so its first version is `tiny@1`.
"""

import re
from typing import Final

from core import BadRequest

_VERSION: Final = re.compile(r"(.+)@([1-9][0-9]{0,17})", re.DOTALL)
_LONGEST: Final = 256


def name_on_workers(name: str, number: int) -> str:
    """What workers call version `number`, from 0, of an adapter."""
    return f"{name}@{number}" if number else name


def split_name(on_workers: str) -> tuple[str, int]:
    """The name and the version's number behind a name on the workers."""
    found = _VERSION.fullmatch(on_workers)
    return (found[1], int(found[2])) if found else (on_workers, 0)


def check_name(name: str) -> None:
    """Refuse a name that can't be an adapter's. Raises: `BadRequest`."""
    if not name.strip():
        raise BadRequest("lora_name must not be empty", param="lora_name")
    if len(name) > _LONGEST or not name.isprintable():
        raise BadRequest(f"lora_name: at most {_LONGEST} printable characters", param="lora_name")
    if _VERSION.fullmatch(name):
        raise BadRequest(f"lora_name: {name!r} ends in @ and a number, which is how headrace tells versions apart", param="lora_name")
