"""Add the first inputs of each parser to its corpus, from which fuzzing goes on: what a right input looks like."""

from __future__ import annotations

import json
import pickle
import struct
import sys
from pathlib import Path

import kvstore_plugin  # noqa: F401
import mxnet as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz import corpus
from harness import recordings


def news(kind: int, flags: int, *texts: str, number: int = 1) -> bytes:
    data = struct.pack("<BBQ", kind, flags, number)
    data += b"" if kind == 3 else struct.pack("<QQ", 1, 2)
    data += struct.pack("<i", -3) if kind == 1 else b""
    return data + b"".join(struct.pack("<H", len(text)) + text.encode() for text in texts)


def states(dump: bool, protocol: int, name: str = "adam") -> bytes:
    optimizer = mx.optimizer.create(name, lr_scheduler=mx.lr_scheduler.FactorScheduler(3))
    optimizer.extra = {"number": np.float32(3), "array": np.arange(3.0), "set": {1}, "class": np.int64}
    updater = mx.optimizer.get_updater(optimizer)
    updater(0, mx.nd.ones((2,)), mx.nd.ones((2,)))
    return pickle.dumps((updater.states, optimizer) if dump else updater.states, protocol)


# Names of which the way there has an effect: a library is loaded, a module is imported, a property runs.
NAMES_WITH_EFFECTS = (
    ("ctypes", "cdll./tmp/no-such-library.so"),
    ("ctypes", "pydll./tmp/no-such-library.so"),
    ("ctypes", "cdll.LoadLibrary"),
    ("concurrent.futures", "ProcessPoolExecutor"),
    ("numpy", "testing.Tester"),
    ("mxnet", "optimizer.Adam.__init__"),
    ("mxnet.base", "_LIB.no_such_function"),
    ("this", "s"),
    ("os", "system"),
    ("builtins", "eval"),
)


def named(module: str, name: str, protocol: int) -> bytes:
    """A pickle that names an object, and calls it."""
    if protocol < 4:
        return f"c{module}\n{name}\n(tR.".encode()
    texts = [text.encode() for text in (module, name)]
    return b"\x80\x04" + b"".join(b"\x8c" + bytes([len(text)]) + text for text in texts) + b"\x93)R."


def timeline() -> bytes:
    """The file of a rank with two operations."""
    waits = recordings.operation("x", 1.5, 4.75, order=[1, 0], late=[0, 2.5], hosts=[(0, 0)], wait=2.0)
    fails = recordings.operation("y", 5, 6, turn=1, error="lost")
    return recordings.recording([waits, fails, recordings.awake("thread", 0, 7), recordings.dropped(7, 3)])


def seeds() -> dict[str, list[bytes]]:
    numbers = [[5], [5, 1, 2], [5, 1, 2, 3, 4], [5, 0], [5, 1, 3, 0], [5, 2, 0, 1, 1, 6, 1, 2], [5, 1, 2, 1, 3, 1, 4]]
    packed = [struct.pack(f"<{len(some)}Q", *some) for some in numbers]
    compressors = [
        "2bit threshold=0.5",
        "1bit threshold=1e-3 ef=False",
        "onebit scaling=False",
        "topk k=0.01",
        "topk k=7",
    ]
    compressors += [
        "randomk k=3 seed=4",
        "dithering k=7 normalize=l2",
        "dithering partition=natural k=32 ef=True seed=1",
    ]
    values = np.arange(-4, 4, dtype="float32").tobytes()
    return {
        "news": [
            news(1, 0),
            news(1, 1, "name", "float32 (3,)") + news(2, 0, number=9),
            news(1, 16) + struct.pack("<iq", 3, 14_000_000),
            news(3, 2, "it has ended") + news(4, 2, "why") + news(5, 2, "why") + news(6, 0),
        ],
        "question": packed,
        "answer": packed,
        "call": [b"", b"secret", b"secret" + bytes(range(10)), b"secret" + bytes(range(11)), bytes(16)],
        "compressor": [
            f"{text}\n".encode() + bytes([n % 2, 9, 0, n, 0]) + values for n, text in enumerate(compressors)
        ],
        "compressed": [bytes([choice * 4 + low, 9, 1, 0]) + values for choice in range(15) for low in (1, 3)],
        "compression": [
            json.dumps(one).encode()
            for one in (
                {"type": "2bit", "threshold": 0.5},
                {"compressor": "topk", "k": 0.01, "ef": "vanilla"},
                {"type": "dithering", "partition": "natural", "k": 3, "normalize": "l2", "seed": 7},
                {"type": "2bit", "threshold": 10**400},
                {"type": "fp16"},
            )
        ],
        "hostfile": [
            b"# nodes\nnode1 slots=4\nnode2:2\n[::1]\n",
            b"node1 slots = 4 max-slots=8\r\n",
            b"node1\nnode1\n",
            "k\u00f6ln slots=2".encode(),
            b"-x slots=2",
        ],
        "launcher": [b"Open MPI v5.0.11", b"2\n3\n0\n4\n1", b"x\n3\n0\n4\n1", "²\n³".encode()],
        "settings": [
            bytes([which]) + text.encode()
            for which in range(5)
            for text in ("4096", "1.5", "-1", "1e999", "9" * 30, "9" * 400, "nan", "²")
        ],
        "states": [states(dump, protocol) for dump in (False, True) for protocol in (0, 2, 4, 5)]
        + [states(False, 4, "sgd")]
        + [named(*one, protocol) for one in NAMES_WITH_EFFECTS for protocol in (2, 4)],
        "timeline": [
            timeline(),
            b"[]",
            b'{"traceEvents": []}',
            timeline()[:-5],
            timeline().replace(b'"rank": 0', b'"rank": 1' + b"0" * 400),
            recordings.recording([b"\1\0\0\0\xff\0\0\0" + b"\xff" * 247]),
        ],
    }


if __name__ == "__main__":
    for parser, inputs in seeds().items():
        print(f"{parser}: {corpus.add(parser, inputs)} new of {len(inputs)} inputs")
