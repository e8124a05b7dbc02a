"""The plots of docs/benchmarks.md, with the text under each.

A peer has the same colour everywhere. Thin lines: as installed. Thick lines: the best of a peer's settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Callable, Tuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from . import scaling
from .allreduce import SIZES
from .cases import KB, MB
from .command_line import numbers
from .peers import AS_INSTALLED
from .results import Results, Spread
from .targets import milliseconds, per_array, plain_loops

COLOURS = {"mykv": "#0b6e4f", "horovod": "#c8553d", "dist_sync": "#5b5ea6", "mpi": "#8a8d91", "alone": "#444444"}
Drawn = Tuple[str, str, str]
SUMMARY = "summary.svg"  # needs all peers
FIRST = (SUMMARY, "size.svg")  # before the first table


def draw(results: Results, folder: Path) -> list[Drawn]:
    """Draw the plots for which there are results. Returns (title, file name, caption) of each plot."""
    plt.rcParams.update({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "svg.hashsalt": "mykv"})
    drawn = []
    summary = _summary(results)
    if summary:
        figure, described = summary
        figure.savefig(folder / SUMMARY, metadata={"Date": None})
        drawn.append((described[0], SUMMARY, described[1]))
        plt.close(figure)
    for name, draw_one in (("size", _size), ("step", _step), ("ranks", _ranks), ("arrays", _arrays)):
        figure, axes = plt.subplots(figsize=(7.5, 4.5))
        described = draw_one(results, axes)
        if described:
            axes.set_title(described[0])
            figure.tight_layout()
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            drawn.append((described[0], f"{name}.svg", described[1]))
        plt.close(figure)
    return drawn


def _summary(results: Results) -> tuple[plt.Figure, tuple[str, str]] | None:
    """Three groups of bars for the home page: each worker's time in ms, as in the table below them."""
    groups = [
        ("sum of ResNet-50's gradients", "gradients/resnet50/own", "gradients/resnet50/own", "time"),
        ("training step of ResNet-18", "training/own", "training/own", "step"),
        ("optimizer's step, Adam", "update/resnet18/adam/store", "update/resnet18/adam/own", "time"),
    ]
    names = [("mykv", "mykv"), ("horovod", "Horovod"), ("dist_sync", "dist_sync")]
    found = [
        [shown(results, peer, ours if peer == "mykv" else case, series) for peer, _ in names]
        for _, ours, case, series in groups
    ]
    if any(one is None for row in found for one in row):
        return None
    figure, all_axes = plt.subplots(1, len(groups), figsize=(9, 2.1))
    for axes, (title, *_), row in zip(all_axes, groups, found):
        bars_of(axes, title, [(name, COLOURS[peer], one) for (peer, name), one in zip(names, row)])
    figure.tight_layout()
    return figure, (
        "Times of mykv, Horovod and dist_sync",
        "Times of 2 workers on one machine, shorter is better; thin lines are the quartiles. A training step computes "
        "most of the time, so there is less to gain.",
    )


