"""The text of docs/pictures.md, with the figures of a run of benchmarks/pictures.py."""

from __future__ import annotations

import textwrap
from typing import Any

from . import page_figures
from .cases import MB
from .results import Spread, spread

_WHAT = {
    "synchronous": "`DistributedTrainer`",
    "fp16": '`compression_params={"type": "fp16"}`',
    "2-bit": '`compression_params={"type": "2bit", "threshold": 0.05}`',
    "LocalTrainer, period 8": "`LocalTrainer(period=8, warmup_steps=22)`",
    "LocalTrainer, period 32": "`LocalTrainer(period=32, warmup_steps=22)`",
}
_AMONG_OTHERS = ("The machine was busy: on an idle one the ways that send little would take less time.",)


def text(results: dict[str, Any], folder: str) -> str:
    """The page; `folder` has the pictures."""
    sections = [_overview(results), _loss(results, folder), _accuracy(results, folder), _timeline(folder)]
    return "\n\n".join(["# Pictures", *sections, scaling(folder)]) + "\n"


def _paragraph(*sentences: str) -> str:
    return textwrap.fill(" ".join(sentences), 130, break_long_words=False, break_on_hyphens=False)


def _overview(results: dict[str, Any]) -> str:
    machine, commit = results["about"]["machine"], results["about"]["commit"]
    return _paragraph(
        "`python -m benchmarks.pictures` (as root) makes the runs, the pictures and this page; `--draw` draws again.",
        f"These runs are of commit {commit}, on {machine['cores']} cores ({machine['processor']})"
        + (", where other programs ran too." if _was_busy(results) else "."),
    )


def _loss(results: dict[str, Any], folder: str) -> str:
    runs = results["curves"]
    ends = ", ".join(f"{run['epochs'][-1][1]:.1%} with {workers}" for workers, run in runs.items())
    words = _paragraph(
        f"`examples/digits.py` for {len(runs['1']['epochs'])} epochs. A step uses 64 images of all workers together.",
        "Thick lines are means of 11 steps. The curves differ, since with another number of workers other images come "
        "together in a step.",
        f"Accuracy on 360 held-out digits: {ends}.",
    )
    return f"## The loss with 1, 2 and 4 workers\n\n![Loss against steps]({folder}/loss.svg)\n\n{words}"


def _accuracy(results: dict[str, Any], folder: str) -> str:
    runs = results["times"]["synchronous"]
    nbytes, epochs = runs[0]["parameters"] * 4, len(runs[0]["epochs"])
    rows = ["| | seconds | accuracy |", "| --- | --- | --- |"]
    for mode, what in _WHAT.items():
        seconds, right = _last(results, mode, 0), _last(results, mode, 1)
        rows.append(
            f"| {what} | {seconds.median:.1f} ({seconds.lower:.1f} to {seconds.upper:.1f}) | {right.median:.1%} "
            f"({right.lower:.1%} to {right.upper:.1%}) |"
        )
    before = _paragraph(
        "Two hosts with one worker each: network namespaces on one machine, joined by links of 100 Mbit/s.",
        "The network is that of `examples/digits.py` with 2048 units instead of 128, so each step sums "
        f"{nbytes / MB:.1f} MB of gradients, which takes {nbytes * 8 / 1e8 * 1e3:.0f} ms of the link.",
        f"Each point is the end of an epoch of {runs[0]['steps'] // epochs} steps, and each line a run.",
    )
    after = _paragraph(
        f"Medians after {epochs} epochs of {len(runs)} rounds, with quartiles.",
        *(_AMONG_OTHERS if _was_busy(results) else ()),
        "[Compression](compression.md) and [local steps](local-steps.md) say when each is right.",
    )
    picture = f"![Accuracy against seconds]({folder}/accuracy.svg)"
    return "\n\n".join(["## Accuracy against time over a slow link", picture, before, "\n".join(rows), after])


def _was_busy(results: dict[str, Any]) -> bool:
    """Whether other programs ran, by the load average at the ends of the runs, which two workers raise to at most 2."""
    return max(run["load"] for each in results["times"].values() for run in each) > 2.5


def _last(results: dict[str, Any], mode: str, position: int) -> Spread:
    """The seconds (0) or the accuracy (1) at the ends of the runs."""
    return spread([run["epochs"][-1][position] for run in results["times"][mode]])


def _timeline(folder: str) -> str:
    words = _paragraph(
        "Three steps of the synchronous run above on rank 0, a row for each bucket of gradients "
        "([timeline](timeline.md)). Grey: waiting for the other host; empty: queued. Bucket 1 has the largest "
        "gradient; the other two do not wait for it.",
    )
    return f"## Three steps on the timeline\n\n![Timeline of three steps]({folder}/timeline.svg)\n\n{words}"


def scaling(folder: str) -> str:
    """The section with figures from the pages of benchmarks."""
    sums, times = page_figures.hosts_sums(), page_figures.host_sums()
    shares = [page_figures.limit(hosts) / time for (hosts, _), time in sums.items()]
    commits = [page_figures.commit_of(page) for page in ("benchmarks-hosts.md", "benchmarks.md")]
    many = max(times)
    words = _paragraph(
        f"Left: a sum of 64 MB with 2 to {max(sums)[0]} hosts, from [the benchmarks of several "
        "hosts](benchmarks-hosts.md) "
        f"of commit {commits[0]}. It reaches {min(shares):.1%} to {max(shares):.1%} of the link's rate.",
        "With h hosts each link carries 2 (h - 1) / h of the array.",
        "Right: a sum of 4 MB of each worker on one host, from [the benchmarks](benchmarks.md) of commit "
        f"{commits[1]}. The dotted line is in proportion to the workers. {many} workers take "
        f"{times[many] / times[2]:.0f} times as long as 2, {times[many] / times[2] / (many / 2):.1f} times that line.",
    )
    picture = f"![Time of a sum against hosts and workers]({folder}/scaling.svg)"
    return f"## Sums with more hosts and more workers\n\n{picture}\n\n{words}"
