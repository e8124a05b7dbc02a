"""Draws the pictures of docs/pictures.md: from results of benchmarks/pictures.py and from the pages of benchmarks."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from . import page_figures

COLOURS = {
    "synchronous": "#444444",
    "fp16": "#5b5ea6",
    "2-bit": "#c8553d",
    "LocalTrainer, period 8": "#0b6e4f",
    "LocalTrainer, period 32": "#8ab17d",
}
MEAN_OF = 11  # a thick line shows means of this number of losses
PHASES = {"wait": "#d9d9d9", "copy in": "#9db4c0", "reduce": "#e0c879", "network": "#5b5ea6", "spread": "#0b6e4f"}


def draw(results: dict[str, Any], folder: Path) -> None:
    """Draw all pictures as SVG."""
    plt.rcParams.update({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "svg.hashsalt": "mykv"})
    for name, draw_one, size in (
        ("loss", _loss, (7.5, 4.2)),
        ("accuracy", _accuracy, (7.5, 4.2)),
        ("scaling", _scaling, (9, 3.8)),
        ("timeline", _timeline, (9, 2.8)),
    ):
        figure = plt.figure(figsize=size)
        draw_one(results, figure)
        figure.tight_layout()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)


def _loss(results: dict[str, Any], figure: plt.Figure) -> None:
    axes = figure.subplots()
    styles = {"1": ("#444444", "-", 3.0), "2": ("#0b6e4f", "-", 1.5), "4": ("#c8553d", "--", 1.2)}
    for workers, run in results["curves"].items():
        colour, style, width = styles[workers]
        label = f"{workers} worker{'s' * (workers != '1')}, {64 // int(workers)} images each"
        losses = run["losses"]
        axes.plot(range(1, len(losses) + 1), losses, color=colour, lw=0.7, alpha=0.35)
        means = [statistics.mean(losses[end - MEAN_OF : end]) for end in range(MEAN_OF, len(losses) + 1)]
        middles = [MEAN_OF // 2 + 1 + number for number in range(len(means))]
        axes.plot(middles, means, style, color=colour, lw=width, label=label)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, mean over the workers")
    axes.legend(fontsize=9)


def _accuracy(results: dict[str, Any], figure: plt.Figure) -> None:
    axes = figure.subplots()
    for mode, runs in results["times"].items():
        for number, run in enumerate(runs):
            seconds, right = zip(*run["epochs"])
            label = mode if number == 0 else None
            axes.plot(seconds, right, "o-", color=COLOURS[mode], lw=1.5, markersize=3, alpha=0.8, label=label)
    axes.set_xscale("log")
    ticks = (2, 5, 10, 20, 50, 100)
    axes.set_xticks(ticks, [str(one) for one in ticks])
    axes.minorticks_off()
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("accuracy on held-out digits")
    axes.legend(fontsize=9, loc="lower right")


def _scaling(results: dict[str, Any], figure: plt.Figure) -> None:
    left, right = figure.subplots(1, 2)
    sums = page_figures.hosts_sums()
    hosts = sorted({host for host, _ in sums})
    limit = [page_figures.limit(host) * 1e3 for host in hosts]
    left.plot(hosts, limit, ":", color="black", label="limit of the link")
    for each, colour in ((1, "#0b6e4f"), (2, "#c8553d")):
        times = [sums[host, each] * 1e3 for host in hosts]
        left.plot(hosts, times, "o-", color=colour, label=f"{each} worker{'s' * (each > 1)} on each host")
    left.set_title("64 MB over links of 1 Gbit/s", fontsize=10)
    left.set_xlabel("hosts")
    left.set_ylabel("time of a sum (ms)")
    left.set_xticks(hosts)
    left.set_ylim(0)
    left.legend(fontsize=8)
    times = page_figures.host_sums()
    right.plot(list(times), [one * 1e3 for one in times.values()], "o-", color="#0b6e4f", label="measured")
    law = [times[2] / 2 * workers * 1e3 for workers in times]
    right.plot(list(times), law, ":", color="black", label="in line with the workers")
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_xticks(list(times), [str(one) for one in times])
    right.set_title("4 MB in shared memory, 2 cores", fontsize=10)
    right.set_xlabel("workers on one host")
    right.legend(fontsize=8)


def _timeline(results: dict[str, Any], figure: plt.Figure) -> None:
    axes = figure.subplots()
    steps, bars = results["timeline"]["steps"], results["timeline"]["bars"]
    rows = sorted({bucket for bucket, *_ in bars})
    for bucket, phase, begin, seconds in bars:
        axes.barh(rows.index(bucket), seconds * 1e3, left=begin * 1e3, height=0.7, color=PHASES[phase])
    for moment in steps:
        axes.axvline(moment * 1e3, color="black", lw=0.8, ls="--")
    axes.set_xlim(0, steps[-1] * 1e3)
    axes.set_yticks(range(len(rows)), [f"bucket {bucket}" for bucket in rows])
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_xlabel("ms; dashed lines: the next step begins")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in PHASES.values()]
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncol": len(PHASES), "frameon": False}
    axes.legend(handles=handles, labels=list(PHASES), fontsize=9, **place)
