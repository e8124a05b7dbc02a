"""The plots of docs/benchmarks-hosts.md, with the text under each."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .cases import MB
from .plots import COLOURS, Drawn, bars_of
from .results import Results

_LINK = 1e9 / 8  # bytes per second
_MOST = 1448 / 1514  # share of the rate that headers leave
_SHAPES = ((2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2))  # hosts, ranks on each
_KINDS = (("in place", "gradients in shared memory", COLOURS["mykv"]), ("pushpull", "any array", "#8fc1a9"))
_WIRES = {"none": "uncompressed", "float16": "16 bits", "2bit": "2 bits", "topk": "top-k 1%"}


def draw(results: Results, folder: Path) -> list[Drawn]:
    """Draw the plots for which there are results. Returns (title, file name, caption) of each plot."""
    plt.rcParams.update({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "svg.hashsalt": "mykv"})
    drawn = []
    for name, draw_one in (("summary.svg", _summary), ("links.svg", _links)):
        made = draw_one(results)
        if made:
            figure, title, text = made
            figure.tight_layout()
            figure.savefig(folder / name, metadata={"Date": None})
            drawn.append((title, name, text))
            plt.close(figure)
    return drawn


def _summary(results: Results) -> tuple[plt.Figure, str, str] | None:
    """Bars of an optimizer's step over a fast link, and of sums over a slow one."""
    peers = [("mykv", "mykv"), ("horovod", "Horovod"), ("dist_sync", "dist_sync")]
    steps = [(name, COLOURS[peer], results.best(peer, "step/resnet18/own", "time", "2x1")) for peer, name in peers]
    sums = [
        (name, COLOURS["mykv"], results.best("mykv core", f"compressed/{64 * MB}/{wire}", "time", "2x1"))
        for wire, name in _WIRES.items()
    ]
    groups = {
        "step() of ResNet-18, 1 Gbit/s": [row for row in steps if row[2]],
        "sum of 64 MB with compression, 200 Mbit/s": [row for row in sums if row[2]],
    }
    if not all(groups.values()):
        return None
    figure, all_axes = plt.subplots(1, len(groups), figsize=(9, 2.3))
    for axes, (title, rows) in zip(all_axes, groups.items()):
        bars_of(axes, title, rows)
    text = (
        "Times of 2 hosts with a worker each, shorter is better; thin lines are the quartiles. At 1 Gbit/s the link is "
        "the limit of all three. Over slow links fewer bytes help."
    )
    return figure, "Times of 2 hosts", text


def _links(results: Results) -> tuple[plt.Figure, str, str] | None:
    """The share of the link's rate that a sum of 64 MB reaches, by hosts and ranks."""
    found = {
        kind: {
            shape: results.get("mykv core", f"{kind}/{64 * MB}", "time", "{}x{}".format(*shape)) for shape in _SHAPES
        }
        for kind, *_ in _KINDS
    }
    if not any(one for row in found.values() for one in row.values()):
        return None
    figure, axes = plt.subplots(figsize=(9, 3))
    for number, (kind, _, colour) in enumerate(_KINDS):
        for place, (hosts, _) in enumerate(_SHAPES):
            one = found[kind][_SHAPES[place]]
            if one is None:
                continue
            bytes_over_rate = 2 * 64 * MB * (hosts - 1) / hosts / _LINK
            low, middle, high = (100 * bytes_over_rate / time for time in (one.upper, one.median, one.lower))
            errors = [[middle - low], [high - middle]]
            x = place + 0.4 * number - 0.2
            axes.bar(x, middle, 0.38, yerr=errors, color=colour, ecolor="black", error_kw={"elinewidth": 0.8})
    axes.axhline(100 * _MOST, ls=":", color="black", lw=1)
    legend = [plt.Rectangle((0, 0), 1, 1, color=colour) for *_, colour in _KINDS]
    legend.append(plt.Line2D([], [], ls=":", color="black", lw=1))
    labels = [*(label for _, label, _ in _KINDS), "the most over TCP"]
    axes.legend(legend, labels, fontsize=8, loc="lower right", framealpha=1)
    axes.set_xticks(range(len(_SHAPES)), [f"{hosts} x {each}" for hosts, each in _SHAPES])
    axes.set_xlabel("hosts x workers on each")
    axes.set_ylabel("% of the link's rate")
    axes.set_ylim(0, 108)
    return (
        figure,
        "Share of the link's rate in a sum of 64 MB",
        "A sum of 64 MB over links of 1 Gbit/s: bytes that must cross each link, by the time and the link's rate. "
        "Headers of Ethernet, IP and TCP take 4.4%, so 95.6% is the most (dotted).",
    )
