"""The measured cases, as dictionaries for the workers (workers/with_mxnet.py).

The id of a case is its name in results; the same id means the same work with every peer.
"""

from __future__ import annotations

from typing import Any, Dict

Case = Dict[str, Any]

KB, MB = 1024, 1024 * 1024

# The training of the targets: ResNet-18, 64 pixels, 8 images per worker.
_TRAINING = {"network": "resnet18_v1", "pixels": 64, "batch": 8}


def pushpull(nbytes: int) -> Case:
    """Pushpull of one array of float32, in place."""
    iterations = 100 if nbytes <= MB else 20 if nbytes <= 8 * MB else 8
    return {"id": f"pushpull/{nbytes}", "kind": "pushpull", "nbytes": nbytes, "iterations": iterations, "warmup": 3}


def gradients(model: str, flavour: str, dtype: str = "float32", iterations: int = 8) -> Case:
    """allreduce_grads() of the gradients of a model, by the 'stock' Trainer or the peer's 'own'."""
    name = f"gradients/{model}/{flavour}" + ("" if dtype == "float32" else f"/{dtype}")
    shared = {"model": model, "flavour": flavour, "dtype": dtype}
    return {"id": name, "kind": "gradients", **shared, "iterations": iterations, "warmup": 2}


def step(model: str, flavour: str) -> Case:
    """step() with gradients ready: allreduce and SGD with momentum."""
    return {**gradients(model, flavour), "id": f"step/{model}/{flavour}", "step": True}


def update(optimizer: str, flavour: str) -> Case:
    """step() of ResNet-18 with gradients ready, and the memory of the optimizer's states.

    The flavour 'store' updates on the store, each worker its share; with 'own' each worker updates everything.
    """
    name = f"update/resnet18/{optimizer}/{flavour}"
    shared = {"model": "resnet18", "optimizer": optimizer, "flavour": flavour}
    return {"id": name, "kind": "update", **shared, "step": True, "iterations": 16, "warmup": 3}


def training(flavour: str, iterations: int = 12) -> Case:
    """Whole training steps, compared with a network in the same process that trains alone."""
    name = f"training/{flavour}"
    return {"id": name, "kind": "training", "flavour": flavour, **_TRAINING, "iterations": iterations, "warmup": 3}


def stream(flavour: str) -> Case:
    """Training that rarely waits, compared with its compute and its communication alone."""
    name = f"stream/{flavour}"
    return {"id": name, "kind": "stream", "flavour": flavour, **_TRAINING, "steps": 6, "iterations": 3, "warmup": 1}


def breakdown(flavour: str) -> Case:
    """The parts of a training step."""
    name = f"breakdown/{flavour}"
    return {"id": name, "kind": "breakdown", "flavour": flavour, **_TRAINING, "iterations": 8, "warmup": 3}


def late() -> Case:
    """A rank that waits for a straggler."""
    return {"id": "late", "kind": "late", "seconds": 1.0, "iterations": 1}


def idle() -> Case:
    """An idle process."""
    return {"id": "idle", "kind": "idle", "seconds": 1.0, "iterations": 1}


def python_time(model: str, flavour: str) -> Case:
    """Python's time in step()."""
    name = f"python/{model}/{flavour}"
    return {"id": name, "kind": "python", "model": model, "flavour": flavour, "iterations": 20, "warmup": 3}


def memory(model: str, flavour: str) -> Case:
    """Memory of a process that has reduced the gradients of a model a few times; needs its own process."""
    return {"id": f"memory/{model}", "kind": "memory", "model": model, "flavour": flavour, "iterations": 3}


def in_place(nbytes: int) -> Case:
    """Allreduce of the core's memory, in place."""
    return {**pushpull(nbytes), "id": f"in place/{nbytes}", "kind": "in place"}


def paused(nbytes: int) -> Case:
    """Allreduce of the core's memory after a pause of 3 ms, and its processor time."""
    shared = {"nbytes": nbytes, "pause": 0.003, "iterations": 100, "warmup": 5}
    return {"id": f"after a pause/{nbytes}", "kind": "paused", **shared}


def back_to_back(nbytes: int, iterations: int = 400) -> Case:
    """Processor time of a rank per allreduce, for many consecutive allreduces of the core's memory."""
    return {"id": f"in a row/{nbytes}", "kind": "in a row", "nbytes": nbytes, "iterations": iterations, "warmup": 20}


def barrier() -> Case:
    """The bare sleeps and wake-ups of a small allreduce: the last process wakes the others by one futex."""
    return {"id": "barrier", "kind": "barrier", "nbytes": 0, "iterations": 60, "warmup": 5}


def compressed(nbytes: int, wire: str) -> Case:
    """Allreduce of the core's memory, sent between hosts in the form `wire`; empty: unchanged."""
    name = f"compressed/{nbytes}/{wire.split()[0] if wire else 'none'}"
    return {"id": name, "kind": "compressed", "nbytes": nbytes, "wire": wire, "iterations": 2, "warmup": 1}


def limit(nbytes: int) -> Case:
    """The same loads and stores without synchronization."""
    return {"id": f"limit/{nbytes}", "kind": "limit", "nbytes": nbytes, "iterations": 8, "warmup": 2}


def shortened(cases: list[Case], iterations: int) -> list[Case]:
    """The same cases with at most this number of iterations."""
    return [{**case, "iterations": min(case["iterations"], iterations)} for case in cases]
