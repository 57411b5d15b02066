"""What each data-parallel rank has for itself; weights, adapters and whether calls may go on are the same for all of them."""

from plugins.stand_in.engine.handoff import Handoffs
from plugins.stand_in.engine.prefix_cache import PrefixCache
from plugins.stand_in.kv_events import KVEventsConfig
from plugins.stand_in.options import Options


class Rank:
    """One of a worker's engines."""

    def __init__(self, number: int, options: Options) -> None:
        self.number = number
        self.handoffs = Handoffs(options, number)
        self.prefix_cache = PrefixCache(options.block_size, options.cache_blocks)
        self.kv_events: KVEventsConfig | None = None  #: where they are published, while they are
        self.prompt_tokens = 0  #: of all calls that made a token
        self.output_tokens = 0  #: of all calls


def parse_rank(text: str) -> int | None:
    """The rank that a header or metadata names, as vllm-rs 0.33.0 reads it; None when it is no unsigned number of 32 bits."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and int(text) < 2**32 else None
