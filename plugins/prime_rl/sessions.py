"""The end of a session: what `POST /finish_session?session_id=` names."""

from typing import Final

from core import BadRequest, HTTPRequest

#: In bytes of UTF-8, as in Prime-RL's router.
_MAX_ID: Final = 256


def session_of(request: HTTPRequest) -> str:
    """The session that is over.

    Raises: `BadRequest` when none is named, or its id is too long to be one.
    """
    session_id = request.query.get("session_id", "")
    if not session_id:
        raise BadRequest("session_id: this field is required, in the query: /finish_session?session_id=ID", param="session_id")
    if len(session_id.encode()) > _MAX_ID:
        raise BadRequest(f"session_id: at most {_MAX_ID} bytes", param="session_id")
    return session_id
