"""Writes docs/benchmarks-hosts.md from the results of a run: ``python -m benchmarks.hosts_report`` does it again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from . import hosts_plots, model
from .cases import KB, MB
from .environments import HOME, ROOT
from .peers import AS_INSTALLED
from .report import (
    TIMES,
    another_machine,
    folded,
    quartiles,
    setting,
    slower,
    spread_cells,
    targets_section,
    write_as_asked,
    write_times,
)
from .results import Results, Spread
from .targets import Part, milliseconds

PAGE = ROOT / "docs" / "benchmarks-hosts.md"
LINK = 1e9 / 8  # bytes per second of a link of 1 Gbit/s, each way
_RESNET18 = 11_689_512 * 4  # bytes of its gradients

_OVERVIEW = """\
Hosts are network namespaces of one machine, with links of fixed rates. Between hosts the link is the limit, and mykv
comes close to it. So do Horovod and dist_sync at 1 Gbit/s, so the gain is smaller than [on one host](benchmarks.md).
With slow links [compression](compression.md) and [local steps](local-steps.md) help more. `make bench-hosts` measures
and writes this page.
"""

_METHOD = """\
Each host is a network namespace with its own name and address (`benchmarks/network.py`); a token bucket filter holds
each link to its rate, both ways. Hosts share the machine's cores and memory. The limit of a link is 2 (n - 1) / n of
the bytes each way for n hosts, divided by the rate; headers of Ethernet, IP and TCP take 4.4%, so 95.6% can be
reached over TCP. Compressed arrays are normal random numbers in shared memory, with error feedback where the
compressor has it. The ranks start at a common moment, the slowest one counts, and times are medians over all rounds.
"""

# Shown below the table while the target is missed: attempts and limits.
_STEP = """\
The link allows 374 ms, or 391 ms with TCP's headers: 0.6 of Horovod's time would be less than the link's limit."""

_TRAINING = """\
The link is idle for 50 to 60 ms between two steps, while the last layers are updated and computed. MXNet adds to it:
it runs up to 15 operators as one and updates four parameters at a time. `MXNET_EXEC_BULK_EXEC_TRAIN=0` and
`MXNET_OPTIMIZER_AGGREGATION_SIZE=1` change that for the whole process."""

_SMALL_PAGE = """\
mykv sends as many messages as a round trip; a rank that sleeps while it waits must also wake up on each side."""


@dataclass(frozen=True)
class Line:
    """One line of the table; `parts` finds its numbers in results."""

    work: str
    target: str
    parts: Callable[[Results], list[Part]]
    bound: str = ""


def _seconds(hosts: int, nbytes: int) -> float:
    return 2 * nbytes * (hosts - 1) / hosts / LINK


def _get(
    results: Results, peer: str, case: str, shape: str = "2x1", series: str = "time", best: bool = False
) -> Spread | None:
    found = results.best(peer, case, series, shape)
    if best or found is None:
        return found
    return results.get(peer, case, series, shape)


def _share_of_link(hosts: int, each: int, least: float) -> Callable[[Results], list[Part]]:
    def parts(results: Results) -> list[Part]:
        shape, made = f"{hosts}x{each}", []
        for kind, words, asked in (("in place", "gradients in shared memory", True), ("pushpull", "any array", True)):
            for size in (16, 64):
                found = _get(results, "mykv core", f"{kind}/{size * MB}", shape)
                if found is None:
                    made.append(Part(f"{size} MB, {words}: not measured"))
                    continue
                share = _seconds(hosts, size * MB) / found.median
                text = f"{size} MB, {words}: {share:.1%} ({milliseconds(found)})"
                made.append(Part(text, share >= least if asked else None))
        return made

    return parts


def _two_hosts(results: Results) -> list[Part]:
    parts = _share_of_link(2, 1, 0.90)(results)
    for size in (16, 64):
        for peer, case, name in (("tcp", "exchange", "two sockets"), ("mpi", "pushpull", "MPI_Allreduce")):
            for setup, numbers in results.numbers(peer, f"{case}/{size * MB}", "time", "2x1").items():
                if numbers:
                    found = results.get(peer, f"{case}/{size * MB}", "time", "2x1", setup)
                    share = _seconds(2, size * MB) / found.median
                    parts.append(Part(f"{size} MB, {name} ({setup}): {share:.1%} ({milliseconds(found)})"))
    return parts


