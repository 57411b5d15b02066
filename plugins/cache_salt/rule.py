"""What may be a salt, and how a policy version becomes one."""

import re
from functools import lru_cache
from hashlib import sha256
from typing import Any, Final

from core import BadRequest

#: vLLM 0.33: 1 to 128 characters, none of `@ / \\ NUL`. vLLM 0.31 checks nothing.
_ALLOWED: Final = re.compile(r"[^@/\\\x00]{1,128}")
#: vLLM 0.33's own words.
_REFUSAL: Final = r"Parameter 'cache_salt' must be a non-empty string of at most 128 characters and must not contain '@', '/', '\', or NUL."


def check_salt(value: Any, path: str) -> str:
    """`value` as a salt; `path` is where it stands in the request.

    Raises: `BadRequest` with vLLM's message, and with the path in it when that isn't vLLM's own.
    """
    if isinstance(value, str) and _is_salt(value):
        return value
    raise BadRequest(_REFUSAL if path == "cache_salt" else f"{path}: {_REFUSAL}", param=path)


@lru_cache
def salt_of_version(version: str) -> str:
    """The salt that stands for a policy version: the version itself where that may be one, else its digest.

    Different versions have different salts: a digest is told from a version by a prefix and 64 hexadecimal digits.
    """
    return version if _is_salt(version) else f"sha256-{sha256(version.encode()).hexdigest()}"


def _is_salt(text: str) -> bool:
    return _ALLOWED.fullmatch(text) is not None
