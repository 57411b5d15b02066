"""`headrace route`: where a call would go, and why."""

from collections.abc import Mapping, Sequence
from typing import IO, Any

import click
import msgspec
from msgspec import Struct

from core.remote.client import URL, Headrace


class WorkerView(Struct):
    """A worker of an explanation."""

    id: str
    state: str
    policy_version: str | None
    eligible: bool
    why: str


class PolicyView(Struct):
    """A policy of an explanation."""

    policy: str
    worker: str | None
    rank: int | None
    reason: str


class ChoiceView(Struct):
    """The choice of an explanation."""

    worker: str
    rank: int | None
    wire: str
    reason: str


class ExplanationView(Struct):
    """What `POST /fleet/route` answers, as far as it is shown."""

    choice: ChoiceView | None
    waits: bool
    error: str | None
    policies: list[PolicyView]
    workers: list[WorkerView]
    #: Lines of what comes before.
    legs: list[str] = []


@click.command()
@click.argument("body", type=click.File("rb"), default="-")
@URL
@click.option(
    "--header", "-H", "headers", multiple=True, metavar="'NAME: VALUE'", help="Of the call: x-session-id, x-data-parallel-rank, …"
)
@click.option("--explain", is_flag=True, help="Show every worker, and what each policy says.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def route(body: IO[bytes], url: str, headers: Sequence[str], explain: bool, as_json: bool) -> None:
    """Say where a call would go now, and why. BODY is that of a generate call, a file or by default stdin; nothing is sent to a worker.

    The exit status is 1 when it could go nowhere.
    """
    answer = Headrace(url).post("/fleet/route", msgspec.Raw, _read(body), headers=dict(map(_header, headers)))
    explanation = msgspec.json.decode(answer, type=ExplanationView)
    if as_json:
        click.echo(msgspec.json.format(bytes(answer)).decode())
    else:
        click.echo("\n".join([*(_tables(explanation) if explain else ()), *explanation.legs, _verdict(explanation)]))
    if explanation.error:
        raise click.exceptions.Exit(1)


def _read(file: IO[bytes]) -> Mapping[str, Any]:
    try:
        return msgspec.json.decode(file.read(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise click.ClickException(f"BODY: this is not the body of a generate call: {error}") from error


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise click.UsageError(f"--header: {text!r} is not 'NAME: VALUE'")
    return name.strip().lower(), value.strip()


def _tables(explanation: ExplanationView) -> list[str]:
    workers = [(w.id, w.state, w.policy_version or "?", "yes" if w.eligible else f"no: it {w.why}") for w in explanation.workers]
    policies = [(p.policy, f"{_where(p.worker, p.rank)}, {p.reason}" if p.worker else p.reason) for p in explanation.policies]
    lines = _columns([("worker", "state", "version", "eligible"), *workers])
    return [*lines, "", *_columns([("policy", "says"), *policies]), ""] if policies else [*lines, ""]


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _verdict(explanation: ExplanationView) -> str:
    if choice := explanation.choice:
        return f"{_where(choice.worker, choice.rank)} over {choice.wire}: {choice.reason}"
    return "it would wait at the gate" if explanation.waits else f"nowhere: {explanation.error}"


def _where(worker: str | None, rank: int | None) -> str:
    return f"{worker}" if rank is None else f"{worker} rank {rank}"
