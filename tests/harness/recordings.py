"""Writes files of timelines as the core does, with chosen operations; times in milliseconds."""

from __future__ import annotations

import json
import struct

_REQUEST, _AWAKE, _DROPPED = 1, 2, 3
_ZERO = 10**9  # the clock at the file's origin, in nanoseconds


def recording(records=(), rank=0, size=2, job="one", zero=1000, hosts=None) -> bytes:
    """The file of a rank, whose times count from `zero`."""
    about = {"mykv": "1.2.3", "host": f"h{rank}", "rank": rank, "size": size, "job": job, "zero_ns": _ZERO}
    about["unix_time_at_zero_ns"] = round(zero * 1e6)
    about["host_ranks"] = hosts or [list(range(size))]
    return json.dumps(about).encode() + b"\n" + b"".join(records)


def operation(
    name,
    begin,
    end,
    turn=0,
    order=(),
    late=(),
    hosts=(),
    wait=0,
    signature="allreduce sum of float32 (25,)",
    size=100,
    error="",
) -> bytes:
    """An operation of one part, which waits for `wait` milliseconds.

    `order`, `late`: the ranks that arrive, and when after `begin`. `hosts`: the same of hosts, as pairs.
    """
    arrivals = [struct.pack("<qq", rank, _ns(begin + after)) for rank, after in [*zip(order, late), *hosts]]
    waiting = (_ns(begin), _ns(begin + wait)) if wait else (0, 0)
    part = struct.pack("<IIII16q", 0, 0, len(order), len(hosts), 0, 0, *waiting, *[0] * 12)
    texts = [text.encode() for text in (name, signature, error)]
    fields = (_ns(begin), _ns(end), size, turn, 0, 1, 1, len(arrivals), len(texts[0]), len(texts[1]))
    return _record(_REQUEST, struct.pack("<qqQQiIIIII", *fields), part, *arrivals, *texts)


def awake(thread, begin, end) -> bytes:
    """A time in which a thread was awake."""
    return _record(_AWAKE, struct.pack("<qq", _ns(begin), _ns(end)), thread.encode())


def dropped(time, count) -> bytes:
    """A note that operations were left out."""
    return _record(_DROPPED, struct.pack("<qQ", _ns(time), count))


def _ns(milliseconds) -> int:
    return _ZERO + round(milliseconds * 1e6)


def _record(kind, *pieces) -> bytes:
    content = b"".join(pieces)
    return struct.pack("<II", kind, 8 + len(content)) + content
