"""Response headers whose values others chose: a plugin's reason, a client's id."""

from collections.abc import Mapping
from typing import Final

#: What ends a line, or is refused in a header by HTTP servers.
_CONTROL: Final = dict.fromkeys([*range(0x20), 0x7F], " ")


def encode_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """The headers as ASGI wants them. No value can end its header or fail the response: control characters become spaces, spaces at the
    ends go, and what is not ASCII becomes `?`.
    """
    return [(name.lower().encode(), value.translate(_CONTROL).strip().encode("ascii", "replace")) for name, value in headers.items()]
