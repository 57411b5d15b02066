"""Who asks, as the journal names them."""

from core.routes import HTTPRequest


def who(request: HTTPRequest) -> str:
    """The client's address, and what it calls itself."""
    return f"{request.client} {request.headers.get('user-agent', '')[:100]}".strip() or "somebody"
