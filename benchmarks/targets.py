"""The targets, line by line, and the verdict of a run on each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

from . import scaling
from .cases import KB, MB
from .peers import AS_INSTALLED, HOROVOD_NO_CYCLE, MPI_YIELD, MYKV_BOUND, TWO_THREADS
from .results import Results, Spread

_SMALL, _LARGE = f"pushpull/{4 * KB}", f"pushpull/{64 * MB}"
# Two ranks on two cores run at once, four cannot: the last of them waits for a core while others leave it. Above that
# factor, ranks must have waited for each other's time slices.
_NO_COLLAPSE = 10.0


@dataclass(frozen=True)
class Part:
    """One number of a line.

    Attributes
    ----------
    text : str
        The number, with words.
    reached : bool or None
        None without a target.
    """

    text: str
    reached: bool | None = None


@dataclass(frozen=True)
class Line:
    """One line of the table; `parts` finds its numbers in results."""

    key: str
    work: str
    target: str
    parts: Callable[[Results], list[Part]]


def milliseconds(found: Spread) -> str:
    """A median in ms with a suitable number of digits."""
    value = found.median * 1e3
    return f"{value:.3f} ms" if value < 1 else f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms"


def microseconds(found: Spread, parts: int = 1) -> str:
    """A median in us; `parts` divides what was added up over ranks."""
    return f"{found.median * 1e6 / parts:.1f} us"


def per_array(results: Results, peer: str, flavour: str) -> float | None:
    """Seconds per additional array, between the smallest and the largest measured number of arrays."""
    found = {n: results.get(peer, f"gradients/{n}x{scaling.SMALL}/{flavour}") for n in scaling.ARRAYS}
    known = {count: one.median for count, one in found.items() if one}
    least, most = min(known, default=0), max(known, default=0)
    return (known[most] - known[least]) / (most - least) if len(known) > 1 else None


def plain_loops(results: Results, nbytes: int, ranks: int = 2) -> tuple[str, Spread, int] | None:
    """The fastest of the plain loops over one array of each rank: its name, its time, and how many loops there are."""
    case, found = f"limit/{nbytes}", {}
    for record in results.records:
        if (record["peer"], record["case"], record["ranks"]) == ("limit", case, ranks):
            found[record["series"]] = results.get("limit", case, record["series"], ranks)
    if not found:
        return None
    kernel, limit = min(found.items(), key=lambda item: item[1].median)
    return kernel, limit, len(found)


def verdict(parts: list[Part]) -> str:
    """'reached' if all parts are reached; says so if some were not measured."""
    gaps = any("not measured" in part.text for part in parts)
    if any(part.reached is False for part in parts):
        return "**missed**"
    if not any(part.reached for part in parts):
        return "not measured"
    return "reached, as far as measured" if gaps else "reached"


def _faster(ours: Spread | None, theirs: Spread | None, name: str, least: float | None) -> Part:
    """How many times faster we are."""
    if ours is None or theirs is None:
        return Part(f"{name}: not measured" + (f" (mykv: {milliseconds(ours)})" if ours else ""))
    ratio = theirs.median / ours.median
    compared = "faster than" if ratio >= 1 else "as fast as"
    text = f"{ratio:.2f} times {compared} {name} ({milliseconds(ours)} and {milliseconds(theirs)}; {theirs.setup})"
    return Part(text, None if least is None else ratio >= least)


def _against(results: Results, case: str, theirs: str, peer: str, least: float, name: str = "") -> Part:
    return _faster(results.get("mykv", case), results.best(peer, theirs), name or peer, least)


def _small(results: Results) -> list[Part]:
    # Threads of an unbound rank may start on the other rank's core, which costs waking another core.
    unbound, bound = results.get("mykv", _SMALL), results.get("mykv", _SMALL, setup=MYKV_BOUND.name)
    theirs = [
        (results.get("horovod", _SMALL), "Horovod", 20),
        (results.best("dist_sync", _SMALL), "dist_sync", 5),
        (results.get("horovod", _SMALL, setup=HOROVOD_NO_CYCLE.name), "Horovod", 2),
    ]
    parts = [_faster(unbound, other, name, least) for other, name, least in theirs]
    if bound:
        ratios = ", ".join(f"{other.median / bound.median:.1f}" for other, *_ in theirs if other)
        rest = f", {ratios} times faster" if ratios else ""
        parts.append(Part(f"bound to cores, as `mykvrun` does: {milliseconds(bound)}{rest}"))
    return parts


def _large(results: Results) -> list[Part]:
    ours, limit = results.best("mykv", _LARGE), plain_loops(results, 64 * MB)
    against = [
        ("horovod", "Horovod", 6.5),
        ("mpi", "MPI_Allreduce", 3),
        ("dist_sync", "dist_sync", None),
        ("intel mpi", "Intel MPI's Allreduce", None),
    ]
    parts = [_faster(ours, results.best(peer, _LARGE), name, least) for peer, name, least in against]
    if ours is None or limit is None:
        return [*parts, Part("limit: not measured")]
    share = limit[1].median / ours.median
    parts.append(Part(f"{share:.0%} of the memory's limit ({milliseconds(limit[1])}, plain loops)", share >= 0.6))
    return parts


def _adopted(results: Results) -> list[Part]:
    case = f"gradients/1x{64 * MB}/own"
    found = [results.best("horovod", one) for one in (case, _LARGE)]
    horovod = min((one for one in found if one), key=lambda one: one.median, default=None)
    ours = results.get("mykv", case)
    parts = [_faster(ours, horovod, "Horovod", 8)]
    loops = plain_loops(results, 64 * MB)
    if loops is None or ours is None:
        return [*parts, Part("limit: not measured")]
    kernel, limit, count = loops
    share = limit.median / ours.median
    text = f"{share:.0%} of the speed of the fastest of {count} plain loops ({milliseconds(limit)}; {kernel})"
    parts.append(Part(text, share >= 0.8))
    core = results.get("mykv core", f"in place/{64 * MB}")
    if core:
        parts.append(Part(f"the core alone, without MXNet: {milliseconds(core)}, {limit.median / core.median:.0%}"))
    return parts


def _model(model: str, flavour: str, horovod: float, dist_sync: float) -> Callable[[Results], list[Part]]:
    def parts(results: Results) -> list[Part]:
        ours, theirs = f"gradients/{model}/{flavour}", f"gradients/{model}/own"
        label = "stock Trainer: " if flavour == "stock" else "DistributedTrainer: "
        found = [
            _against(results, ours, theirs, "horovod", horovod, "Horovod"),
            _against(results, ours, theirs, "dist_sync", dist_sync),
        ]
        return [Part(label + part.text, part.reached) for part in found]

    return parts


def _bert(results: Results) -> list[Part]:
    return [*_model("bert", "stock", 7, 6)(results), *_model("bert", "own", 10, 25)(results)]


def _four(results: Results) -> list[Part]:
    model = "gradients/resnet50"
    own, stock = (results.get("mykv", f"{model}/{flavour}", ranks=4) for flavour in ("own", "stock"))
    small, horovod = (results.get(peer, _SMALL, ranks=4) for peer in ("mykv", "horovod"))
    theirs = results.get("horovod", f"{model}/own", ranks=4)
    parts = [
        _faster(own, theirs, "Horovod, ResNet-50, DistributedTrainer", 4),
        _faster(stock, theirs, "Horovod, ResNet-50, stock Trainer", None),
        _faster(small, horovod, "Horovod, 4 KB", 4),
    ]
    two = results.get("mykv", _SMALL)
    if two and small:
        growth = small.median / two.median
        text = f"4 KB takes {growth:.1f} times as long as with 2 ranks (collapse: over {_NO_COLLAPSE:.0f} times)"
        parts.append(Part(text, growth <= _NO_COLLAPSE))
    for setup in (AS_INSTALLED, MPI_YIELD.name):
        before, after = (results.get("mpi", _SMALL, ranks=ranks, setup=setup) for ranks in (2, 4))
        if before and after:
            growth = after.median / before.median
            parts.append(Part(f"MPI_Allreduce ({setup}): {growth:.1f} times, {milliseconds(after)}"))
    return parts


def _float16(results: Results) -> list[Part]:
    parts = []
    for flavour, label in (("own", "DistributedTrainer"), ("stock", "stock Trainer")):
        case = f"gradients/resnet50/{flavour}"
        half, full = results.get("mykv", f"{case}/float16"), results.get("mykv", case)
        if half is None or full is None:
            parts.append(Part(f"{label}: not measured"))
            continue
        ratio = full.median / half.median
        text = f"{label}: {ratio:.2f} times faster ({milliseconds(half)} and {milliseconds(full)})"
        parts.append(Part(text, ratio >= 1.6))
    return parts


def _training(results: Results) -> list[Part]:
    parts = []
    for setup, asked in ((AS_INSTALLED, True), (TWO_THREADS.name, False)):
        step, alone = (results.get("mykv", "training/own", series, setup=setup) for series in ("step", "alone"))
        if step is None or alone is None:
            continue
        more = step.median / alone.median - 1
        threads = "1 OpenMP thread" if asked else setup
        text = (
            f"{more:+.1%} with {threads} ({milliseconds(step)} and {milliseconds(alone)} alone, in the same processes)"
        )
        parts.append(Part(text, more <= 0.10 if asked else None))
    control = results.get("alone", "training/own", "alone")
    for peer in ("mykv", "horovod", "dist_sync"):
        theirs = results.best(peer, "training/own", "step")
        if theirs and control:
            more = theirs.median / control.median - 1
            text = f"{peer}, beside processes with compute alone ({milliseconds(control)}): {more:+.1%}"
            parts.append(Part(f"{text} ({milliseconds(theirs)}; {theirs.setup})"))
    return parts or [Part("not measured")]


def _waiting(results: Results) -> list[Part]:
    parts = []
    for case, label, most in (("late", "waiting", 0.05), ("idle", "idle", 0.01)):
        found = results.get("mykv", case, "share")
        if found is None:
            parts.append(Part(f"{label}: not measured"))
            continue
        others = [(peer, results.get(peer, case, "share")) for peer in ("horovod", "dist_sync", "mpi")]
        rest = "; ".join(f"{peer} {other.median:.1%}" for peer, other in others if other)
        text = f"{label}: {found.median:.2%} of a core" + (f" ({rest})" if rest else "")
        parts.append(Part(text, found.median < most))
    return parts


def _update(results: Results) -> list[Part]:
    parts = []
    for optimizer, label in (("sgd", "SGD with momentum"), ("adam", "Adam")):
        case = f"update/resnet18/{optimizer}"
        ours, alone = results.best("mykv", f"{case}/store"), results.best("alone", f"{case}/own", ranks=1)
        horovod, dist_sync = (results.best(peer, f"{case}/own") for peer in ("horovod", "dist_sync"))
        if ours is None or alone is None:
            parts.append(Part(f"{label}: not measured"))
            continue
        for other, name, most in (
            (alone, "one process alone", 1.0),
            (horovod, "Horovod", 0.35),
            (dist_sync, "dist_sync", None),
        ):
            if other:
                share = ours.median / other.median
                times = f"{milliseconds(ours)}, {ours.setup}, and {milliseconds(other)}, {other.setup}"
                text = f"{label}: {share:.2f} of the time of {name} ({times})"
                parts.append(Part(text, None if most is None else share < most))
        stock = results.best("mykv", f"{case}/stock store")
        if stock:
            share = stock.median / alone.median
            each = {setup: results.get("mykv", f"{case}/stock store", setup=setup) for setup in (AS_INSTALLED, "bound")}
            times = ", ".join(f"{milliseconds(one)} {setup}" for setup, one in each.items() if one)
            text = f"{label}: stock Trainer {share:.2f} of the time of one process alone ({times})"
            parts.append(Part(text, share <= 0.8))
        mine, theirs = (
            results.get("mykv", f"{case}/store", "state bytes"),
            results.get("horovod", f"{case}/own", "state bytes"),
        )
        if mine and theirs:
            share = mine.median / theirs.median
            sizes = f"{mine.median / MB:.1f} MB on a worker, {share:.2f} of Horovod's {theirs.median / MB:.1f} MB"
            text = f"{label}: states take {sizes}"
            parts.append(Part(text, share <= 0.55))
    return parts


def _python(results: Results) -> list[Part]:
    cpu, whole = (results.get("mykv", "python/resnet50/own", series) for series in ("cpu", "time"))
    if cpu is None or whole is None:
        return [Part("not measured")]
    return [
        Part(f"{milliseconds(cpu)} of processor time of Python's thread", cpu.median < 1e-3),
        Part(f"{milliseconds(whole)} until step() returns, while the cores reduce what was pushed first"),
    ]


def _memory(results: Results) -> list[Part]:
    parts = []
    for model, label, elements in (("resnet50", "ResNet-50", 25575912), ("bert", "BERT-base", 109482240)):
        with_us, without = (results.get(peer, f"memory/{model}", "bytes") for peer in ("mykv", "alone"))
        if with_us is None or without is None:
            parts.append(Part(f"{label}: not measured"))
            continue
        more, most = with_us.median - without.median, 0.05 * 2 * 4 * elements + 64 * MB
        text = f"{label}: {more / MB:.0f} MB beyond two processes with the same gradients (at most {most / MB:.0f} MB)"
        parts.append(Part(text, more < most))
    return parts


def _further_array(results: Results) -> list[Part]:
    parts = []
    for flavour, label, most in (("stock", "stock Trainer", 6e-6), ("own", "DistributedTrainer", 0.9e-6)):
        each = per_array(results, "mykv", flavour)
        text = "not measured" if each is None else f"{each * 1e6:.2f} us, up to {max(scaling.ARRAYS):,} arrays"
        parts.append(Part(f"{label}: {text}", None if each is None else each <= most))
    return parts


def _paused(results: Results) -> list[Part]:
    case = f"after a pause/{4 * KB}"
    time, cpu = results.get("mykv core", case), results.get("mykv core", case, "cpu of all ranks")
    if time is None or cpu is None:
        return [Part("not measured")]
    return [
        Part(milliseconds(time), time.median <= 0.05e-3),
        Part(f"{microseconds(cpu, 2)} of processor time of a rank", cpu.median / 2 <= 60e-6),
    ]


def _many_ranks(results: Results) -> list[Part]:
    parts = []
    for nbytes, label, most in ((scaling.SMALL, "4 KB", 18), (scaling.LARGE, "4 MB", 32)):
        found = {ranks: results.get("mykv core", f"in place/{nbytes}", ranks=ranks) for ranks in (2, 16, 32)}
        if found[2] is None or found[32] is None:
            parts.append(Part(f"{label}: not measured"))
            continue
        for ranks, asked in ((16, None), (32, most)):
            if found[ranks]:
                ratio = found[ranks].median / found[2].median
                times = f"{milliseconds(found[ranks])} and {milliseconds(found[2])}"
                text = f"{label}: {ratio:.1f} times with {ranks} ranks ({times})"
                parts.append(Part(text, None if asked is None else ratio <= asked))
    for ranks in (16, 32):
        loops, two = (plain_loops(results, scaling.LARGE, size) for size in (ranks, 2))
        if loops and two:
            ratio = loops[1].median / two[1].median
            times = f"{milliseconds(loops[1])} and {milliseconds(two[1])}"
            parts.append(Part(f"plain loops over {ranks} arrays of 4 MB, without waiting: {ratio:.1f} times ({times})"))
        late, early = (results.get("limit", "barrier", ranks=size) for size in (ranks, 2))
        if late and early:
            times = f"{milliseconds(late)} and {milliseconds(early)}"
            text = f"a bare barrier of {ranks} processes that sleep: {late.median / early.median:.1f} times ({times})"
            parts.append(Part(text))
    return parts


def _cpu_of_ranks(results: Results) -> list[Part]:
    parts, series = [], "cpu of all ranks"
    two = results.get("mykv core", f"in a row/{4 * KB}", series)
    if two is None:
        return [Part("not measured")]
    for ranks in scaling.CPU_RANKS:
        found = results.get("mykv core", f"in a row/{4 * KB}", series, ranks)
        if found is None:
            parts.append(Part(f"{ranks} ranks: not measured"))
            continue
        ratio = found.median / ranks / (two.median / 2)
        bare = results.get("limit", "barrier", series, ranks)
        rest = f"; a bare barrier {microseconds(bare, ranks)}" if bare else ""
        text = f"{ranks} ranks: {microseconds(found, ranks)}, {ratio:.1f} times{rest}"
        parts.append(Part(text, ratio <= 1.5 if ranks > 2 else None))
    return parts


LINES = [
    Line(
        "pushpull-4KB",
        "pushpull of a 4 KB NDArray, call to wait_to_read",
        "ranks not bound: 20 times faster than Horovod as installed, 5 times faster than dist_sync, 2 times faster "
        "than Horovod with HOROVOD_CYCLE_TIME=0 and mpi_yield_when_idle=1",
        _small,
    ),
    Line(
        "pushpull-64MB",
        "pushpull of 64 MB, stock path (any NDArray)",
        "6.5 times faster than Horovod, 3 times faster than MPI_Allreduce of Open MPI; 60% of the memory's limit",
        _large,
    ),
    Line(
        "adopted-64MB",
        "64 MB of adopted gradients, DistributedTrainer",
        "8 times faster than Horovod; at least 80% of the speed of the same loads and stores without synchronization",
        _adopted,
    ),
    Line(
        "resnet50-stock",
        "ResNet-50's gradients, stock gluon.Trainer(update_on_kvstore=False).allreduce_grads",
        "7 times faster than Horovod's DistributedTrainer, 6 times faster than dist_sync",
        _model("resnet50", "stock", 7, 6),
    ),
    Line(
        "resnet50-own",
        "ResNet-50's gradients, DistributedTrainer.allreduce_grads",
        "10 times faster than Horovod's, 25 times faster than dist_sync",
        _model("resnet50", "own", 10, 25),
    ),
    Line(
        "further-array",
        "each further array of 4 KB in allreduce_grads",
        "stock Trainer at most 6 us, DistributedTrainer at most 0.9 us with 10,000 arrays",
        _further_array,
    ),
    Line("bert", "BERT-base-sized gradients (199 arrays, 109.5 M float32)", "the same ratios to each trainer", _bert),
    Line(
        "four-ranks",
        "4 ranks on 2 cores, ResNet-50's gradients and 4 KB",
        "4 times faster than Horovod as installed; no collapse",
        _four,
    ),
    Line(
        "after-a-pause",
        "4 KB in shared memory after 3 ms of pause, the core alone, 2 ranks",
        "at most 0.05 ms, and 60 us of processor time of a rank",
        _paused,
    ),
    Line(
        "many-ranks",
        "4 KB and 4 MB in shared memory, the core alone, 32 ranks on 2 cores against 2 ranks",
        "at most 18 times as long for 4 KB, and 32 times for 4 MB",
        _many_ranks,
    ),
    Line(
        "cpu-of-ranks",
        "processor time of a rank for one of many sums of 4 KB in shared memory, the core alone",
        "at most 1.5 times that of 2 ranks, with up to 64 ranks",
        _cpu_of_ranks,
    ),
    Line(
        "float16",
        "float16 gradients of ResNet-50, the same number of elements",
        "at least 1.6 times faster than float32",
        _float16,
    ),
    Line(
        "training-step",
        "one full training step of ResNet-18, 64 pixels, 8 images per worker",
        "within 10% of compute alone with the same two processes running",
        _training,
    ),
    Line(
        "waiting",
        "a rank that waits for a late one; an idle initialized process",
        "under 5% of a core; under 1%",
        _waiting,
    ),
    Line(
        "update-on-store",
        "step() of ResNet-18 (45 MB) with gradients ready and update_on_kvstore=True, 2 workers",
        "less time than one process that updates alone, with the stock Trainer at most 0.8 of it; at most 0.35 of "
        "Horovod's; states at most 0.55 of Horovod's",
        _update,
    ),
    Line(
        "python-time",
        "Python time in step() for 193 parameters, excluding MXNet's own optimizer call",
        "under 1 ms",
        _python,
    ),
    Line(
        "memory",
        "memory beyond the gradients themselves, DistributedTrainer, 2 ranks",
        "under 5% plus 64 MB a host",
        _memory,
    ),
]