def bars_of(axes: plt.Axes, title: str, rows: list[tuple[str, str, Spread]]) -> None:
    """Bars for (name, colour, time), with the quartiles as thin lines and the medians as text."""
    times = [one.median * 1e3 for *_, one in rows]
    bars = axes.barh([name for name, *_ in rows], times, color=[colour for _, colour, _ in rows])
    quartiles = [[1e3 * (one.median - one.lower), 1e3 * (one.upper - one.median)] for *_, one in rows]
    axes.errorbar(times, range(len(rows)), xerr=list(zip(*quartiles)), fmt="none", ecolor="black", elinewidth=0.8)
    for bar, (*_, one) in zip(bars, rows):
        place = (1e3 * one.upper, bar.get_y() + bar.get_height() / 2)
        axes.annotate(milliseconds(one), place, (4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_xlim(0, max(1e3 * one.upper for *_, one in rows) * 1.35)
    axes.set_title(title, fontsize=10)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_xticks([])
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)


def shown(results: Results, peer: str, case: str, series: str = "time") -> Spread | None:
    """The result to show: with the best of a peer's settings; for whole training steps, that of mykv as installed."""
    if peer == "mykv" and case.startswith("training/"):
        return results.get(peer, case, series)
    return results.best(peer, case, series)


def _size(results: Results, axes: plt.Axes) -> tuple[str, str] | None:
    sizes = numbers(SIZES)
    for peer in ("mykv", "horovod", "dist_sync", "mpi"):
        for label, width, find in _two_ways(results, peer):
            _line(axes, sizes, [find(f"pushpull/{size}") for size in sizes], label, COLOURS[peer], width)
    if not axes.lines:
        return None
    _logarithmic(axes, "size of the array", sizes, [f"{s // MB} MB" if s >= MB else f"{s // KB} KB" for s in sizes])
    axes.set_ylabel("time (ms)")
    axes.legend(fontsize=8)
    return (
        "Time of an allreduce against its size, 2 ranks",
        "One float32 array of any memory, in place, from the call until the result can be read: pushpull of mykv and "
        "dist_sync, allreduce_ of Horovod, MPI_Allreduce on numpy arrays. Thin lines: as "
        "installed. Thick lines: the better setting for each size.",
    )


def _two_ways(results: Results, peer: str) -> list[tuple[str, float, Callable[[str], Spread | None]]]:
    return [
        (f"{peer}, as installed", 1.0, lambda case: results.get(peer, case)),
        (f"{peer}, best settings", 2.0, lambda case: results.best(peer, case)),
    ]


def _step(results: Results, axes: plt.Axes) -> tuple[str, str] | None:
    rows = [
        ("alone", "alone", "own"),
        ("mykv, DistributedTrainer", "mykv", "own"),
        ("mykv, stock Trainer", "mykv", "stock"),
        ("Horovod", "horovod", "own"),
        ("dist_sync", "dist_sync", "own"),
    ]
    parts = ("forward and backward", "allreduce", "update")
    shades = {"forward and backward": "#9db4c0", "allreduce": "#c8553d", "update": "#e0c879"}
    labels: list[str] = []
    for label, peer, flavour in rows:
        whole = shown(results, peer, f"training/{flavour}", "alone" if peer == "alone" else "step")
        setups = {part.setup for part in (results.best(peer, f"breakdown/{flavour}", one) for one in parts) if part}
        if whole and whole.setup not in setups:  # the parts were measured with one setup only
            whole = results.get(peer, f"training/{flavour}", "alone" if peer == "alone" else "step")
        setup = whole.setup if whole else AS_INSTALLED
        found = {part: results.get(peer, f"breakdown/{flavour}", part, setup=setup) for part in parts}
        if any(one is None for one in found.values()):
            continue
        left = 0.0
        for part in parts:
            axes.barh(len(labels), found[part].median * 1e3, left=left, color=shades[part], label=_once(part, labels))
            left += found[part].median * 1e3
        if whole:
            quartiles = [[1e3 * (whole.median - whole.lower)], [1e3 * (whole.upper - whole.median)]]
            style = {"fmt": "D", "color": "black", "capsize": 3, "label": _once("whole step, quartiles", labels)}
            axes.errorbar(whole.median * 1e3, len(labels), xerr=quartiles, **style)
        labels.append(label)
    if not labels:
        return None
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("time (ms)")
    axes.legend(fontsize=8)
    return (
        "A training step and its parts, 2 ranks",
        "ResNet-18, 64 pixels, 8 images per worker, SGD with momentum. The bars are parts that were measured one by "
        "one; in the whole step (diamond) they overlap."
        f"{_alone_sentence(results)}{_bucket_sentence(results)}",
    )


def _once(label: str, shown: list[str]) -> str | None:
    return None if shown else label


def _alone_sentence(results: Results) -> str:
    alone, ours = results.best("alone", "training/own", "alone"), results.get("mykv", "training/own", "step")
    if not alone or not ours:
        return ""
    ranges = [f"{one.lower * 1e3:.0f} to {one.upper * 1e3:.0f} ms" for one in (alone, ours)]
    return (
        " `alone` is another run: two processes without communication "
        f"(quartiles {ranges[0]}; the whole step of mykv {ranges[1]})."
    )


def _bucket_sentence(results: Results) -> str:
    many = results.get("mykv", "training/own", "step")
    one = results.get("mykv", "training/own", "step", setup="one bucket")
    if not many or not one:
        return ""
    alone = [results.get("mykv", "training/own", "alone", setup=setup) for setup in ("as installed", "one bucket")]
    return (
        f" Compared with compute alone, a step takes {many.median / alone[0].median - 1:+.1%} with buckets of the "
        f"default size, {one.median / alone[1].median - 1:+.1%} with one bucket for all gradients."
    )


def _ranks(results: Results, axes: plt.Axes) -> tuple[str, str] | None:
    texts: list[str] = []
    for nbytes, label, colour in ((scaling.SMALL, "4 KB", "#0b6e4f"), (scaling.LARGE, "4 MB", "#c8553d")):
        found = {size: results.get("mykv core", f"in place/{nbytes}", ranks=size) for size in scaling.RANKS}
        known = {size: one for size, one in found.items() if one}
        if len(known) < 2:
            continue
        _line(axes, list(known), list(known.values()), label, colour, 2.0)
        first, last = (2 if 2 in known else min(known)), max(known)
        factor = known[last].median / known[first].median
        _line_of_law(axes, list(known), known[first].median / first, colour, f"{label}, in line with the ranks")
        middle = f" and {known[16].median / known[first].median:.1f} times with 16 ranks" if 16 in known else ""
        texts.append(
            f"{label} takes {factor:.1f} times as long with {last} ranks as with {first} ({last // first} in line)"
            f"{middle}"
        )
    if not texts:
        return None
    for label, find in (
        ("plain loops over 4 MB, without waiting", lambda ranks: plain_loops(results, scaling.LARGE, ranks)),
        ("bare barrier of processes that sleep", lambda ranks: ("", results.get("limit", "barrier", ranks=ranks), 1)),
    ):
        points = {ranks: found[1] for ranks in scaling.RANKS for found in [find(ranks)] if found and found[1]}
        if 2 in points and max(points) > 2:
            colour = COLOURS["mpi"] if "loops" in label else COLOURS["alone"]
            _line(axes, list(points), list(points.values()), label, colour, 1.0, "--")
            factor = points[max(points)].median / points[2].median
            texts.append(f"{label}: {factor:.1f} times with {max(points)} as with 2")
    _logarithmic(axes, "ranks on this machine", list(scaling.RANKS), [str(size) for size in scaling.RANKS])
    axes.set_ylabel("time (ms)")
    axes.legend(fontsize=8)
    cores = results.about["machine"]["cores"]
    return (
        "Time against the number of ranks, core only",
        f"Once the ranks outnumber the {cores} cores, time should grow in proportion (dotted). Dashed lines are the "
        f"machine's limits without mykv: {'; '.join(texts)}.",
    )


def _arrays(results: Results, axes: plt.Axes) -> tuple[str, str] | None:
    text = ""
    rows = [
        ("mykv, DistributedTrainer", "mykv", "own", "-"),
        ("mykv, stock Trainer", "mykv", "stock", "--"),
        ("Horovod, as installed", "horovod", "own", "-"),
        ("dist_sync, as installed", "dist_sync", "own", "-"),
    ]
    for label, peer, flavour, style in rows:
        found = {n: results.get(peer, f"gradients/{n}x{scaling.SMALL}/{flavour}") for n in scaling.ARRAYS}
        known = {count: one for count, one in found.items() if one}
        if len(known) < 2:
            continue
        _line(axes, list(known), list(known.values()), label, COLOURS[peer], 2.0, style)
        each = per_array(results, peer, flavour)
        text += f" {label}: {1e6 * each:.1f} microseconds for each further array."
    if not text:
        return None
    _logarithmic(axes, "arrays of 4 KB", list(scaling.ARRAYS), [f"{count:,}" for count in scaling.ARRAYS])
    axes.set_ylabel("time (ms)")
    axes.legend(fontsize=8)
    return (
        "Time of allreduce_grads against the number of arrays, 2 ranks",
        "Flat while the cost of one operation dominates, then in proportion to the arrays." + text,
    )


def _line(
    axes: plt.Axes, x: list[int], found: list[Spread | None], label: str, colour: str, width: float, style: str = "-"
) -> None:
    """A line of medians, with the quartiles as bars."""
    points = [(position, one) for position, one in zip(x, found) if one]
    if not points:
        return
    middle = [one.median * 1e3 for _, one in points]
    spread = [
        [(one.median - one.lower) * 1e3 for _, one in points],
        [(one.upper - one.median) * 1e3 for _, one in points],
    ]
    shape: dict[str, object] = {"marker": "o", "markersize": 4, "capsize": 2, "linestyle": style}
    axes.errorbar([position for position, _ in points], middle, spread, label=label, color=colour, lw=width, **shape)


def _line_of_law(axes: plt.Axes, x: list[int], per_rank: float, colour: str, label: str) -> None:
    axes.plot(x, [per_rank * size * 1e3 for size in x], ":", color=colour, lw=1, label=label)


def _logarithmic(axes: plt.Axes, name: str, ticks: list[int], labels: list[str]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(ticks, labels)
    axes.minorticks_off()
    axes.set_xlabel(name)
