"""Writes docs/benchmarks.md and its plots from the results of a run: ``python -m benchmarks.report`` does it again."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from . import plots, scaling
from .command_line import formatted
from .environments import HOME, ROOT
from .results import Results, Spread
from .targets import LINES, Part, verdict

PAGE = ROOT / "docs" / "benchmarks.md"
NOTES = Path(__file__).resolve().parent / "notes.md"

_METHOD = """\
All gradients are freshly written, MXNet's engine is waited for, and the ranks agree on a moment through a file that
they share, the same way for every peer. Time runs from the call until everything has arrived (`wait_to_read` of an
array, `waitall` for a trainer); the slowest rank counts. All processes of a peer are started anew in each round, and
peers take turns within a round; times are medians over all rounds, with the quartiles behind them. Results are checked.

Every peer runs as installed and with its own documented settings for speed: binding of ranks, `mpi_yield_when_idle`,
`HOROVOD_CYCLE_TIME`, `num_groups`, the number of servers. A short run of all of them chooses the best for each piece of
work. Ratios are against the better of the two, unless the line says otherwise; the settings stand in brackets. There is
one OpenMP thread per rank, unless the line says otherwise. 64 MB are 2^26 bytes.
"""


def write(results: Results, page: Path = PAGE) -> None:
    """Write the page, and plots into a folder beside it."""
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = plots.draw(results, folder)
    judged = {line.key: line.parts(results) for line in LINES}
    sections = [
        "# Benchmarks\n\nWritten by `make bench`; paragraphs on missed targets stand in benchmarks/notes.md.",
        _summary(judged),
        _table(judged),
        _missed(judged),
        "## How it was measured\n\n" + _METHOD,
        _setting(results),
        *(f"## {title}\n\n![{title}]({folder.name}/{name})\n\n{text}" for title, name, text in drawn),
        _numbers("Times", results),
        _choice(results),
        _commands(results),
        _failures(results),
    ]
    page.write_text("\n\n".join(part.rstrip() for part in sections if part) + "\n", encoding="utf-8")
    print(f"wrote {page}")


def notes() -> dict[str, str]:
    """The hand-written paragraphs, by the keys of the lines."""
    parts = re.split(r"^## +(.+)$", NOTES.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {key.strip(): text.strip() for key, text in zip(parts[1::2], parts[2::2])}


def _summary(judged: dict[str, list[Part]]) -> str:
    verdicts = [verdict(parts) for parts in judged.values()]
    reached = sum(one.startswith("reached") for one in verdicts)
    missed = sum("missed" in one for one in verdicts)
    return f"Of {len(verdicts)} targets {reached} are reached and {missed} missed."


def _table(judged: dict[str, list[Part]]) -> str:
    rows = ["| work | target | | measured |", "| --- | --- | --- | --- |"]
    for line in LINES:
        texts = []
        for part in judged[line.key]:
            mark = {True: "", False: "**missed:** ", None: ""}[part.reached]
            texts.append(mark + part.text)
        rows.append(f"| {line.work} | {line.target} | {verdict(judged[line.key])} | {'<br>'.join(texts)} |")
    return "## Targets\n\n" + "\n".join(rows)


def _missed(judged: dict[str, list[Part]]) -> str:
    written = notes()
    texts = []
    for line in LINES:
        if "missed" in verdict(judged[line.key]):
            text = written.get(line.key) or f"No paragraph on this target has been written yet (`{line.key}`)."
            texts.append(f"**{line.work}.** {text}")
    return "## Missed targets\n\n" + "\n\n".join(texts) if texts else ""


def _setting(results: Results) -> str:
    about = results.about
    rows = [f"- {name}: {value}" for name, value in about["machine"].items()]
    for owner, versions in about["versions"].items():
        listed = ", ".join(f"{name} {value}" for name, value in versions.items() if owner == "ours" or name != "mykv")
        rows.append(f"- versions, {owner}: {listed}")
    rows.append(f"- commit {about['commit']}; {about['rounds']} rounds in {about['minutes']:.1f} minutes")
    return "## Machine and versions\n\n" + "\n".join(rows)


def _numbers(title: str, results: Results) -> str:
    rows = ["| case | ranks | peer | settings | median (quartiles, number of measurements) |", "|---|---|---|---|---|"]
    for case, series, ranks, peer, setup in _keys(results):
        found = results.get(peer, case, series, ranks, setup)
        what = case if series in ("time", "share", "bytes") else f"{case}: {series}"
        rows.append(f"| {what} | {ranks} | {peer} | {setup} | {formatted(found, series).strip()} |")
    return f"## {title}\n\n" + "\n".join(rows)


def _keys(results: Results) -> list[tuple]:
    """What was measured, in the order in which cases came up first."""
    keys = list(dict.fromkeys((r["case"], r["series"], r["ranks"], r["peer"], r["setup"]) for r in results.records))
    order = {case: number for number, case in enumerate(dict.fromkeys(key[0] for key in keys))}
    return sorted(keys, key=lambda key: (order[key[0]], key[1], key[2]))


def _choice(results: Results) -> str:
    if not results.tuning:
        return ""
    tuned = Results(records=results.tuning)
    text = "Medians of the short run that chooses the settings, on 2 ranks; the best of each peer is bold."
    return f"## Choice of settings\n\n{text}\n\n" + "\n\n".join(_choice_of(peer, tuned) for peer in _peers(tuned))


def _choice_of(peer: str, tuned: Results) -> str:
    mine = [record for record in tuned.records if record["peer"] == peer]
    setups = list(dict.fromkeys(record["setup"] for record in mine))
    rows = [f"| {peer} | " + " | ".join(setups) + " |", "|---" * (len(setups) + 1) + "|"]
    for case in dict.fromkeys(record["case"] for record in mine):
        best = tuned.best(peer, case)
        cells = [_cell(tuned.get(peer, case, setup=setup), best) for setup in setups]
        rows.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _peers(results: Results) -> list[str]:
    return list(dict.fromkeys(record["peer"] for record in results.records))


def _cell(found: Spread | None, best: Spread | None) -> str:
    if found is None:
        return ""
    text = f"{found.median * 1e3:.4g} ms"
    return f"**{text}**" if found == best else text


def _commands(results: Results) -> str:
    text = (
        "Everything at once: `make bench`, and `make bench PEERS=none` for mykv alone. One by one, each with `--help`: "
        "`python -m benchmarks.allreduce`, `benchmarks.gradients`, `benchmarks.training`, `benchmarks.footprint`, "
        f"`benchmarks.limit`, `benchmarks.scaling` (ranks {', '.join(map(str, scaling.RANKS))}). "
        "They start these processes, paths left out:"
    )
    return f"## Commands\n\n{text}\n\n```\n" + "\n".join(results.about["commands"]) + "\n```"


def _failures(results: Results) -> str:
    if not results.failures:
        return ""
    rows = []
    for failure in results.failures:
        lines = failure["error"].strip().splitlines()
        where = f"{failure['peer']}, {failure['setup']}, {failure['ranks']} ranks, round {failure['round'] + 1}"
        rows.append(f"- {where}: {lines[0]} {lines[-1] if len(lines) > 1 else ''}")
    return "## What failed\n\n" + "\n".join(rows)


def main() -> None:
    """Write the page from the results of the last run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=HOME / "results.json")
    parser.add_argument("--output", type=Path, default=PAGE)
    given = parser.parse_args()
    write(Results.load(given.results), given.output)


if __name__ == "__main__":
    main()
