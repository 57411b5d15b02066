"""What a run gives: plain data, as it is written to `bench.json`."""

from collections.abc import Sequence
from statistics import median

from msgspec import Struct, field


class Sample(Struct, frozen=True, kw_only=True):
    """One round of one case at one target. CPU times in milliseconds a request, latencies in milliseconds."""

    rate: float  #: requests a second
    p50: float
    p99: float
    proxy_cpu: float | None  #: of the proxy's processes; nothing when there is no proxy
    worker_cpu: float  #: of `vllm-rs`, without its engine
    load_cpu: float  #: of the load generator
    writes: float  #: chunks in which a reply was written, on average


class Row(Struct, frozen=True, kw_only=True):
    """The rounds of one case at one target."""

    case: str
    target: str
    logprobs: int | None
    concurrency: int
    output: int  #: tokens
    stream: bool
    requests: int  #: in each round
    samples: list[Sample]

    def median(self, name: str) -> float | None:
        """Of one of a sample's fields."""
        values = [value for sample in self.samples if (value := getattr(sample, name)) is not None]
        return median(values) if values else None

    @property
    def title(self) -> str:
        """The case in words."""
        asked = "" if self.stream else f", logprobs {self.logprobs}" if self.logprobs is not None else ", no logprobs"
        return f"{self.case}{asked}, {self.concurrency} at once"

    @property
    def key(self) -> tuple[str, str]:
        """What makes two rows of two runs comparable."""
        return self.title, self.target


class Missing(Struct, frozen=True):
    """Why a target, or a case at a target, has no numbers."""

    target: str
    case: str | None
    reason: str


class Memory(Struct, frozen=True):
    """Resident bytes of a proxy before and after a number of requests."""

    target: str
    requests: int
    before: int
    after: int


class Large(Struct, frozen=True):
    """A large body that passed: its size in bytes, the time, and the proxy's CPU time and growth of resident memory."""

    name: str
    target: str
    size: int
    seconds: float
    proxy_cpu_seconds: float | None
    grown: int | None


class Results(Struct):
    """One run of `python -m bench`."""

    machine: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)  #: by target
    memory: list[Memory] = field(default_factory=list)
    large: list[Large] = field(default_factory=list)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values doesn't exceed (nearest rank).

    Raises: `ValueError` without values.
    """
    if not values:
        raise ValueError("a percentile needs at least one value")
    ordered = sorted(values)
    # Rounded first: 0.07 × 100 is a little more than 7 in binary.
    rank = -int(-round(share * len(ordered), 9) // 1)
    return ordered[max(1, rank) - 1]