def _small(results: Results) -> list[Part]:
    ours, trip = _get(results, "mykv core", f"pushpull/{4 * KB}"), _get(results, "tcp", f"round trip/{4 * KB}")
    if ours is None or trip is None:
        return [Part("not measured")]
    ratio = ours.median / trip.median
    parts = [Part(f"{ratio:.1f} round trips ({milliseconds(ours)}; one takes {milliseconds(trip)})", ratio <= 2.2)]
    theirs = _get(results, "mpi", f"pushpull/{4 * KB}", best=True)
    if theirs:
        parts.append(Part(f"MPI_Allreduce, spinning: {milliseconds(theirs)} ({theirs.setup})"))
    return parts


def _resnet(results: Results) -> list[Part]:
    case = "step/resnet18/own"
    ours = _get(results, "mykv", case)
    if ours is None:
        return [Part("not measured")]
    limit = _seconds(2, _RESNET18)
    parts = [Part(f"{ours.median / limit:.2f} times the limit ({milliseconds(ours)})", ours.median <= 1.15 * limit)]
    for peer, most in (("horovod", 0.6), ("dist_sync", None)):
        found = _get(results, peer, case, best=True)
        if found is None:
            parts.append(Part(f"{peer}: not measured"))
            continue
        ratio = ours.median / found.median
        text = f"{ratio:.2f} of {peer}'s ({milliseconds(found)}; {found.setup})"
        parts.append(Part(text, None if most is None else ratio <= most))
    return parts


def _training(results: Results) -> list[Part]:
    parts = []
    default = results.get("mykv", "stream/own", "communication", "2x1")
    for setup in results.numbers("mykv", "stream/own", "step", "2x1"):
        step, compute, communication = (
            results.get("mykv", "stream/own", series, "2x1", setup) for series in ("step", "compute", "communication")
        )
        ratio = step.median / max(compute.median, communication.median)
        text = (
            f"{ratio:.2f} times ({milliseconds(step)}; compute alone {milliseconds(compute)}, communication and update "
            f"alone {milliseconds(communication)}; {setup})"
        )
        if setup != AS_INSTALLED and default:
            text += f"; {step.median / max(compute.median, default.median):.2f} times that with default settings"
        parts.append(Part(text, ratio <= 1.06 if setup == AS_INSTALLED else None))
    return parts or [Part("not measured")]


def _messages(results: Results) -> list[Part]:
    parts = []
    for hosts in (2, 4, 8):
        found = _get(results, "mykv core", "agreement/193", f"{hosts}x1", "messages")
        if found:
            text = f"{hosts} hosts: {found.median:.0f} messages"
            parts.append(Part(text, found.median <= 40 if hosts == 8 else None))
    return parts or [Part("not measured")]


def _modelled(results: Results) -> list[Part]:
    try:
        here = model.fitted(results)
    except SystemExit:
        return [Part("not measured")]
    rate, parts = 1e10, []
    for hosts, most in ((1024, 1.1), (4096, 1.3)):
        network = model.Network(here.latency, here.message, rate / 8)
        nbytes = 102 * MB
        ratio = model.seconds(network, hosts, 8, nbytes) / (2 * nbytes * 8 / rate)
        text = f"{hosts:,} hosts: {ratio:.1f} times the wire, with {1e6 * here.message:.0f} us for a message"
        parts.append(Part(text, ratio <= most))
    return parts


def _waiting(results: Results) -> list[Part]:
    ours = _get(results, "mykv core", "late", series="share")
    if ours is None:
        return [Part("not measured")]
    parts = [Part(f"{ours.median:.1%} of a core", ours.median < 0.05)]
    theirs = _get(results, "mpi", "late", series="share", best=True)
    return [*parts, Part(f"MPI_Allreduce: {theirs.median:.0%}")] if theirs else parts


def _compressed(wire: str, least: float) -> Callable[[Results], list[Part]]:
    def parts(results: Results) -> list[Part]:
        plain = _get(results, "mykv core", f"compressed/{64 * MB}/none")
        found = _get(results, "mykv core", f"compressed/{64 * MB}/{wire}")
        if plain is None or found is None:
            return [Part("not measured")]
        ratio = plain.median / found.median
        return [Part(f"{ratio:.1f} times ({milliseconds(found)}; {milliseconds(plain)})", ratio >= least)]

    return parts


