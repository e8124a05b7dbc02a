"""Writes docs/benchmarks.md and its plots from the results of a run: ``python -m benchmarks.report`` does it again."""

from __future__ import annotations

import argparse
import csv
import re
from pathlib import Path
from typing import Callable, Union

from . import plots, scaling
from .allreduce import SIZES
from .cases import KB, MB
from .command_line import numbers
from .environments import HOME, ROOT
from .peers import AS_INSTALLED, MYKV_BOUND, TWO_THREADS
from .results import Results, Spread
from .targets import LINES, Part, milliseconds, verdict

PAGE = ROOT / "docs" / "benchmarks.md"
NOTES = Path(__file__).resolve().parent / "notes.md"
OTHERS = NOTES.parent / "another_machine"  # a table for each page
TIMES = "times.csv"  # in the folder of each page

_METHOD = """\
Each process of a peer is started again in each round, and peers take turns within a round. Gradients are freshly
written, the ranks start at a common moment, and time runs from the call until every result can be read; the slowest
rank counts. Times are medians over all rounds, with quartiles. Results are checked. 64 MB are 2^26 bytes.

Every peer runs as installed and with its own documented settings for speed: binding of ranks, `mpi_yield_when_idle`,
`HOROVOD_CYCLE_TIME`, `num_groups`, the number of servers. A short run chooses the best for each piece of work. Ratios
are against the better of the two, in brackets. Each rank has one OpenMP thread, unless the line says otherwise.

Processor time of a rank is that of its process over 400 operations in a row, or over 100 after pauses, less the
pauses. Plain loops are the loads and stores of a sum in shared memory without waiting
(`benchmarks/workers/limit.cpp`); the fastest of several counts. The bare barrier is a futex by which the last process
wakes the others. Both run without mykv and MPI.
"""


_SMALL, _LARGE = f"pushpull/{4 * KB}", f"pushpull/{64 * MB}"
_PEERS = {"horovod": "Horovod", "dist_sync": "dist_sync", "mpi": "MPI_Allreduce"}
Cell = Union[Spread, str, None]


def _cells(ours: str, case: str, series: str = "time", setup: str = "") -> Callable[[Results], list[Cell]]:
    """The cells of a row: the case `ours` of mykv, with its best setting or `setup`, and `case` of each peer."""

    def cells(results: Results) -> list[Cell]:
        first = results.get("mykv", ours, series, setup=setup) if setup else plots.shown(results, "mykv", ours, series)
        return [first, *(plots.shown(results, peer, case, series) for peer in _PEERS)]

    return cells


def _intel_cells(results: Results) -> list[Cell]:
    found = results.get("intel mpi", _LARGE)
    if "mpi" not in results.about["peers"]:
        return [None] * 4
    reason = "not installed" if results.about.get("no intel mpi") else "not measured"
    return [results.best("mykv", _LARGE), None, None, found or reason]


# Lines of the short table.
_SHORT: list[tuple[str, Callable[[Results], list[Cell]]]] = [
    ("sum of an array of 4 KB", _cells(_SMALL, _SMALL)),
    ("sum of an array of 4 KB, mykv's ranks not bound to cores", _cells(_SMALL, _SMALL, setup=AS_INSTALLED)),
    ("sum of an array of 64 MB", _cells(_LARGE, _LARGE)),
    ("sum of an array of 64 MB, with Intel MPI's MPI_Allreduce", _intel_cells),
    *(
        (
            f"sum of {name}'s gradients ({size} MB){trainer}",
            _cells(f"gradients/{model}/{flavour}", f"gradients/{model}/own"),
        )
        for name, size, model, flavour, trainer in (
            ("ResNet-50", 102, "resnet50", "own", ", `DistributedTrainer`"),
            ("ResNet-50", 102, "resnet50", "stock", ", stock `gluon.Trainer`"),
            ("BERT-base", 438, "bert", "own", ", `DistributedTrainer`"),
        )
    ),
    ("training step of ResNet-18, 64 pixels, 8 images per worker", _cells("training/own", "training/own", "step")),
    *(
        (
            f"`step()` with the [optimizer's work divided](optimizer-on-the-store.md), {name}",
            _cells(f"update/resnet18/{key}/store", f"update/resnet18/{key}/own"),
        )
        for name, key in (("SGD with momentum", "sgd"), ("Adam", "adam"))
    ),
    ("processor time of a worker that waits for a late one", _cells("late", "late", "share")),
]


