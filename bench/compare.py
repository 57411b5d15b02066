"""Two runs side by side, so that a change to the code can be judged."""

from pathlib import Path

import msgspec

from bench.results import Results, Row
from bench.table import columns, number

_FIELDS = (("CPU ms/req", "proxy_cpu"), ("req/s", "rate"), ("p50 ms", "p50"), ("p99 ms", "p99"))


def load(path: Path) -> Results:
    """Read a run. Raises: `OSError`; `msgspec.ValidationError` for a file of another format."""
    return msgspec.json.decode(path.read_bytes(), type=Results)


def compare(before: Results, after: Results) -> str:
    """Every row that both have, with the change in percent; then the machine facts that differ."""
    old = {row.key: row for row in before.rows}
    lines = [("case", "target", *(name for name, _ in _FIELDS))]
    lines += [_line(old[row.key], row) for row in after.rows if row.key in old]
    text = columns(lines, names=2)
    names = {**before.machine, **after.machine}
    differing = [name for name in names if before.machine.get(name) != after.machine.get(name)]
    facts = [f"  {name}: {before.machine.get(name, '-')} → {after.machine.get(name, '-')}" for name in differing]
    return "\n\n".join([text, "\n".join(["the runs differ in", *facts])] if facts else [text])


def _line(old: Row, new: Row) -> tuple[str, ...]:
    return (new.title, new.target, *(_change(old.median(field), new.median(field)) for _, field in _FIELDS))


def _change(old: float | None, new: float | None) -> str:
    if not old or new is None:
        return "-"
    return f"{number(old)} → {number(new)} ({(new / old - 1) * 100:+.0f} %)"