LINES = [
    Line("allreduce, 2 hosts, 1 rank each, 1 Gbit/s", "at least 90% of the link", _two_hosts),
    *(
        Line(
            f"the same, {hosts} hosts, {each} rank{'s' * (each > 1)} each",
            "at least 85% of the link",
            _share_of_link(hosts, each, 0.85),
        )
        for hosts, each in ((2, 2), (3, 1), (3, 2), (4, 1), (4, 2))
    ),
    Line("4 KB, 2 hosts, unlimited link", "at most 2.2 round trips of plain TCP", _small, _SMALL_PAGE),
    Line(
        "step() of ResNet-18, gradients ready (46.8 MB), 2 hosts, 1 Gbit/s",
        "at most 0.6 of Horovod's time, and 1.15 times the limit",
        _resnet,
        _STEP,
    ),
    Line(
        "training of ResNet-18, 64 pixels, 8 images per worker, 2 hosts, 1 Gbit/s, seconds per step",
        "with default settings at most 1.06 times the longer of compute and communication",
        _training,
        _TRAINING,
    ),
    Line(
        "agreeing on a step of 193 operations, messages at the busiest rank",
        "at most 40 with 8 hosts",
        _messages,
    ),
    Line(
        "102 MB in shared memory over 1,024 and 4,096 hosts of 8 ranks, 10 Gbit/s, by the [model](scaling.md)",
        "at most 1.1 and 1.3 times the wire",
        _modelled,
    ),
    Line("a rank that waits 1 s for another host", "under 5% of a core", _waiting),
    *(
        Line(
            f"64 MB allreduce with {name}, 2 hosts, 200 Mbit/s",
            f"at least {least:g} times less time than uncompressed",
            _compressed(wire, least),
        )
        for name, wire, least in (
            ("fp16 on the wire", "float16", 1.9),
            ("2-bit", "2bit", 6.0),
            ("top-k 1%", "topk", 10.0),
        )
    ),
]


def write(results: Results, page: Path = PAGE) -> None:
    """Write the page, and its plots into a folder named like the page."""
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = hosts_plots.draw(results, folder)
    judged = [(line, line.parts(results)) for line in LINES]
    sections = [
        "# Benchmarks of several hosts\n\n" + _OVERVIEW,
        *(f"![{title}]({folder.name}/{name})\n\n{text}" for title, name, text in drawn),
        _short(results),
        _not_faster(results),
        "## How long hosts need to agree\n\n" + _agreement(results),
        another_machine(page.stem),
        "## All figures",
        f"[The times of all cases]({folder.name}/{TIMES}), with their settings, are a table of comma-separated values.",
        folded("How it was measured", _METHOD),
        folded("Machine and versions", setting(results, f"{results.about['rounds']} rounds")),
        targets_section([(line.work, line.target, parts, line.bound) for line, parts in judged], figures=False),
        folded("What failed", _failures(results)),
    ]
    page.write_text("\n\n".join(part.rstrip() for part in sections if part) + "\n", encoding="utf-8")
    write_times(folder, "hosts x ranks", _times(results))
    print(f"wrote {page}")


def _short(results: Results) -> str:
    return "## The most important figures\n\n" + "\n".join(_short_rows(results)) + "\n\nQuartiles are in brackets."


