"""A model of an allreduce between hosts, for numbers of hosts that cannot be measured: ``python -m benchmarks.model``.

An operation of B bytes on h hosts of r ranks, over links of b bytes/s each way:

- agreement: announcements go up a tree of hosts and verdicts come down (csrc/agreement/host_tree.h); a host has at most
  16 children, so the busiest rank handles at most 34 messages, at m seconds each, and there are two messages in a row
  for each level, each l seconds on its way;
- an operation of up to 16 KiB (`carried`) travels with these messages;
- exchange: the hosts' slices cross each link 2 (h - 1) / h times, in two messages in a row, and in four from 65 hosts
  on, which exchange in a grid (csrc/transport/mpi/slice_exchange.h). For each of its chunks (slice_exchange.cpp) a rank
  sends and receives a message to and from each host of its row and of its column, both for values and for results, or
  as many as the bytes need at 60 KiB each.

l and m come from measurements with 2 to 8 hosts (docs/benchmarks-hosts.md), by least squares.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .cases import KB, MB
from .environments import HOME
from .results import Results

_MESSAGE = 60 * KB
_CHUNK, _LEAST_COLUMN, _LEAST_BETWEEN_ROWS = 1 * MB, 16 * KB, 1 * KB
_FAN_OUT = 16
_MOST_IN_A_ROW = 64
_CARRIED, _ALL_CARRIED = 16 * KB, 32 * KB
_HEADERS = 1448 / 1514  # payload of an Ethernet frame of 1514 bytes with TCP and its timestamps


@dataclass(frozen=True)
class Network:
    """One kind of network and host.

    Attributes
    ----------
    latency : float
        Seconds from a rank's decision to send a small message until the other rank has it.
    message : float
        Seconds of a rank's thread per message sent or received.
    bandwidth : float
        Bytes per second of a host's link, each way.
    """

    latency: float
    message: float
    bandwidth: float


def grid(hosts: int) -> tuple[int, int]:
    """Rows and columns in which the hosts exchange."""
    if hosts <= _MOST_IN_A_ROW:
        return 1, hosts
    square = round(math.sqrt(hosts))
    near = [square + sign * off for off in range(square // 3 + 1) for sign in (-1, 1)]
    rows = next((rows for rows in near if hosts % rows == 0), square)
    return rows, math.ceil(hosts / rows)


def messages(hosts: int, ranks: int, nbytes: float) -> float:
    """Messages with values that a rank sends and receives."""
    rows, columns = grid(hosts)
    piece = nbytes / ranks
    chunks = math.ceil(piece / max(_CHUNK, _LEAST_COLUMN * columns, _LEAST_BETWEEN_ROWS * rows * columns))
    in_row = math.ceil(piece / chunks / columns / _MESSAGE)
    across = math.ceil(piece / chunks / columns / rows / _MESSAGE)
    return 4.0 * chunks * ((columns - 1) * in_row + (rows - 1) * across)


def agreement(hosts: int) -> tuple[float, float]:
    """How many messages in a row, and how many at the busiest rank, it takes until all hosts know of an operation."""
    levels, covered = 0, 1
    while covered < hosts:
        levels += 1
        covered += _FAN_OUT**levels
    return 2.0 * levels, 2.0 * min(hosts - 1, _FAN_OUT + 1)


def carried(hosts: int, nbytes: float) -> bool:
    """Whether the agreement's messages carry an operation."""
    return nbytes <= min(_CARRIED, _ALL_CARRIED / min(hosts - 1, _FAN_OUT))


def coefficients(hosts: int, ranks: int, nbytes: float) -> tuple[float, float, float]:
    """The cost of an allreduce: consecutive latencies, messages of the busiest rank, and bytes that cross each link."""
    in_a_row, handled = agreement(hosts)
    if carried(hosts, nbytes):
        return in_a_row, handled, nbytes * min(hosts - 1, _FAN_OUT)
    in_a_row += 2 if grid(hosts)[0] == 1 else 4
    return in_a_row, handled + messages(hosts, ranks, nbytes), 2.0 * nbytes * (hosts - 1) / hosts


def seconds(network: Network, hosts: int, ranks: int, nbytes: float) -> float:
    """Seconds of one allreduce: the wire, or the ranks' threads if they are slower, plus the latencies."""
    latencies, handled, crossing = coefficients(hosts, ranks, nbytes)
    wire = crossing / (network.bandwidth * _HEADERS)
    return latencies * network.latency + max(wire, handled * network.message)


def fitted(results: Results) -> Network:
    """A network whose latency and message cost are fitted to small allreduces on 2, 4 and 8 hosts."""
    rows, times = [], []
    for hosts in (2, 4, 8):
        found = results.get("mykv core", f"pushpull/{4 * KB}", "time", f"{hosts}x1")
        if found:
            latencies, handled, _ = coefficients(hosts, 1, 4 * KB)
            rows.append([latencies, handled])
            times.append(found.median)
    if len(rows) < 2:
        raise SystemExit("The model needs the section 'agreement' of make bench-hosts.")
    # Minimizes relative errors.
    weighted = np.array(rows) / np.array(times)[:, None]
    latency, message = (float(one) for one in np.linalg.lstsq(weighted, np.ones(len(times)), rcond=None)[0])
    if latency < 0:  # the best fit without a latency
        latency, message = 0.0, float(weighted[:, 1].sum() / (weighted[:, 1] ** 2).sum())
    return Network(latency, message, 1e9 / 8)


def main() -> None:
    """Print the fit, its errors, and the tables of docs/scaling.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HOME / "hosts.json")
    given = parser.parse_args()
    results = Results.load(given.results)
    here = fitted(results)
    print(f"latency {1e6 * here.latency:.0f} us, message {1e6 * here.message:.1f} us")
    print("\n| hosts | bytes | measured | model | off by |\n| --- | --- | --- | --- | --- |")
    for hosts in (2, 4, 8):
        for case, nbytes in ((f"pushpull/{4 * KB}", 4 * KB), (f"in place/{16 * MB}", 16 * MB)):
            found = results.get("mykv core", case, "time", f"{hosts}x1")
            if found:
                modelled = seconds(here, hosts, 1, nbytes)
                off = modelled / found.median - 1
                print(f"| {hosts} | {nbytes} | {1e3 * found.median:.3g} ms | {1e3 * modelled:.3g} ms | {off:+.0%} |")
    print("\n| hosts | 1 Gbit/s | 10 Gbit/s | 100 Gbit/s |\n| --- | --- | --- | --- |")
    for hosts in (64, 256, 1024, 4096):
        cells = []
        for rate in (1e9, 1e10, 1e11):
            fast = Network(here.latency, here.message, rate / 8)
            step, wire = seconds(fast, hosts, 8, 102 * MB), 2 * 102 * MB * 8 / rate
            cells.append(f"{1e3 * step:.0f} ms ({step / wire:.1f})")
        print(f"| {hosts} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
