"""What went wrong on the way to a worker's HTTP server, in words."""

import httpx


def describe(error: httpx.HTTPError) -> str:
    """The text of the error; where it has none, as those of TLS, that of the first cause with one."""
    cause: BaseException | None = error
    while cause:
        if text := str(cause):
            return text if cause is error else f"{type(error).__name__}: {text}"
        cause = cause.__cause__ or cause.__context__
    return type(error).__name__


def key_refused(client: httpx.AsyncClient) -> str:
    """Why the server of this client answers 401: it is headrace's own key that it wants, never its client's."""
    where = str(client.base_url).rstrip("/")
    if "authorization" in client.headers:
        return f"{where} refuses the API key (401): the variable that api_key_env names holds another one"
    return f"{where} wants an API key (401): let api_key_env name the variable that holds it"
