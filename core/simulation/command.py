"""`headrace simulate`."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from core.errors import BadRequest
from core.log import configure_log
from core.refusals import refusing
from core.settings import LogSettings, RoutingSettings, Settings, SettingsError, load_settings
from core.simulation.engine import EngineModel
from core.simulation.plot import plot
from core.simulation.replay import Replay, replay
from core.simulation.report import judge, table
from core.simulation.trace import BLOCK_SIZE, TraceError, Turn, read_trace, write_trace
from core.simulation.workloads import WORKLOADS, Workload

_MODEL = EngineModel()
_RATE = click.FloatRange(0, 1e9, min_open=True)


class _Picture(click.Path):
    """Known before the replay, not after it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if Path(value).suffix not in (".png", ".svg", ".pdf"):
            self.fail(f"{value!r}: a picture's name ends in .png, .svg or .pdf", param, ctx)
        return super().convert(value, param, ctx)


@click.command(context_settings={"show_default": True})
@click.option(
    "--policy",
    "policies",
    multiple=True,
    help="To judge: a policy, or several joined by commas; repeat it to compare.  [default: the settings' own]",
)
@click.option("--trace", "trace_path", type=click.Path(exists=True, dir_okay=False), help="JSONL to replay, one turn a line.")
@click.option("--workload", type=click.Choice(sorted(WORKLOADS)), help="Make up a trace instead.  [default: agents]")
@click.option("--set", "changes", multiple=True, metavar="NAME=NUMBER", help=f"Of the workload: {', '.join(Workload.__struct_fields__)}.")
@click.option("--seed", default=0, help="Of the workload.")
@click.option("--workers", default=16, type=click.IntRange(1, 1000))
@click.option("--kv-blocks", default=_MODEL.kv_blocks, type=click.IntRange(0), help=f"Blocks of {BLOCK_SIZE} tokens in each prefix cache.")
@click.option("--max-running", default=_MODEL.max_running, type=click.IntRange(1), help="Calls in a worker's batch.")
@click.option("--prefill-tokens-per-second", default=_MODEL.prefill_tokens_per_second, type=_RATE, help="Of a worker.")
@click.option("--decode-seconds", default=_MODEL.decode_seconds, type=_RATE, help="A token of a lonely call.")
@click.option(
    "--decode-seconds-per-call", default=_MODEL.decode_seconds_per_call, type=click.FloatRange(0, 1e9), help="More for each other call."
)
@click.option("--config", type=click.Path(dir_okay=False), help="headrace.toml, for the settings of the plugins.")
@click.option("--plot", "plot_path", type=_Picture(dir_okay=False), help="Draw the comparison: .png, .svg or .pdf (extra: plot).")
@click.option("--save-trace", type=click.Path(dir_okay=False), help="Write what was replayed.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def simulate(
    policies: Sequence[str],
    trace_path: str | None,
    workload: str | None,
    changes: Sequence[str],
    seed: int,
    workers: int,
    config: str | None,
    plot_path: str | None,
    save_trace: str | None,
    as_json: bool,
    **model: float,
) -> None:
    """Judge routing policies before they meet GPUs: replay a trace on simulated workers, in virtual time, with the production code.

    The worker model is simple: one prefill at a time, a batch that decodes together, a prefix cache that forgets what was used least
    recently. headrace's README says what a line of a trace holds. Ends with 1 when a call has failed.
    """
    if trace_path and (workload or changes):
        raise click.UsageError("--trace and --workload are two sources of turns; give one")
    for name, number in model.items():
        if math.isnan(number):
            raise click.BadParameter("it must be a number", param_hint=f"--{name.replace('_', '-')}")
    turns = _turns(trace_path, workload or "agents", changes, seed)
    if save_trace:
        try:
            write_trace(save_trace, turns)
        except OSError as error:
            raise click.ClickException(f"--save-trace: {error}") from error
    replays = _replays(turns, policies, config, workers, msgspec.convert(model, EngineModel))
    judgements = {name: judge(each) for name, each in replays.items()}
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(judgements)))
    else:
        click.echo(f"{len(turns):,} calls of {len({turn.session for turn in turns}):,} sessions on {workers:,} workers\n")
        click.echo(table(judgements))
    for name, each in replays.items():
        for error, times in each.failures.items():
            click.echo(f"{name}: {times} calls failed: {error}", err=True)
    if plot_path:
        _plot(replays, plot_path)
    sys.exit(any(each.failures for each in replays.values()))


def _turns(path: str | None, workload: str, changes: Sequence[str], seed: int) -> list[Turn]:
    try:
        if path:
            return read_trace(path)
        made = WORKLOADS[workload]()
        for change in changes:
            name, _, number = change.partition("=")
            with refusing("", Workload):
                made = msgspec.convert({**msgspec.to_builtins(made), name: number}, Workload, strict=False)
    except (TraceError, OSError) as error:
        raise click.ClickException(str(error)) from error
    except BadRequest as error:
        raise click.UsageError(f"--set: {error.message}") from error
    return list(made.trace(seed))


def _replays(turns: list[Turn], policies: Sequence[str], config: str | None, workers: int, model: EngineModel) -> dict[str, Replay]:
    configure_log(LogSettings(level="error"))
    try:
        settings = load_settings(config)
        if not policies:
            return {" → ".join(settings.routing.policies): replay(turns, settings, workers=workers, model=model)}
        return {name: replay(turns, _with_policies(settings, name), workers=workers, model=model) for name in policies}
    except SettingsError as error:
        raise click.ClickException(str(error)) from error


def _with_policies(settings: Settings, names: str) -> Settings:
    return msgspec.structs.replace(settings, routing=RoutingSettings(policies=[name.strip() for name in names.split(",")]))


def _plot(replays: dict[str, Replay], path: str) -> None:
    try:
        plot(replays, path)
    except ImportError as error:
        raise click.ClickException("--plot needs matplotlib: pip install 'headrace[plot]'") from error
    except (OSError, ValueError) as error:
        raise click.ClickException(f"--plot: {error}") from error
