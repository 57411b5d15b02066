"""The stand-in's command line, read by its own process, and by the proxy beforehand: a wrong one then keeps headrace from starting."""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import click
import msgspec

from plugins.stand_in.engine.encoder import ECTransferConfig
from plugins.stand_in.kv_events import KVEventsConfig
from plugins.stand_in.options import Options

PROGRAM: Final = "python -m plugins.stand_in"
_DEFAULTS = Options()
T = TypeVar("T")


def _option(name: str, help_text: str, **settings: Any) -> Any:
    return click.option(name, default=getattr(_DEFAULTS, name[2:].split("/")[0].replace("-", "_")), help=help_text, **settings)


def _parsed(option: str, text: str, model: type[T]) -> T | None:
    try:
        return msgspec.json.decode(text, type=model) if text else None
    except msgspec.MsgspecError as error:
        raise click.BadParameter(str(error).replace(" - at `$", " at `"), param_hint=option) from error


@click.command(context_settings={"show_default": True})
@_option("--host", "Address that both servers listen on.")
@_option("--grpc-port", "0: any free port.", type=click.IntRange(0, 65535))
@_option("--http-port", "0: any free port.", type=click.IntRange(0, 65535))
@_option("--side-channel-port", "Where KV blocks are handed over; 0: any free port.", type=click.IntRange(0, 65535))
@_option("--model", "Id of the model.")
@click.option("--served-model-name", "served_model_names", multiple=True, help="Name, then aliases.  [default: the model]")
@_option("--max-model-len", "Tokens of prompt and output.", type=click.IntRange(2))
@_option("--vocab-size", "Tokens in the vocabulary; the first 256 are bytes.", type=click.IntRange(257))
@_option("--eos-token-id", "The token that ends a sequence.", type=click.IntRange(0))
@_option("--max-logprobs", "Most candidates per position; -1: no limit.", type=click.IntRange(-1))
@_option("--data-parallel-size", "Data-parallel ranks: each is an engine with its own prefix cache.", type=click.IntRange(1))
@_option("--world-size", "GPUs of each of them.", type=click.IntRange(1))
@_option("--block-size", "Tokens in a block of the prefix cache.", type=click.IntRange(1))
@_option("--cache-blocks", "Blocks that the prefix cache keeps.", type=click.IntRange(0))
@click.option("--kv-events-config", metavar="JSON", default="", help="As vLLM's: where KV events are published.")
@_option("--enable-lora/--no-enable-lora", "Accept LoRA adapters.")
@_option("--enable-media/--no-enable-media", "Accept images, videos and sounds, prepared, over gRPC.")
@click.option("--ec-transfer-config", metavar="JSON", default="", help="As vLLM's: who looks at them for whom.")
@_option("--enable-sleep-mode/--no-enable-sleep-mode", "Accept sleep and wake-up.")
@_option("--weight-transfer-backend", "`nccl` is checked as vLLM does; another name takes anything; empty: none.")
@_option("--kv-lease", "Seconds that a prefill keeps its blocks for a decode that doesn't come.", type=click.FloatRange(0))
@_option("--kv-transfer-delay", "Seconds that a decode takes to get them.", type=click.FloatRange(0))
@_option("--token-delay", "Seconds before each token.", type=click.FloatRange(0))
@_option("--stream-interval", "Tokens per streamed message, after the first.", type=click.IntRange(1))
@_option("--shutdown-timeout", "Seconds that running calls may go on after SIGTERM.", type=click.FloatRange(0))
@click.option("--exit-with-parent", is_flag=True, help="End when stdin closes.")
@click.pass_obj
def command(use: Callable[[Options], T], kv_events_config: str, ec_transfer_config: str, **settings: Any) -> T:
    """A worker that keeps vLLM 0.33's contract on gRPC and HTTP, without a model.

    Prints one JSON line with its ports when it is ready.
    """
    kv_events = _parsed("--kv-events-config", kv_events_config, KVEventsConfig)
    ec_transfer = _parsed("--ec-transfer-config", ec_transfer_config, ECTransferConfig)
    options = Options(kv_events=kv_events, ec_transfer=ec_transfer, **settings)
    if options.eos_token_id >= options.vocab_size:
        raise click.BadParameter(f"must be below --vocab-size, {options.vocab_size}", param_hint="--eos-token-id")
    return use(options)


def parse(arguments: Sequence[str]) -> Options:
    """The options that these arguments give. Raises: `ValueError`, which says in one line what is wrong and what is allowed."""
    try:
        # Without `--help`, which would print.
        with command.make_context(PROGRAM, list(arguments), obj=_same, help_option_names=[]) as context:
            return command.invoke(context)
    except click.ClickException as error:
        raise ValueError(f"{error.format_message().rstrip('.')}; `{PROGRAM} --help` shows what is allowed") from error


def _same(options: Options) -> Options:
    return options
