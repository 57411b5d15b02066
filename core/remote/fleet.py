"""`headrace fleet`: the workers, and what can be done to them by hand."""

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import click
from msgspec import Struct

from core.remote.client import URL, Headrace


class WorkerView(Struct):
    """A worker in `GET /fleet`, as far as the table shows it."""

    id: str
    state: str
    reason: str
    model: str | None = None
    policy_version: str | None = None
    world_size: int = 0
    in_flight: int = 0
    cohort: str | None = None


class WorkerState(Struct):
    """A worker in the answer to what was done to it."""

    id: str
    state: str
    reason: str


class OperationView(Struct):
    """An operation that runs, or waits for its turn (`missing` is `None` then)."""

    operation: str
    by: str
    seconds: float
    missing: list[str] | None = None


class UpdateView(Struct):
    """A weight update that runs."""

    id: str
    transport: str
    by: str
    workers: list[str]
    seconds: float
    version: str | None = None
    silent: float | None = None
    ends_in: float | None = None


class _Fleet(Struct):
    workers: list[WorkerView]
    operations: list[OperationView] = []
    updates: list[UpdateView] = []


class _States(Struct):
    workers: list[WorkerState]


@click.group(invoke_without_command=True)
@URL
@click.option("--json", "as_json", is_flag=True, help="All that GET /fleet tells, for machines.")
@click.pass_context
def fleet(context: click.Context, url: str, as_json: bool) -> None:
    """Show the workers of a running headrace, or do something to them."""
    headrace = context.obj = Headrace(url)
    if context.invoked_subcommand:
        return
    if as_json:
        click.echo(json.dumps(headrace.get("/fleet", dict), indent=2))
        return
    told = headrace.get("/fleet", _Fleet)
    rows = [
        (w.id, w.state, w.policy_version or "?", w.model or "?", str(w.world_size), str(w.in_flight), w.cohort or "", w.reason)
        for w in told.workers
    ]
    click.echo(table(("WORKER", "STATE", "VERSION", "MODEL", "RANKS", "CALLS", "COHORT", "REASON"), rows))
    for line in (*map(_operation, told.operations), *map(_update, told.updates)):
        click.echo(line)


_model = click.option("--model", default="", help="Its workers; it needs no name when there is one.")
_cohort = click.option("--cohort", default="", help="The workers of a named cohort.")


@fleet.command()
@_model
@_cohort
@click.option("--mode", type=click.Choice(["keep", "wait", "abort"]), default="keep", show_default=True, help="What becomes of calls.")
@click.option("--clear-cache", is_flag=True, help="Empty the prefix caches.")
@click.pass_obj
def pause(headrace: Headrace, model: str, cohort: str, mode: str, clear_cache: bool) -> None:
    """Pause all workers or none; new calls wait at the gate."""
    _show(headrace.post("/fleet/pause", _States, {"model": model, "cohort": cohort, "mode": mode, "clear_cache": clear_cache}).workers)


@fleet.command()
@_model
@_cohort
@click.pass_obj
def resume(headrace: Headrace, model: str, cohort: str) -> None:
    """Resume all workers but the quarantined ones."""
    _show(headrace.post("/fleet/resume", _States, {"model": model, "cohort": cohort}).workers)


@fleet.command()
@click.argument("worker")
@click.pass_obj
def drain(headrace: Headrace, worker: str) -> None:
    """Give WORKER no more calls; those that it has go on."""
    _do(headrace, worker, "drain")


@fleet.command()
@click.argument("worker")
@click.option("--reason", default="", help="Shown with the worker.")
@click.pass_obj
def quarantine(headrace: Headrace, worker: str, reason: str) -> None:
    """Give WORKER no more calls, and don't resume it, before it is released. It takes part in updates."""
    _do(headrace, worker, "quarantine", {"reason": reason} if reason else None)


@fleet.command()
@click.argument("worker")
@click.pass_obj
def release(headrace: Headrace, worker: str) -> None:
    """Take back a drain or a quarantine of WORKER, whatever its weights are."""
    _do(headrace, worker, "release")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def _operation(running: OperationView) -> str:
    waits = "for its turn" if running.missing is None else f"for {', '.join(running.missing) or 'nobody'}"
    return f"{running.operation} by {running.by} for {running.seconds:.0f} s, waits {waits}"


def _update(running: UpdateView) -> str:
    version = "" if running.version is None else f" to version {running.version}"
    silent = "" if running.silent is None else f", its trainer silent for {running.silent:.0f} s; ends in {running.ends_in or 0:.0f} s"
    workers = ", ".join(running.workers)
    return f"update {running.id}{version} ({running.transport}) of {workers} by {running.by} for {running.seconds:.0f} s{silent}"


def _do(headrace: Headrace, worker: str, what: str, query: Mapping[str, Any] | None = None) -> None:
    _show([headrace.post(f"/fleet/workers/{quote(worker, safe='')}/{what}", WorkerState, query=query)])


def _show(workers: Sequence[WorkerState]) -> None:
    for worker in workers:
        click.echo(f"{worker.id} is {worker.state}{f': {worker.reason}' if worker.reason else ''}")
