"""The text of docs/pictures.md, with the figures of a run of benchmarks/pictures.py."""

from __future__ import annotations

from typing import Any

from . import picture_plots
from .cases import MB

_WHAT = {
    "synchronous": "`DistributedTrainer`",
    "fp16": '`compression_params={"type": "fp16"}`',
    "2-bit": '`compression_params={"type": "2bit", "threshold": 0.05}`',
    "LocalTrainer": "`LocalTrainer(period=8, warmup_steps=22)`",
}


def text(results: dict[str, Any], folder: str) -> str:
    """The page; `folder` has the pictures."""
    return "\n\n".join(
        [
            "# Pictures",
            _overview(results),
            _loss(results, folder),
            _accuracy(results, folder),
            _timeline(results, folder),
            _scaling(folder),
        ]
    ) + "\n"


def _overview(results: dict[str, Any]) -> str:
    machine, commit = results["about"]["machine"], results["about"]["commit"]
    return (
        "Four pictures of runs. `python -m benchmarks.pictures` (as root) makes the runs, draws the pictures and writes "
        f"this page. The runs here are of commit {commit}, on {machine['cores']} cores ({machine['processor']}), where "
        "other programs ran too."
    )


def _loss(results: dict[str, Any], folder: str) -> str:
    runs = results["curves"]
    ends = ", ".join(f"{run['epochs'][-1][1]:.1%} with {workers}" for workers, run in runs.items())
    return f"""\
## The loss with 1, 2 and 4 workers

![Loss against steps]({folder}/loss.svg)

`examples/digits.py` for {len(runs["1"]["epochs"])} epochs. A step uses 64 images of all workers together. The curves lie close
together and are not the same: with other numbers of workers, other images come together in a step. `examples/digits.py`
itself compares its curve with one process that sees the same images: they differ by rounding. Accuracy on 360 digits that no worker
has trained on: {ends}."""


def _accuracy(results: dict[str, Any], folder: str) -> str:
    some = results["times"]["synchronous"][0]
    size, loads = some["parameters"] * 4, [run["load"] for runs in results["times"].values() for run in runs]
    rows = ["| | seconds | accuracy |", "| --- | --- | --- |"]
    for mode, what in _WHAT.items():
        seconds, right = (picture_plots.last(results, mode, position) for position in (0, 1))
        rows.append(
            f"| {what} | {seconds.median:.1f} ({seconds.lower:.1f} to {seconds.upper:.1f}) | {right.median:.1%} |"
        )
    return f"""\
## Accuracy against time over a slow link

![Accuracy against seconds]({folder}/accuracy.svg)

Two hosts with one worker each, network namespaces on one machine, joined by links of 100 Mbit/s. The network is that of
`examples/digits.py` with 2048 units in place of 128, so a step sends {size / MB:.1f} MB of gradients from each worker:
{size * 8 / 1e8 * 1e3:.0f} ms of the link. Each point is the end of an epoch of {len(some["losses"]) // len(some["epochs"])} steps.
The clock stands while the accuracy is measured.

{chr(10).join(rows)}

Medians after {len(some["epochs"])} epochs of {len(results["times"]["synchronous"])} rounds, with quartiles. The four ways took turns
within a round. The load of the machine was {min(loads):.1f} to {max(loads):.1f} after the runs, so the times of the two ways
that send little, which compute most of the time, would be shorter on an idle machine. [Compression](compression.md) and
[local steps](local-steps.md) say when each is right."""


def _timeline(results: dict[str, Any], folder: str) -> str:
    return f"""\
## Three steps on the timeline

![Timeline of three steps]({folder}/timeline.svg)

The synchronous run above, as rank 0 sees it: a row for each bucket of gradients, recorded by
[`start_timeline`](timeline.md). Backward computes the last bucket first. A small bucket does not wait until a large one has
gone over the link: both are on the network at once."""


def _scaling(folder: str) -> str:
    sums, times = picture_plots.hosts_sums(), picture_plots.host_sums()
    most, many = max(sums), max(times)
    shares = [2 * (h - 1) / h * 64 * MB / 1.25e8 / time for (h, _), time in sums.items()]
    return f"""\
## Sums with more hosts and more workers

![Time of a sum against hosts and workers]({folder}/scaling.svg)

Left: a sum of 64 MB with 2 to {most[0]} hosts, from [the benchmarks of several hosts](benchmarks-hosts.md) of commit
{picture_plots.commit_of("benchmarks-hosts.md")}. It takes {min(shares):.1%} to {max(shares):.1%} of the link's rate. The limit grows with
the hosts, since with h hosts each link carries 2 (h - 1) / h of the array. Right: a sum of 4 MB of each worker on one host, from
[the benchmarks](benchmarks.md) of commit {picture_plots.commit_of("benchmarks.md")}. Memory is read once for each worker, so the
time grows in line with the workers: {many} workers take {times[many] / times[2]:.0f} times as long as 2."""
