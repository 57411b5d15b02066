"""`headrace update`: ask for a weight update, and watch it."""

import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import click
import msgspec

from core.remote.client import URL, Headrace
from core.remote.progress import UpdateProgress, display

#: Between two looks at an update.
_SECONDS: Final = 0.1


@click.command()
@URL
@click.option("--version", required=True, help="The policy version that the workers have afterwards.")
@click.option("--transport", required=True, help="How the weights travel: filesystem, nccl, …")
@click.option("-o", "options", multiple=True, metavar="KEY=VALUE", help="The transport's own; a value that is JSON is read as such.")
@click.option("--model", default="", help="Whose workers; it needs no name when there is one.")
@click.option("--cohort", default="", help="The workers of a named cohort.")
@click.option("--mode", type=click.Choice(["keep", "wait", "abort"]), default="keep", show_default=True, help="What becomes of calls.")
@click.option("--clear-cache", is_flag=True, help="Empty the prefix caches.")
@click.option("--watch", is_flag=True, help="Stay, and show how far each worker is.")
def update(
    url: str, version: str, transport: str, options: Sequence[str], model: str, cohort: str, mode: str, clear_cache: bool, watch: bool
) -> None:
    """Update the weights of the fleet, or of a cohort.

    Without --watch it prints the update's id and ends; the update runs in headrace. With --watch the exit status is 0 only when every
    worker has the weights.
    """
    own: dict[str, Any] = {"version": version, "transport": transport, "mode": mode, "clear_cache": clear_cache}
    body = {**_parse(options), **own, "model": model, "cohort": cohort}
    headrace = Headrace(url)
    progress = headrace.post("/fleet/updates", UpdateProgress, body)
    if not watch:
        click.echo(progress.id)
        return
    shown = display()
    click.echo(f"update {progress.id} to version {version} over {transport}")
    while progress.status == "running":
        shown.show(progress)
        time.sleep(_SECONDS)
        try:
            progress = headrace.get(f"/fleet/updates/{progress.id}", UpdateProgress)
        except click.ClickException as error:
            text = f"update {progress.id} may go on; look again: curl {headrace.url}/fleet/updates/{progress.id}"
            raise click.ClickException(f"{error.message}\n{text}") from error
    shown.show(progress)
    if progress.status == "failed":
        click.echo(f"Error: {progress.error}", err=True)
        sys.exit(1)


def _parse(options: Sequence[str]) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    for option in options:
        key, separator, value = option.partition("=")
        if not separator or not key:
            raise click.BadParameter(f"{option!r} is not KEY=VALUE", param_hint="-o")
        try:
            parsed[key] = msgspec.json.decode(value)
        except msgspec.MsgspecError:
            parsed[key] = value
    return parsed
