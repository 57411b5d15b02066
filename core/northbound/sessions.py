"""The end of a session, which its client tells."""

from collections.abc import Callable
from typing import Final

from core.errors import BadRequest
from core.routes import HTTPReply, HTTPRequest, Routes

#: In bytes of UTF-8, as in Prime-RL's router.
_MAX_ID: Final = 256


def add_session_routes(routes: Routes, finish: Callable[[str], None]) -> None:
    """`POST /finish_session?session_id=`; `finish` is told which one."""

    async def finish_session(request: HTTPRequest) -> HTTPReply:
        finish(_session_of(request))
        return HTTPReply.json({"status": "ok"})

    routes.add("POST", "/finish_session", finish_session)


def _session_of(request: HTTPRequest) -> str:
    session_id = request.query.get("session_id", "")
    if not session_id:
        raise BadRequest("session_id: this field is required, in the query: /finish_session?session_id=ID", param="session_id")
    if len(session_id.encode()) > _MAX_ID:
        raise BadRequest(f"session_id: at most {_MAX_ID} bytes", param="session_id")
    return session_id