def _short_rows(results: Results) -> list[str]:
    """The rows of the short table at the top of the page."""
    rows = ["| work | link | mykv | others |", "| --- | --- | --- | --- |"]
    for hosts, each in ((2, 1), (2, 2), (3, 1), (4, 1), (4, 2)):
        found = _get(results, "mykv core", f"in place/{64 * MB}", f"{hosts}x{each}")
        if found:
            share = f"{_with_quartiles(found)}, {_seconds(hosts, 64 * MB) / found.median:.1%} of the link's rate"
            other = _get(results, "mpi", f"pushpull/{64 * MB}", f"{hosts}x{each}", best=True)
            theirs = f"MPI_Allreduce {_with_quartiles(other)}" if other else ""
            work = f"sum of 64 MB, {hosts} hosts with {each} rank{'s' * (each > 1)} each"
            rows.append(f"| {work} | 1 Gbit/s | {share} | {theirs} |")
    peers = [(name, _get(results, name, "step/resnet18/own", best=True)) for name in ("horovod", "dist_sync")]
    ours = _get(results, "mykv", "step/resnet18/own")
    if ours:
        names = {"horovod": "Horovod"}
        texts = ", ".join(f"{names.get(name, name)} {_with_quartiles(one)}" for name, one in peers if one)
        work = "`step()` of ResNet-18 with gradients ready, 2 hosts"
        rows.append(f"| {work} | 1 Gbit/s | {_with_quartiles(ours)} | {texts} |")
    for wire, name in (
        ("none", "uncompressed"),
        ("float16", "in 16 bits"),
        ("2bit", "in 2 bits"),
        ("topk", "top-k 1%"),
    ):
        found = _get(results, "mykv core", f"compressed/{64 * MB}/{wire}")
        if found:
            rows.append(f"| sum of 64 MB, 2 hosts, {name} | 200 Mbit/s | {_with_quartiles(found)} | |")
    return rows


def _with_quartiles(one: Spread) -> str:
    return f"{milliseconds(one)} {quartiles(one)}"


def _not_faster(results: Results) -> str:
    """The cases of the page in which a peer is as fast or faster."""
    get = results.best
    small, large, step = f"pushpull/{4 * KB}", f"pushpull/{64 * MB}", "step/resnet18/own"
    spins = "Its ranks spin while they wait."
    ours = _get(results, "mykv", step)
    lines = [
        slower(
            "4 KB, 2 hosts", _get(results, "mykv core", small), get("mpi", small, "time", "2x1"), "MPI_Allreduce", spins
        ),
        slower(
            "64 MB, 2 hosts, 1 Gbit/s",
            _get(results, "mykv core", large),
            get("mpi", large, "time", "2x1"),
            "MPI_Allreduce",
            "The link is the limit of both.",
        ),
        *(
            slower("`step()` of ResNet-18, 2 hosts, 1 Gbit/s", ours, get(peer, step, "time", "2x1"), name)
            for peer, name in (("horovod", "Horovod"), ("dist_sync", "dist_sync"))
        ),
    ]
    text = "\n".join(line for line in lines if line)
    return f"## Where mykv is not faster\n\n{text}" if text else ""


def _agreement(results: Results) -> str:
    text = (
        "Messages between the first ranks of the hosts in a step of 193 operations of known names, at rank 0, which "
        "sends and receives most; and the time of the step, of 4 KB and of 1 MB over unlimited links."
    )
    rows = ["| hosts | messages | bytes | step | 4 KB | 1 MB |", "| --- | --- | --- | --- | --- | --- |"]
    for hosts in (2, 4, 8):
        shape = f"{hosts}x1"
        cells = [
            _get(results, "mykv core", "agreement/193", shape, series)
            for series in ("messages", "message bytes", "time")
        ]
        cells += [_get(results, "mykv core", f"pushpull/{nbytes}", shape) for nbytes in (4 * KB, MB)]
        if any(cell is None for cell in cells):
            continue
        numbers = [f"{cells[0].median:.0f}", f"{cells[1].median:.0f}", *(milliseconds(cell) for cell in cells[2:])]
        rows.append(f"| {hosts} | " + " | ".join(numbers) + " |")
    return text + "\n\n" + "\n".join(rows) if len(rows) > 2 else "Not measured."


def _times(results: Results) -> list[list[str]]:
    rows = []
    keys = dict.fromkeys((r["case"], r["series"], r["ranks"], r["peer"], r["setup"]) for r in results.records)
    for case, series, shape, peer, setup in keys:
        found = results.get(peer, case, series, shape, setup)
        if found is None:
            continue
        is_time = series in ("time", "step", "compute", "communication")
        what = case if series == "time" else f"{case}: {series}"
        cells = spread_cells(found, 1e3 if is_time else 1)
        rows.append([what, shape, peer, setup, *cells, "ms" if is_time else "", str(found.count)])
    return rows


def _failures(results: Results) -> str:
    if not results.failures:
        return ""
    rows = [
        f"- {one['peer']}, {one['setup']}, {one['ranks']}: {one['error'].strip().splitlines()[0]}"
        for one in results.failures
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    write_as_asked(__doc__, HOME / "hosts.json", PAGE, write, _short_rows)
