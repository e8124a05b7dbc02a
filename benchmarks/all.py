"""All measurements for docs/benchmarks.md: ``python -m benchmarks.all``; `make bench` runs it."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from . import about, cases, environments, footprint, limit, peers, report, scaling, tuning, updates
from .allreduce import SIZES
from .cases import KB, MB, Case
from .command_line import numbers
from .results import Results
from .runner import Item, run

RESULTS = environments.HOME / "results.json"
_MINUTES = 25.5


def main() -> None:
    """Measure, save the results, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", default="all", help="all, none, or some of " + ",".join(peers.PEERS))
    parser.add_argument("--rounds", type=int, default=5, help="at most this number")
    parser.add_argument("--minutes", type=float, default=_MINUTES, help="begin no round that would end later")
    parser.add_argument("--output", type=Path, default=report.PAGE, help="the page to write (default: %(default)s)")
    given = parser.parse_args()
    wanted = peers.chosen(given.peers)
    if "horovod" in wanted:
        environments.horovod_python()  # the build time is not counted
    missing = _make_intel_mpi() if "mpi" in wanted else ""
    begin = time.monotonic()
    results = Results(about={**about.collect(wanted), "no intel mpi": missing})
    tuned = Results()
    chosen = tuning.choose({peer: _tuned_cases(peer) for peer in wanted if peer != "mykv"}, tuned)
    results.tuning, results.failures = tuned.records, tuned.failures
    once = _once(wanted)
    run(once, results, 1)
    plan = [*_two_ranks(wanted, chosen), *_updates(wanted), *_four_ranks(wanted), *_training(wanted)]
    if "mpi" in wanted and not missing:
        plan.append(Item(peers.INTEL_MPI, 2, [cases.pushpull(4 * KB), cases.pushpull(64 * MB)], rounds=3))
    results.about["rounds"] = run(plan, results, given.rounds, begin + 60 * given.minutes)
    results.about["minutes"] = (time.monotonic() - begin) / 60
    results.about["commands"] = about.commands(plan + once)
    results.save(RESULTS)
    report.write(results, given.output)


def _make_intel_mpi() -> str:
    """Install Intel MPI. Returns why it cannot be measured, or None."""
    try:
        environments.intel_python()
    except (OSError, RuntimeError) as error:
        return str(error)
    return ""


def _once(wanted: list[str]) -> list[Item]:
    """The launches that run in one round only: numbers of arrays, numbers of ranks, and memory."""
    arrays = {"mykv": scaling.array_cases("own") + scaling.array_cases("stock")}
    for peer in ("horovod", "dist_sync"):
        arrays[peer] = scaling.array_cases("own")
    plan = [Item(peers.SETUPS[peer][0], 2, arrays[peer]) for peer in wanted if peer in arrays]
    return [*plan, *scaling.ranks_plan(), *scaling.limits_plan(), *footprint.memory_plan()]


def _sizes() -> list[Case]:
    return [cases.pushpull(nbytes) for nbytes in numbers(SIZES)]


def _trainer_cases(flavour: str) -> list[Case]:
    large = cases.gradients(f"1x{64 * MB}", flavour)
    return [cases.gradients("resnet50", flavour), cases.gradients("bert", flavour, iterations=4), large]


def _tuned_cases(peer: str) -> list[Case]:
    return _sizes() if peer == "mpi" else [*_sizes(), *_trainer_cases("own")]


def _two_ranks(wanted: list[str], chosen: list[Item]) -> list[Item]:
    float16 = [cases.gradients("resnet50", flavour, "float16") for flavour in ("own", "stock")]
    ours = [*_sizes(), *_trainer_cases("own"), *_trainer_cases("stock")[:2], *float16, *footprint.cpu_and_python()]
    ours.append(cases.step("resnet18", "own"))
    installed: dict[str, list[Case]] = {"mykv": ours}
    for peer in ("horovod", "dist_sync"):
        waiting = [cases.late(), cases.idle()]
        installed[peer] = [*_sizes(), *_trainer_cases("own"), cases.step("resnet18", "own"), *waiting]
    installed["mpi"] = [*_sizes(), cases.late()]
    plan = [Item(peers.SETUPS[peer][0], 2, installed[peer]) for peer in wanted]
    if "horovod" in wanted:
        _require(chosen, peers.HOROVOD_NO_CYCLE, cases.pushpull(4 * KB))
    limits = limit.plan()[:2]
    limits[1].cases.append(cases.paused(4 * KB))  # measures the core alone
    return [*plan, *chosen, *limits]


def _updates(wanted: list[str]) -> list[Item]:
    plan = updates.plan(wanted)
    bound = next(item for item in plan if item.setup == peers.MYKV_BOUND)
    bound.cases[:0] = _sizes()  # share the processes of other cases
    return plan


def _require(chosen: list[Item], setup: peers.Setup, case: Case) -> None:
    """Add a case with the setting that a target names, unless it was chosen already."""
    item = next((item for item in chosen if item.setup == setup), None)
    if item is None:
        chosen.append(Item(setup, 2, [case]))
    elif case not in item.cases:
        item.cases.append(case)


def _four_ranks(wanted: list[str]) -> list[Item]:
    small, network = cases.pushpull(4 * KB), cases.gradients("resnet50", "own", iterations=6)
    items = {
        "mykv": [Item(peers.MYKV, 4, [small, network, cases.gradients("resnet50", "stock", iterations=6)])],
        "horovod": [Item(setup, 4, [small, network]) for setup in (peers.SETUPS["horovod"][0], peers.HOROVOD_NO_CYCLE)],
        "dist_sync": [Item(peers.SETUPS["dist_sync"][0], 4, [small, network])],
        "mpi": [Item(setup, 4, [small]) for setup in (peers.SETUPS["mpi"][0], peers.MPI_YIELD)],
    }
    return [item for peer in wanted for item in items[peer]]


def _training(wanted: list[str]) -> list[Item]:
    own = [cases.training("own"), cases.breakdown("own")]
    stock = [cases.training("stock", iterations=6), cases.breakdown("stock")]
    items = [Item(peers.MYKV, 2, own + stock), Item(peers.ALONE, 2, own)]
    items.append(Item(peers.ONE_BUCKET, 2, own[:1]))
    # With threads that spin and outnumber the cores, each step takes seconds.
    items.append(Item(peers.TWO_THREADS, 2, cases.shortened([{**own[0], "warmup": 1}], 4), rounds=1))
    if "horovod" in wanted:
        items += [Item(setup, 2, own, rounds=2) for setup in (peers.SETUPS["horovod"][0], peers.HOROVOD_NO_CYCLE)]
    if "dist_sync" in wanted:
        items.append(Item(peers.SETUPS["dist_sync"][0], 2, own, rounds=2))
    return items


if __name__ == "__main__":
    main()