def write(results: Results, page: Path = PAGE) -> None:
    """Write the page: plots and a short table first, everything else folded. The plots go to a folder named like it."""
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = plots.draw(results, folder)
    judged = {line.key: line.parts(results) for line in LINES}
    written, about = notes(), results.about
    first = [one for one in drawn if one[1] in plots.FIRST]
    others = [one for one in drawn if one[1] not in plots.FIRST]
    sections = [
        "# Benchmarks",
        _overview(results),
        *(f"![{title}]({folder.name}/{name})\n\n{text}" for title, name, text in first),
        _short(results),
        _not_faster(results),
        *(f"## {title}\n\n![{title}]({folder.name}/{name})\n\n{text}" for title, name, text in others),
        another_machine(page.stem),
        "## All figures",
        f"[The times of all cases]({folder.name}/{TIMES}), with their settings, are a table of comma-separated values.",
        folded("How it was measured", _METHOD),
        folded("Machine and versions", setting(results, f"{about['rounds']} rounds in {about['minutes']:.1f} minutes")),
        targets_section([(line.work, line.target, judged[line.key], written.get(line.key, "")) for line in LINES]),
        folded("Commands", _commands()),
        folded("What failed", _failures(results)),
    ]
    page.write_text("\n\n".join(part.rstrip() for part in sections if part) + "\n", encoding="utf-8")
    write_times(folder, "ranks", _times(results))
    print(f"wrote {page}")
    if page == PAGE and set(_PEERS) <= set(results.about["peers"]):
        repeat_in(ROOT / "README.md", results)


def folded(title: str, text: str) -> str:
    """A folded part of a page, on the site and in other Markdown viewers; '' without text."""
    return f'<details markdown="1">\n<summary>{title}</summary>\n\n{text.rstrip()}\n\n</details>' if text else ""


def _overview(results: Results) -> str:
    machine = results.about["machine"]
    return (
        f"mykv compared with Horovod, MXNet's dist_sync and Open MPI on one machine ({machine['processor']}, "
        f"{machine['cores']} cores), with 2 workers unless a line says otherwise. Each peer runs as installed and with "
        "the settings that its documentation recommends for speed; the page shows the faster of the two. `make bench` "
        "measures and writes this page. See also [several hosts](benchmarks-hosts.md)."
    )


def _short(results: Results) -> str:
    """The short table; README.md repeats some of its lines, see repeat_in()."""
    text = (
        "Lower is better; the best of a line is bold; quartiles are in brackets. mykv runs as installed or with ranks "
        "bound to cores, as `mykvrun` does, whichever is faster"
    )
    bound = [work for work, cells in _SHORT for one in cells(results)[:1] if one and one.setup == MYKV_BOUND.name]
    text += f"; bound was faster in: {'; '.join(bound)}." if bound else "."
    return "\n\n".join(["## The most important figures", "\n".join(_short_rows(results)), text])


def _short_rows(results: Results, brackets: bool = True) -> list[str]:
    rows = [
        f"| 2 workers on {results.about['machine']['cores']} cores | mykv | Horovod | dist_sync | MPI_Allreduce |",
        "| --- | --- | --- | --- | --- |",
    ]
    before: list[Cell] = []
    for work, find in _SHORT:
        cells = find(results)
        if any(cells) and cells != before:  # equal cells: unbound ranks are faster, as the line above shows
            rows.append(f"| {work} | " + " | ".join(_short_cells(cells, brackets, work.startswith("processor"))) + " |")
        before = cells
    return rows


def _short_cells(cells: list[Cell], brackets: bool, share: bool) -> list[str]:
    measured = [one.median for one in cells if isinstance(one, Spread)]
    least = min(measured) if len(measured) > 1 and not share else None
    texts = []
    for one in cells:
        if not isinstance(one, Spread):
            texts.append(one or "")
            continue
        text = f"{one.median:.1%} of a core" if share else milliseconds(one)
        text = f"**{text}**" if one.median == least else text
        texts.append(f"{text} {quartiles(one)}" if brackets and not share else text)
    return texts


def quartiles(one: Spread) -> str:
    """The quartiles of a time in ms, in brackets."""
    digits = 3 if one.median < 1e-3 else 2 if one.median < 1e-2 else 1
    return f"({1e3 * one.lower:.{digits}f} to {1e3 * one.upper:.{digits}f})"


def repeat_in(page: Path, results: Results) -> None:
    """Update the lines of the short table that README.md repeats, without quartiles."""
    folder = "" if page.parent == PAGE.parent else f"{PAGE.parent.name}/"
    rows = {row.split(" | ")[0]: row for row in _short_rows(results, brackets=False)[2:]}
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        key = line.split(" | ")[0].replace(f"]({folder}", "](")
        if key in rows:
            lines[number] = rows[key].replace("](", f"]({folder}")
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


