"""A running headrace, as its commands see it."""

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import click
import httpx
import msgspec

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8000"
#: In seconds; an answer may take as long as the longest call, for which a pause may wait.
_TIMEOUT: Final = httpx.Timeout(24 * 3600.0, connect=10.0)

URL = click.option("--url", envvar="HEADRACE_URL", default=DEFAULT_URL, show_default=True, help="Where headrace listens; $HEADRACE_URL.")


class Headrace:
    """Its routes. Each method raises `click.ClickException` with headrace's own words when it refuses, or when it can't be reached."""

    def __init__(self, url: str) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")

    def get(self, path: str, type_: type[T]) -> T:
        """The answer to a GET."""
        return self._ask("GET", path, type_)

    def post(
        self,
        path: str,
        type_: type[T],
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> T:
        """The answer to a POST."""
        return self._ask("POST", path, type_, body, query, headers)

    def _ask(
        self,
        method: str,
        path: str,
        type_: type[T],
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> T:
        try:
            # Who has set a proxy for the world outside doesn't mean this.
            url = f"{self.url}{path}"
            sent = {"user-agent": "headrace", **(headers or {})}
            response = httpx.request(method, url, json=body, params=query, headers=sent, timeout=_TIMEOUT, trust_env=False)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise click.ClickException(f"no headrace answers at {self.url} (--url, $HEADRACE_URL): {error}") from error
        if not response.is_success:
            raise click.ClickException(_words(response))
        try:
            return msgspec.json.decode(response.content, type=type_)
        except msgspec.MsgspecError as error:
            raise click.ClickException(f"{self.url}{path} doesn't answer as headrace does: {error}") from error


def _words(response: httpx.Response) -> str:
    try:
        return str(msgspec.json.decode(response.content)["error"]["message"])
    except (msgspec.MsgspecError, LookupError, TypeError):
        return f"{response.request.url} answers {response.status_code}"
