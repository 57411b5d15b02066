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