def slower(work: str, ours: Spread | None, theirs: Spread | None, name: str, why: str = "") -> str:
    """A line of "Where mykv is not faster" if the peer is faster or less than 10% slower, otherwise an empty text."""
    if ours is None or theirs is None or theirs.median >= 1.1 * ours.median:
        return ""
    ratio = ours.median / theirs.median
    by = f"{name} is {ratio:.1f} times faster" if ratio >= 1.1 else f"{name} takes about as long"
    return f"- {work}: {by} ({milliseconds(theirs)}, mykv {milliseconds(ours)}).{why and ' '}{why}"


def _not_faster(results: Results) -> str:
    """The cases of the page in which a peer is as fast or faster."""
    lines = []
    spins = "Its ranks spin while they wait, and the call does not go through MXNet's engine."
    for nbytes in numbers(SIZES):
        size = f"{nbytes // MB} MB" if nbytes >= MB else f"{nbytes // KB} KB"
        case, work = f"pushpull/{nbytes}", f"Sum of an array of {size}"
        unbound, best = results.get("mykv", case), results.best("mykv", case)
        for peer, name in {**_PEERS, "intel mpi": "Intel MPI's MPI_Allreduce"}.items():
            other = results.best(peer, case)
            setup = f"{name} ({other.setup})" if other and other.setup != AS_INSTALLED else name
            why = spins if "MPI" in name and nbytes == 4 * KB else ""
            found = slower(work, best, other, setup, why)
            lines.append(found or slower(f"{work}, mykv's ranks not bound", unbound, other, setup, why))
    for work, find in _SHORT[:-1]:
        if work.startswith("sum of an array"):
            continue
        first, *others = find(results)
        lines += [slower(work.replace("sum", "Sum", 1), first, one, n) for one, n in zip(others, _PEERS.values())]
    lines += [_threads_sentence(results), _ranks_sentence(results)]
    text = "\n".join(line for line in lines if line)
    return f"## Where mykv is not faster\n\n{text}" if text else ""


def _threads_sentence(results: Results) -> str:
    one, two = (results.get("mykv", "training/own", "step", setup=setup) for setup in (AS_INSTALLED, TWO_THREADS.name))
    if one is None or two is None:
        return ""
    return (
        f"- More threads than cores: with 2 OpenMP threads in each worker a training step takes {milliseconds(two)}, "
        f"with one {milliseconds(one)}."
    )


def _ranks_sentence(results: Results) -> str:
    few, many = (results.get("mykv core", f"in place/{4 * KB}", ranks=ranks) for ranks in (2, 32))
    if few is None or many is None:
        return ""
    cores = results.about["machine"]["cores"]
    return (
        f"- Many ranks on few cores: a sum of 4 KB takes {milliseconds(many)} with 32 ranks on {cores} cores, and "
        f"{milliseconds(few)} with 2."
    )


