"""`python -m bench [--peers] [--quick] [--soak N] [--out FILE]`, `python -m bench compare BEFORE.json AFTER.json`, `… kv`, `… plugins`."""

import argparse
import sys
from pathlib import Path

import msgspec

from bench import kv, large, plugins, routed
from bench.cases import PACE_SECONDS, Case, Engine, WrongReply, cases
from bench.compare import compare, load
from bench.load import LoadFailed
from bench.machine import facts
from bench.measure import measure, progress, soak
from bench.results import Large, Missing, Results
from bench.table import render
from bench.targets import NOTES, Target, targets
from tests.workers import InstallFailed, StartFailed, scripted, why_not

_OUT = Path(__file__).parent / "out" / "bench.json"
_ENGINE_SECONDS: dict[Engine, float] = {"fast": 0.0, "paced": PACE_SECONDS}


def main() -> int:
    """Run what the command line says; 1, with the reason, when there is no worker to measure."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["compare"]:
        return _compare(arguments[1:])
    if arguments == ["kv"]:
        return kv.main()
    if arguments == ["plugins"]:
        return plugins.main()
    options = _parser().parse_args(arguments)
    if reason := why_not("scripted"):
        print(f"bench: no vllm-rs on this machine: {reason}", file=sys.stderr)
        return 1
    try:
        results = _run(options)
    except (InstallFailed, StartFailed) as failure:
        print(f"bench: {failure}", file=sys.stderr)
        return 1
    print(render(results))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    print(f"\nwritten to {options.out}")
    return 0


def _run(options: argparse.Namespace) -> Results:
    results = Results(machine=facts())
    chosen = [case for case in cases(quick=options.quick) if not options.only or options.only in case.name]
    for engine, seconds in _ENGINE_SECONDS.items():
        of_engine = [case for case in chosen if case.engine == engine]
        if of_engine:
            _run_engine(engine, seconds, of_engine, options, results)
    return results


def _run_engine(engine: Engine, seconds: float, of_engine: list[Case], options: argparse.Namespace, results: Results) -> None:
    progress(f"starting a worker with the {engine} engine, and what goes in front of it")
    missing: list[Missing] = []
    with (
        scripted(fast=True, step_seconds=seconds, max_model_len=large.MAX_MODEL_LEN) as worker,
        targets(worker, engine, with_peers=options.peers, missing=missing) as found,
    ):
        results.rows += measure(of_engine, found, worker.pids[0], rounds=1 if options.quick else options.rounds, missing=missing)
        results.notes |= {target.name: NOTES[target.name] for target in found if target.name in NOTES}
        if engine == "fast":
            for target in found:
                if target.name.startswith("headrace"):
                    _attempt_soak(of_engine[0], target, options, results, missing)
            if not options.quick and not options.only:
                results.large += _large(found, missing)
    results.missing += [one for one in missing if one not in results.missing]


def _attempt_soak(case: Case, target: Target, options: argparse.Namespace, results: Results, missing: list[Missing]) -> None:
    try:
        results.memory.append(soak(case, target, options.soak or (200 if options.quick else 2_000)))
    except (LoadFailed, WrongReply) as failure:
        missing.append(Missing(target.name, "memory", str(failure)))


def _large(found: list[Target], missing: list[Missing]) -> list[Large]:
    passed: list[Large] = []
    exchanges = {"large request": large.large_request, "large reply": large.large_reply, **routed.EXCHANGES}
    for name, exchange in exchanges.items():
        for target in found:
            progress(f"{name}: {target.name}")
            try:
                passed.append(exchange(target))
            except (LoadFailed, WrongReply) as failure:
                missing.append(Missing(target.name, name, str(failure)))
    return passed


def _compare(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench compare", description="Show what changed between two runs.")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    options = parser.parse_args(arguments)
    try:
        print(compare(load(options.before), load(options.after)))
    except (OSError, msgspec.MsgspecError) as error:
        print(f"bench compare: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure headrace in front of a real vllm-rs server.")
    parser.add_argument("--peers", action="store_true", help="also Dynamo and vllm-router, which are installed on first use")
    parser.add_argument("--quick", action="store_true", help="one round with few requests: does it work at all?")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of which the median is shown (default: 3)")
    parser.add_argument("--soak", type=int, metavar="N", help="requests for the memory row (default: 2000; quick: 200)")
    parser.add_argument("--only", metavar="TEXT", help="cases whose name contains this, such as '200 → 16'; no large bodies")
    parser.add_argument("--out", type=Path, default=_OUT, help="where the results go (default: bench/out/bench.json)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
