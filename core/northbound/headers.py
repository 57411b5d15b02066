"""Headers as ASGI has them, and as everybody else does."""

from collections.abc import Iterable, Mapping
from typing import Final

#: What ends a line, or is refused in a header by HTTP servers.
_CONTROL: Final = dict.fromkeys([*range(0x20), 0x7F], " ")


def decode_headers(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """A request's headers by their names, which are in lower case. Of a name that is there twice, the values are joined by a comma, which
    means the same (RFC 9110, section 5.3).
    """
    decoded: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        decoded[name] = f"{decoded[name]}, {value}" if name in decoded else value
    return decoded


def encode_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Headers whose values others chose (a plugin's reason, a client's id), as ASGI wants them.

    No value can end its header or fail the response: control characters become spaces, spaces at the ends go, and what is not ASCII
    becomes `?`.
    """
    return [(name.lower().encode(), value.translate(_CONTROL).strip().encode("ascii", "replace")) for name, value in headers.items()]
