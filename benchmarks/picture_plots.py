"""Draws the pictures of docs/pictures.md from the results of benchmarks/pictures.py and from the pages of benchmarks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .cases import MB
from .environments import ROOT
from .results import spread

COLOURS = {"synchronous": "#444444", "fp16": "#5b5ea6", "2-bit": "#c8553d", "LocalTrainer": "#0b6e4f"}
PHASES = {"wait": "#d9d9d9", "copy in": "#9db4c0", "reduce": "#e0c879", "network": "#5b5ea6", "spread": "#0b6e4f"}
_DRAWN_STEPS = 3
_LINK = 1e9 / 8  # bytes per second of the links of docs/benchmarks-hosts.md


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
        axes.plot(range(1, len(run["losses"]) + 1), run["losses"], style, color=colour, lw=width, label=label)
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
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("accuracy on held-out digits")
    axes.legend(fontsize=9, loc="lower right")


def hosts_sums() -> dict[tuple[int, int], float]:
    """Seconds of a sum of 64 MB in shared memory, by hosts and workers on each, from docs/benchmarks-hosts.md."""
    row = rf"^\| in place/{64 * MB} \| (\d+)x(\d+) \| mykv core \| as installed \| ([\d.]+) ms "
    found = re.findall(row, _page("benchmarks-hosts.md"), re.MULTILINE)
    return {(int(hosts), int(each)): float(time) / 1e3 for hosts, each, time in found}


def host_sums() -> dict[int, float]:
    """Seconds of a sum of 4 MB in shared memory by the number of workers, from docs/benchmarks.md."""
    row = rf"^\| in place/{4 * MB} \| (\d+) \| mykv core \| as installed \| ([\d.]+) ms "
    return {int(n): float(time) / 1e3 for n, time in re.findall(row, _page("benchmarks.md"), re.MULTILINE)}


def commit_of(page: str) -> str:
    """The commit whose figures a page of benchmarks shows."""
    return re.search(r"^- commit (\w+)", _page(page), re.MULTILINE).group(1)


def _page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def _scaling(results: dict[str, Any], figure: plt.Figure) -> None:
    left, right = figure.subplots(1, 2)
    sums = hosts_sums()
    hosts = sorted({host for host, _ in sums})
    limit = [2 * (host - 1) / host * 64 * MB / _LINK * 1e3 for host in hosts]
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
    times = host_sums()
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
    trace, steps = results["timeline"]["trace"], results["timeline"]["steps"]
    zero = trace["otherData"]["unix_time_at_zero_us"] / 1e6
    first = len(steps) // 2
    begin, end = steps[first], steps[first + _DRAWN_STEPS]
    rows = _rows(trace["traceEvents"])
    for place, bars in enumerate(rows.values()):
        for name, since, seconds in bars:
            left = (zero + since - begin) * 1e3
            if -seconds * 1e3 < left < (end - begin) * 1e3:
                axes.barh(place, seconds * 1e3, left=left, height=0.7, color=PHASES[name])
    for moment in steps[first : first + _DRAWN_STEPS + 1]:
        axes.axvline((moment - begin) * 1e3, color="black", lw=0.8, ls="--")
    axes.set_xlim(0, (end - begin) * 1e3)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_xlabel("ms; dashed lines: the next step begins")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in PHASES.values()]
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncol": len(PHASES), "frameon": False}
    axes.legend(handles=handles, labels=list(PHASES), fontsize=9, **place)


def _rows(events: list[dict[str, Any]]) -> dict[str, list[tuple[str, float, float]]]:
    """For each bucket of the trainer its phases: name, begin and length in seconds."""
    rows: dict[int, list[tuple[str, float, float]]] = {}
    lanes = {}
    for event in events:
        if event["name"] == "thread_name":
            found = re.search(r"bucket(\d+)$", event["args"]["name"])
            if found:
                lanes[event["tid"]] = int(found.group(1))
    for event in events:
        if event["ph"] == "X" and event["name"] in PHASES and event["tid"] in lanes:
            row = rows.setdefault(lanes[event["tid"]], [])
            row.append((event["name"], event["ts"] / 1e6, event["dur"] / 1e6))
    return {f"bucket {number}": rows[number] for number in sorted(rows)}


def last(results: dict[str, Any], mode: str, position: int) -> Any:
    """Median and quartiles over the rounds: of the seconds (0) or the accuracy (1) at the end of a run."""
    return spread([run["epochs"][-1][position] for run in results["times"][mode]])
