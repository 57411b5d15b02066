"""Measure cases at targets: warm up, alternate, prove every reply."""

import sys
import time
from collections.abc import Sequence

from bench.cases import Case, WrongReply
from bench.load import Load, LoadFailed, run
from bench.processes import cpu_seconds, resident_bytes
from bench.results import Memory, Missing, Row, Sample, percentile
from bench.targets import Target

#: After the last reply a proxy still settles its calls: logs, counts.
_SETTLE_SECONDS = 0.05


def measure(cases: Sequence[Case], targets: Sequence[Target], worker_pid: int, *, rounds: int, missing: list[Missing]) -> list[Row]:
    """Every case at every target, `rounds` times.

    In each round the targets follow each other, starting with another one each time, so that what the machine does meanwhile hits all.
    A target that fails in a case is put on the list of what is missing, and has no row for it.
    """
    rows: list[Row] = []
    for case in cases:
        progress(f"{case.name}{'' if case.stream else f', logprobs {case.logprobs}'}")
        samples: dict[str, list[Sample]] = {target.name: [] for target in targets}
        alive = [target for target in targets if _attempt(case, target, worker_pid, _warm_up(case), missing)]
        for number in range(rounds):
            start = number % max(1, len(alive))
            for target in alive[start:] + alive[:start]:
                if sample := _attempt(case, target, worker_pid, case.requests, missing):
                    samples[target.name].append(sample)
        rows += [_row(case, target, samples[target.name]) for target in targets if len(samples[target.name]) == rounds]
    return rows


def soak(case: Case, target: Target, count: int) -> Memory:
    """Send many requests; replies are checked, and not kept.

    Raises: `LoadFailed`, `WrongReply`.
    """
    progress(f"{count:,} requests to {target.name}")
    requests, portion = target.requests(case), 200
    _checked(case, target, run(target.address, requests, count=portion, concurrency=case.concurrency))
    before = resident_bytes(target.pids)
    for sent in range(0, count, portion):
        load = run(target.address, requests, count=min(portion, count - sent), concurrency=case.concurrency)
        _checked(case, target, load)
    return Memory(target.name, count, before, resident_bytes(target.pids))


def progress(text: str) -> None:
    """Say what goes on, on standard error."""
    print(f"  {text}", file=sys.stderr, flush=True)


def _attempt(case: Case, target: Target, worker_pid: int, count: int, missing: list[Missing]) -> Sample | None:
    try:
        return _sample(case, target, worker_pid, count)
    except (LoadFailed, WrongReply, ProcessLookupError) as failure:
        missing.append(Missing(target.name, case.name, str(failure)))
        return None


def _sample(case: Case, target: Target, worker_pid: int, count: int) -> Sample:
    requests = target.requests(case)
    proxy, worker = cpu_seconds(target.pids), cpu_seconds([worker_pid])
    load = run(target.address, requests, count=count, concurrency=case.concurrency)
    time.sleep(_SETTLE_SECONDS)
    proxy, worker = cpu_seconds(target.pids) - proxy, cpu_seconds([worker_pid]) - worker
    writes = _checked(case, target, load)
    latencies = [reply.seconds * 1000 for reply in load.replies]
    return Sample(
        rate=count / load.seconds,
        p50=percentile(latencies, 0.5),
        p99=percentile(latencies, 0.99),
        proxy_cpu=proxy * 1000 / count if target.pids else None,
        worker_cpu=worker * 1000 / count,
        load_cpu=load.cpu_seconds * 1000 / count,
        writes=writes,
    )


def _checked(case: Case, target: Target, load: Load) -> float:
    """Check every reply, and return the average number of writes."""
    writes = 0
    for reply in load.replies:
        body, chunks = reply.body()
        case.check(body, target.dialect(case))
        writes += chunks
    return writes / len(load.replies)


def _warm_up(case: Case) -> int:
    return max(case.concurrency, case.requests // 10)


def _row(case: Case, target: Target, samples: list[Sample]) -> Row:
    return Row(
        case=case.name,
        target=target.name,
        logprobs=case.logprobs,
        concurrency=case.concurrency,
        output=case.output,
        stream=case.stream,
        requests=case.requests,
        samples=samples,
    )
