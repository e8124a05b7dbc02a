"""One pytest report from those of all ranks: a phase fails if it fails on any rank, and shows each rank's traceback."""

from __future__ import annotations

import pytest

from .pool import Outcome


class RanksFailure:
    """The text of a failed test of several ranks. `parts`: (title, text or a representation)."""

    def __init__(self, parts: list[tuple[str, object]], message: str) -> None:
        self.parts = parts
        self.message = message

    @property
    def reprcrash(self):
        """pytest takes the line of its short summary from here."""
        return self

    def toterminal(self, writer) -> None:
        for title, part in self.parts:
            writer.sep("_ ", title)
            if hasattr(part, "toterminal"):
                part.toterminal(writer)
            else:
                writer.line(str(part).rstrip())

    def __str__(self) -> str:
        return "\n".join(f"{title}\n{part}" for title, part in self.parts)


def merge(item: pytest.Item, outcome: Outcome) -> list[pytest.TestReport]:
    """Reports of setup, call and teardown for the controller's pytest."""
    from_dict = item.config.hook.pytest_report_from_serializable
    of_rank = {
        rank: [from_dict(config=item.config, data=data) for data in reports]
        for rank, reports in sorted(outcome.reports.items())
    }
    if outcome.died or outcome.hung:
        return [_broken(item, outcome, of_rank)]
    merged: list[pytest.TestReport] = []
    for phase in ("setup", "call", "teardown"):
        reports = {rank: report for rank, all_ in of_rank.items() for report in all_ if report.when == phase}
        if phase == "call" and merged and merged[0].failed:
            continue  # only ranks whose setup succeeded have this phase
        if reports:
            merged.append(_phase(reports, len(of_rank)))
    return merged


def _phase(reports: dict[int, pytest.TestReport], size: int) -> pytest.TestReport:
    result = next(iter(reports.values()))
    failed = {rank: report for rank, report in reports.items() if report.failed}
    skipped = [rank for rank, report in reports.items() if report.skipped]
    sections = [(f"{name}, rank {rank}", text) for rank, report in reports.items() for name, text in report.sections]
    if failed:
        result = next(iter(failed.values()))
        parts = [(f"rank {rank} of {size}", report.longrepr) for rank, report in failed.items()]
        message = getattr(getattr(result.longrepr, "reprcrash", None), "message", str(result.longrepr))
        result.longrepr = RanksFailure(parts, f"rank {next(iter(failed))}: {message}")
    elif 0 < len(skipped) < len(reports):
        result.outcome = "failed"
        text = f"Skipped on ranks {skipped} only: ranks of one test must agree."
        result.longrepr = RanksFailure([("skipped", text)], text)
    result.sections = sections
    result.duration = max(report.duration for report in reports.values())
    return result


def _broken(item: pytest.Item, outcome: Outcome, of_rank: dict[int, list[pytest.TestReport]]) -> pytest.TestReport:
    """The report of a test in which a rank died or hung."""
    parts, message, sections = [], "", []
    for rank, reports in of_rank.items():
        for report in reports:
            if report.failed:
                parts.append((f"rank {rank}, {report.when}", report.longrepr))
                crash = getattr(report.longrepr, "reprcrash", None)
                message = message or f"rank {rank}: {getattr(crash, 'message', report.when + ' failed')}"
            sections += [(f"{name}, rank {rank}", text) for name, text in report.sections]
    for rank in outcome.died:
        parts.append((f"rank {rank} died", outcome.output.get(rank, "")))
    for rank in outcome.hung:
        parts.append((f"rank {rank} did not finish", outcome.output.get(rank, "")))
    if outcome.died:
        message = message or f"rank {outcome.died[0]} died"
    message = message or f"ranks {outcome.hung} did not finish within {outcome.seconds:.0f} s"
    if outcome.log.strip():
        parts.append(("output of mpirun", outcome.log))
    return failure(item, RanksFailure(parts, message), outcome.seconds, sections)


def failure(item: pytest.Item, what: object, seconds: float, sections=()) -> pytest.TestReport:
    """A failed report for `item` that no rank has written."""
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome="failed",
        longrepr=what,
        when="call",
        sections=list(sections),
        duration=seconds,
    )