def notes() -> dict[str, str]:
    """The hand-written paragraphs, by the keys of the lines."""
    parts = re.split(r"^## +(.+)$", NOTES.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {key.strip(): text.strip() for key, text in zip(parts[1::2], parts[2::2])}


def another_machine(page: str) -> str:
    """A page's section on a run on another machine: the saved table, and a hand-written paragraph."""
    kept = OTHERS / f"{page}.md"
    return f"{kept.read_text(encoding='utf-8')}\n{notes()[f'another machine: {page}']}" if kept.exists() else ""


def _keep_as_another_machine(page: str, results: Results, rows: list[str]) -> None:
    """Save a run's short table for a page's section on another machine, and leave the page's own figures."""
    about, kept = results.about, OTHERS / f"{page}.md"
    system = ", ".join(about["machine"][key] for key in ("processor", "system"))
    run = f"{about['rounds']} rounds of commit {about['commit']} on {system}:"
    kept.write_text("\n".join(["## On another machine", "", run, "", *rows, ""]), encoding="utf-8")
    print(f"wrote {kept}")


def targets_section(judged: list[tuple[str, str, list[Part], str]], figures: bool = True) -> str:
    """A folded table of missed targets (work, target, parts, reason); with `figures`, the other targets below it."""
    verdicts = [verdict(parts) for _, _, parts, _ in judged]
    reached = sum(one.startswith("reached") for one in verdicts)
    missed = [one for one, found in zip(judged, verdicts) if "missed" in found]
    others = []
    for (work, _, parts, _), found in zip(judged, verdicts):
        if "missed" not in found and figures:
            others.append(f"- {work}: {'; '.join(part.text for part in parts)}")
    rows = ["| missed | target | measured | reason |", "| --- | --- | --- | --- |"]
    for work, target, parts, reason in missed:
        measured = "<br>".join(part.text for part in parts if part.reached is False)
        why = " ".join(reason.split()) or "not written yet"
        rows.append(f"| {work} | {target} | {measured} | {why} |")
    text = "\n".join([*(rows if missed else ()), *(["", "The others:", "", *others] if others else ())])
    return folded(f"Targets: {reached} of {len(judged)} reached, {len(missed)} missed", text)


def setting(results: Results, rounds: str) -> str:
    """Machine, versions and commit of a measurement; `rounds`: how often it was measured."""
    about = results.about
    rows = [f"- {name}: {value}" for name, value in about["machine"].items()]
    for owner, versions in about["versions"].items():
        listed = ", ".join(f"{name} {value}" for name, value in versions.items() if owner == "ours" or name != "mykv")
        rows.append(f"- versions, {owner}: {listed}")
    rows.append(f"- commit {about['commit']}; {rounds}")
    return "\n".join(rows)


def _times(results: Results) -> list[list[str]]:
    rows = []
    for case, series, ranks, peer, setup in _keys(results):
        found = results.get(peer, case, series, ranks, setup)
        factor, unit = {"share": (100, "%"), "bytes": (1 / MB, "MB")}.get(series.split()[-1], (1e3, "ms"))
        what = case if series in ("time", "share", "bytes") else f"{case}: {series}"
        rows.append([what, str(ranks), peer, setup, *spread_cells(found, factor), unit, str(found.count)])
    return rows


def spread_cells(found: Spread, factor: float) -> list[str]:
    """Median and quartiles as cells of the table of all times."""
    return [f"{value * factor:.4g}" for value in (found.median, found.lower, found.upper)]


def write_times(folder: Path, ranks: str, rows: list[list[str]]) -> None:
    """Write the table of all times next to the plots; `ranks` names its second column."""
    head = ["work", ranks, "peer", "settings", "median", "lower quartile", "upper quartile", "unit", "measurements"]
    with (folder / TIMES).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([head, *rows])


def _keys(results: Results) -> list[tuple]:
    """The measured cases, in the order of their first measurement."""
    keys = list(dict.fromkeys((r["case"], r["series"], r["ranks"], r["peer"], r["setup"]) for r in results.records))
    order = {case: number for number, case in enumerate(dict.fromkeys(key[0] for key in keys))}
    return sorted(keys, key=lambda key: (order[key[0]], key[1], key[2]))


def _commands() -> str:
    return (
        "Everything at once: `make bench`, and `make bench PEERS=none` for mykv alone. One by one, each with `--help`: "
        "`python -m benchmarks.allreduce`, `benchmarks.gradients`, `benchmarks.training`, `benchmarks.footprint`, "
        f"`benchmarks.limit`, `benchmarks.scaling` (ranks {', '.join(map(str, scaling.RANKS))}). "
        "`benchmarks/peers.py` has the settings of each peer."
    )


def _failures(results: Results) -> str:
    missing = results.about.get("no intel mpi")
    rows = [f"- {missing}"] if missing else []
    for failure in results.failures:
        lines = failure["error"].strip().splitlines()
        where = f"{failure['peer']}, {failure['setup']}, {failure['ranks']} ranks, round {failure['round'] + 1}"
        rows.append(f"- {where}: {lines[0]} {lines[-1] if len(lines) > 1 else ''}")
    return "\n".join(rows)


def write_as_asked(
    description: str | None,
    found: Path,
    page: Path,
    write: Callable[[Results, Path], None],
    short_rows: Callable[[Results], list[str]],
) -> None:
    """Write a page, or keep its short table as that of another machine, from the results of the last run."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--results", type=Path, default=found)
    parser.add_argument("--output", type=Path, default=page)
    parser.add_argument(
        "--another-machine", action="store_true", help="keep the short table in addition to the page's figures"
    )
    given = parser.parse_args()
    results = Results.load(given.results)
    if given.another_machine:
        _keep_as_another_machine(page.stem, results, short_rows(results))
    else:
        write(results, given.output)


if __name__ == "__main__":
    write_as_asked(__doc__, HOME / "results.json", PAGE, write, _short_rows)
