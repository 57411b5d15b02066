"""Results as text."""

from collections.abc import Iterable, Sequence

from bench.results import Results, Row
from bench.targets import DYNAMO, YARDSTICK

_HEAD = (
    *("", "req/s", "p50 ms", "p99 ms", "CPU ms/req", "CPU µs/token"),
    *("÷ dynamo", "÷ hypercorn", "writes/reply", "worker CPU", "load CPU"),
)
_MIB = 1 << 20


def render(results: Results) -> str:
    """The whole report."""
    parts = [_machine(results.machine)]
    for title, rows in _grouped(results.rows).items():
        references = [next((row.median("proxy_cpu") for row in rows if row.target == name), None) for name in (DYNAMO, YARDSTICK)]
        parts.append(f"{title}\n{columns([_HEAD, *(_line(row, references) for row in rows)])}")
    if results.memory:
        lines = [("", "requests", "RSS before MiB", "RSS after MiB", "bytes/request")]
        lines += [
            (one.target, f"{one.requests:,}", mib(one.before), mib(one.after), f"{(one.after - one.before) / one.requests:.0f}")
            for one in results.memory
        ]
        parts.append("memory\n" + columns(lines))
    if results.large:
        lines = [("", "", "MiB", "seconds", "CPU seconds", "RSS grown MiB")]
        lines += [
            (one.name, one.target, mib(one.size), number(one.seconds), number(one.proxy_cpu_seconds), mib(one.grown))
            for one in results.large
        ]
        parts.append("large bodies\n" + columns(lines, names=2))
    if results.notes:
        parts.append("notes\n" + "\n".join(f"  {target}: {note}" for target, note in results.notes.items()))
    if results.missing:
        parts.append(
            "not measured\n" + "\n".join(f"  {one.target}{f', {one.case}' if one.case else ''}: {one.reason}" for one in results.missing)
        )
    return "\n\n".join(parts)


def columns(lines: Iterable[Sequence[str]], *, names: int = 1) -> str:
    """Aligned columns: the first `names` to the left, the others to the right."""
    lines = list(lines)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def aligned(line: Sequence[str]) -> str:
        cells = [cell.rjust(width) if i >= names else cell.ljust(width) for i, (cell, width) in enumerate(zip(line, widths, strict=True))]
        return ("  " + "  ".join(cells)).rstrip()

    return "\n".join(map(aligned, lines))


def number(value: float | None) -> str:
    """Three significant digits, or a dash."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.{1 if value >= 10 else 2 if value >= 1 else 3}f}"


def mib(size: int | None) -> str:
    """A size in MiB, or a dash."""
    return "-" if size is None else f"{size / _MIB:.1f}"


def _machine(machine: dict[str, str]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in machine.items())


def _grouped(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.title, []).append(row)
    return groups


def _line(row: Row, references: Sequence[float | None]) -> tuple[str, ...]:
    cpu, writes = row.median("proxy_cpu"), row.median("writes")
    return (
        row.target,
        number(row.median("rate")),
        number(row.median("p50")),
        number(row.median("p99")),
        number(cpu),
        number(cpu * 1000 / row.output) if cpu is not None and row.stream else "-",
        *(f"{cpu / reference:.2f}" if cpu is not None and reference else "-" for reference in references),
        number(writes) if row.stream else "-",
        number(row.median("worker_cpu")),
        number(row.median("load_cpu")),
    )
