"""What `GET /metrics` tells of the index: made when somebody asks, from counters that are kept anyway."""

from collections.abc import Iterable

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plugins.routing_kv.followers import Followers
from plugins.routing_kv.index import MEDIA
from plugins.routing_kv.places import Caches, Places


class Hits(Struct):
    """Of the prompts that were sent, in tokens: all, and what was expected to be cached."""

    prompt_tokens: int = 0
    expected_tokens: int = 0


class IndexCollector(Collector):
    """The collector for the registry."""

    def __init__(self, places: Places, caches: Caches, followers: Followers, hits: Hits) -> None:
        self._places = places
        self._caches = caches
        self._followers = followers
        self._hits = hits

    def collect(self) -> Iterable[Metric]:
        """One sample for each worker and rank, and the sums."""
        yield from self._sizes()
        yield from self._events()
        prompt = CounterMetricFamily("headrace_kv_prompt_tokens", "Tokens of the prompts that policy kv has seen off")
        prompt.add_metric([], self._hits.prompt_tokens)
        yield prompt
        expected = CounterMetricFamily("headrace_kv_expected_tokens", "Of these, tokens that their worker was expected to have cached")
        expected.add_metric([], self._hits.expected_tokens)
        yield expected

    def _sizes(self) -> Iterable[Metric]:
        index = self._caches.index
        held = GaugeMetricFamily("headrace_kv_blocks", "Blocks that a worker has, as its events tell", labels=["worker", "rank", "medium"])
        load = GaugeMetricFamily("headrace_kv_load_tokens", "Tokens that are to be computed there", labels=["worker", "rank"])
        for place in self._places:
            labels = [place.worker.id, str(place.rank or 0)]
            for medium in MEDIA:
                held.add_metric([*labels, medium], place.feed.holder.blocks(medium))
            load.add_metric(labels, place.load)
        distinct = GaugeMetricFamily("headrace_kv_index_blocks", "Different blocks in the index", labels=["medium"])
        for medium in MEDIA:
            distinct.add_metric([medium], index.blocks(medium))
        guesses = GaugeMetricFamily("headrace_kv_guessed_blocks", "Blocks that were sent lately")
        guesses.add_metric([], len(self._caches.soon) + len(self._caches.believed))
        refused = CounterMetricFamily("headrace_kv_refused_blocks", "Blocks for which the index had no room (max_blocks)")
        refused.add_metric([], index.refused)
        yield from (held, load, distinct, guesses, refused)

    def _events(self) -> Iterable[Metric]:
        events = CounterMetricFamily("headrace_kv_events", "What a worker's events said, in blocks", labels=["worker", "rank", "event"])
        gaps = CounterMetricFamily("headrace_kv_gaps", "Times that events were missing", labels=["worker", "rank"])
        losses = CounterMetricFamily("headrace_kv_losses", "Times that missing events could not be had again", labels=["worker", "rank"])
        for place, subscription in self._followers.subscriptions.items():
            labels, feed, counters = [place.worker.id, str(place.rank or 0)], place.feed, subscription.counters
            told = {
                "stored": feed.stored,
                "removed": feed.removed,
                "cleared": feed.cleared,
                "orphaned": feed.orphans,
                "malformed": feed.malformed + counters.malformed,
                "restarted": counters.restarts,
            }
            for event, count in told.items():
                events.add_metric([*labels, event], count)
            gaps.add_metric(labels, counters.gaps)
            losses.add_metric(labels, counters.losses)
        yield from (events, gaps, losses)
