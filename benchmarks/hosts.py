"""All measurements for docs/benchmarks-hosts.md: ``python -m benchmarks.hosts``; `make bench-hosts` runs it."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from mykvrun.progress import Progress

from . import about, cases, environments, hosts_report, network, peers
from .cases import KB, MB, Case
from .launch import LaunchError, launch
from .network import Network
from .peers import Setup
from .results import Results

RESULTS = environments.HOME / "hosts.json"
RATE = "1gbit"
SLOW_RATE = "200mbit"  # where compression pays off
LIMIT_S = 150.0  # for one launch

TCP = Setup("tcp", peers.AS_INSTALLED, "tcp")
MPI_TUNED = Setup(
    "mpi", "yield, 2 links", "mpi", env={"OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_btl_tcp_links": "2"}
)
# MXNet runs up to 15 operators of backward as one, and updates four parameters at a time.
ONE_BY_ONE = Setup(
    "mykv",
    "operators one by one",
    "mykv",
    env={"MXNET_EXEC_BULK_EXEC_TRAIN": "0", "MXNET_OPTIMIZER_AGGREGATION_SIZE": "1"},
)
SHAPES = ((2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2))  # hosts, ranks on each
SIZES = (16 * MB, 64 * MB)


def main() -> None:
    """Measure, save the results, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", default="all", help="all, none, or some of " + ",".join(peers.PEERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="some of " + ",".join(SECTIONS) + "; the others stay as they were")
    parser.add_argument("--output", type=Path, default=hosts_report.PAGE, help="the page (default: %(default)s)")
    given = parser.parse_args()
    reason = network.unavailable()
    if reason:
        sys.exit(f"The hosts of this benchmark are network namespaces: {reason}.")
    wanted = peers.chosen(given.peers)
    if "horovod" in wanted:
        environments.horovod_python()
    results = Results.load(RESULTS) if given.only and RESULTS.exists() else Results()
    results.about = {**results.about, **about.collect(wanted), "rounds": given.rounds}
    for section in given.only.split(",") if given.only else SECTIONS:
        _measure(section, SECTIONS[section](wanted), given.rounds, results)
        results.save(RESULTS)
    hosts_report.write(results, given.output)


def _measure(section: str, plan: list[Any], rounds: int, results: Results) -> None:
    """Run a section's launches, each network once for all rounds; replaces earlier results of the section."""
    results.records = [record for record in results.records if record["section"] != section]
    results.failures = [failure for failure in results.failures if failure["section"] != section]
    with Progress(rounds * len(plan), section, "launch") as progress:
        for hosts, rate in dict.fromkeys((hosts, rate) for hosts, rate, *_ in plan):
            with Network(hosts, rate) as up:
                for number in range(rounds):
                    for of_hosts, of_rate, per_host, setup, work in plan:
                        if (of_hosts, of_rate) == (hosts, rate):
                            progress.tell(f"{up.title}, {setup.title}")
                            progress.write(_launch(section, up, per_host, setup, work, number, results))
                            progress.advance()


def _launch(
    section: str, up: Network, per_host: int, setup: Setup, work: list[Case], number: int, results: Results
) -> str:
    """Launch once. Returns the text to print."""
    begin = time.monotonic()
    where = {"section": section, "peer": setup.peer, "setup": setup.name, "round": number}
    where["ranks"] = f"{up.hosts}x{per_host}"
    if setup.backend == "tcp":
        setup = Setup(setup.peer, setup.name, setup.backend, options={"address": up.address(1)})
    try:
        results.add(where, launch(setup, up.hosts * per_host, work, LIMIT_S, up))
        outcome = ""
    except LaunchError as error:
        results.failures.append({**where, "cases": [case["id"] for case in work], "error": str(error)})
        outcome = f"  FAILED: {error}"
    took = time.monotonic() - begin
    return f"{up.title}, {per_host} ranks each: {setup.title}: {took:.1f} s{outcome}"


def _few(case: Case, iterations: int = 4) -> Case:
    return {**case, "iterations": iterations, "warmup": 2}


def _wire(wanted: list[str]) -> list[Any]:
    """Allreduce over links of a fixed rate."""
    ours = [
        _few(kind(nbytes), 4 if nbytes == SIZES[0] else 3)
        for kind in (cases.in_place, cases.pushpull)
        for nbytes in SIZES
    ]
    plan: list[Any] = [(hosts, RATE, each, peers.CORE, ours) for hosts, each in SHAPES]
    sent = [
        {"id": f"exchange/{nbytes}", "kind": "exchange", "nbytes": nbytes, "iterations": 3, "warmup": 1}
        for nbytes in SIZES
    ]
    plan.append((2, RATE, 1, TCP, sent))
    if "mpi" in wanted:
        both = [_few(cases.pushpull(nbytes), 3) for nbytes in SIZES]
        plan += [(2, RATE, 1, setup, both) for setup in (peers.SETUPS["mpi"][0], MPI_TUNED)]
    return plan


def _small(wanted: list[str]) -> list[Any]:
    """4 KB over an unlimited link, and a rank that waits for another host."""
    small = {**cases.pushpull(4 * KB), "iterations": 300, "warmup": 20}
    trip = {"id": f"round trip/{4 * KB}", "kind": "round trip", "nbytes": 4 * KB, "iterations": 300, "warmup": 20}
    late = {**cases.late(), "iterations": 3}
    plan: list[Any] = [(2, "", 1, peers.CORE, [small, late]), (2, "", 1, TCP, [trip])]
    if "mpi" in wanted:
        plan += [(2, "", 1, setup, [small, late]) for setup in (peers.SETUPS["mpi"][0], MPI_TUNED)]
    return plan


def _resnet(wanted: list[str]) -> list[Any]:
    """step() of ResNet-18 with gradients ready."""
    work = [{**cases.step("resnet18", "own"), "iterations": 4, "warmup": 2}]
    setups = {"mykv": [peers.MYKV], "horovod": peers.SETUPS["horovod"][:2], "dist_sync": peers.SETUPS["dist_sync"][:1]}
    return [(2, RATE, 1, setup, work) for peer in wanted for setup in setups.get(peer, [])]


def _training(wanted: list[str]) -> list[Any]:
    """Training that does not wait after each step, compared with compute alone and communication alone."""
    return [(2, RATE, 1, setup, [cases.stream("own")]) for setup in (peers.MYKV, ONE_BY_ONE)]


def _agreement(wanted: list[str]) -> list[Any]:
    """Cost of the agreement per step, and allreduces of several sizes, for several numbers of hosts."""
    step = {"id": "agreement/193", "kind": "agreement", "keys": 193, "iterations": 10, "warmup": 2}
    sizes = [{**cases.pushpull(nbytes), "iterations": 10, "warmup": 3} for nbytes in (4 * KB, MB)]
    return [(hosts, "", 1, peers.CORE, [step, *sizes]) for hosts in (2, 4, 8)] + [
        (hosts, RATE, 1, peers.CORE, [_few(cases.in_place(16 * MB))]) for hosts in (2, 4, 8)
    ]


def _compression(wanted: list[str]) -> list[Any]:
    """Allreduce with compressors over a slow link."""
    wires = ("", "float16", "2bit threshold=0.5", "onebit", "topk k=0.01", "dithering k=7")
    return [(2, SLOW_RATE, 1, peers.CORE, [cases.compressed(64 * MB, wire) for wire in wires])]


SECTIONS = {
    "wire": _wire,
    "small": _small,
    "resnet": _resnet,
    "training": _training,
    "agreement": _agreement,
    "compression": _compression,
}


if __name__ == "__main__":
    main()
