"""Estimates the cost of training on several hosts: ``python -m benchmarks.estimate --model resnet50 --hosts 4``.

The time on the network is that of benchmarks/model.py; the rest comes from docs/benchmarks.md and
docs/benchmarks-hosts.md. docs/cost.md explains the numbers, and tests compare the model with these pages.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from dataclasses import dataclass, replace
from typing import Any

from . import model

# Fitted by benchmarks/model.py to 4 KB on 2, 4 and 8 hosts that share two cores, where messages cost most.
LATENCY, MESSAGE = 0.0, 46e-6
# Share of the bytes that is sent between hosts. Top-k takes longer than its bytes, since it must find the elements.
COMPRESSION = {"none": 1.0, "fp16": 1 / 2, "bf16": 1 / 2, "2bit": 1 / 16}
# Sums in shared memory: seconds per byte and rank, between those of BERT-base on 2 and ResNet-50 on 4 ranks.
IN_MEMORY = 42.4e-12
# Memory of mykv on a host beyond the gradients: 30 to 48 MB, as much for ResNet-50 as for BERT-base.
OWN_MEMORY = 40e6
# A waiting rank's share of a core, with several hosts.
WAITING = 0.0146
# The largest errors of this model compared with the two pages; tests/project/test_estimate.py checks them.
ERRORS = {
    "sums of 16 and 64 MB on 2 to 8 hosts": 0.09,
    "sums of 4 KB": 0.28,
    "steps of ResNet-18 on 2 hosts": 0.10,
    "sums in shared memory": 0.06,
}


@dataclass(frozen=True)
class Job:
    """A training job and its hosts.

    Attributes
    ----------
    nbytes : int
        Bytes of the gradients of a worker.
    forward, backward : float
        Seconds of a worker's batch.
    hosts, workers : int
        Hosts, and workers on each.
    link : float
        Bits per second of a host's link, each way.
    compression : str
        A key of `COMPRESSION`.
    states : int
        Arrays of the optimizer for each weight: 1 for SGD with momentum, 2 for Adam.
    message : float
        Seconds of a rank's thread for each message that it sends or receives.
    """

    nbytes: int
    forward: float
    backward: float
    hosts: int
    workers: int = 1
    link: float = 1e10
    compression: str = "none"
    states: int = 1
    message: float = MESSAGE


@dataclass(frozen=True)
class Cost:
    """Seconds and bytes of a step: of a worker, and what crosses a host's link each way."""

    communication: float
    step: float
    not_hidden: float
    memory: float
    crossing: float
    waiting: float  # seconds of a core


def cost(job: Job) -> Cost:
    """The modelled cost of a job's step.

    Sending begins when backward has written the first gradients, and the next forward pass begins with the first
    weights: so backward hides communication, forward does not.
    """
    sent = job.nbytes * COMPRESSION[job.compression]
    communication = IN_MEMORY * job.nbytes * job.workers if job.workers > 1 else 0.0
    crossing = 0.0
    if job.hosts > 1:
        network = model.Network(LATENCY, job.message, job.link / 8)
        communication += model.seconds(network, job.hosts, job.workers, sent)
        crossing = model.coefficients(job.hosts, job.workers, sent)[2]
    compute = job.forward + job.backward
    step = max(compute, job.forward + communication)
    # Error feedback keeps one array for each host. A host's workers share this array and mykv's own memory.
    shared = OWN_MEMORY + (job.nbytes if job.compression == "2bit" and job.hosts > 1 else 0)
    memory = job.nbytes * (2 + job.states) + shared / job.workers
    return Cost(communication, step, step - compute, memory, crossing, WAITING * (step - compute))


def bits(text: str) -> float:
    """Bits per second of a text such as '10gbit' or '200mbit'."""
    found = re.fullmatch(r"([\d.]+)(g|m)bit", text.lower())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate: write 10gbit or 200mbit.")
    return float(found[1]) * {"g": 1e9, "m": 1e6}[found[2]]


def network_of(name: str) -> tuple[Any, int]:
    """A network of gluon.model_zoo.vision with known shapes, and its image size; the name may lack the ending _v1."""
    import mxnet as mx
    from mxnet.gluon.model_zoo import vision

    try:
        net = vision.get_model(name)
    except ValueError:
        net = vision.get_model(f"{name}_v1")
    net.initialize()
    pixels = 299 if "inception" in name else 224
    net.infer_shape(mx.nd.zeros((1, 3, pixels, pixels)))
    return net, pixels


def nbytes_of(net: Any) -> int:
    """Bytes of the gradients of a network, in float32."""
    return sum(4 * math.prod(one.shape) for one in net.collect_params().values() if one.grad_req != "null")


def measured(net: Any, batch: int, pixels: int, rounds: int = 2) -> tuple[float, float]:
    """Seconds of forward and of backward of a batch in this process, the fastest of some rounds."""
    import mxnet as mx
    from mxnet import autograd

    net.hybridize()
    images = mx.nd.random.uniform(shape=(batch, 3, pixels, pixels))
    times = []
    for _ in range(rounds + 1):
        mx.nd.waitall()
        begin = time.perf_counter()
        with autograd.record():
            scores = net(images)
        mx.nd.waitall()
        middle = time.perf_counter()
        scores.backward()
        mx.nd.waitall()
        times.append((middle - begin, time.perf_counter() - middle))
    return min(one for one, _ in times[1:]), min(one for _, one in times[1:])


def report(job: Job) -> str:
    """The lines that the program prints for a job."""
    whole = cost(job)
    fast = cost(replace(job, message=0.0))
    ms = [f"{1e3 * one:.1f} ms" for one in (whole.communication, whole.not_hidden, whole.step)]
    ms_fast = [f"{1e3 * one:.1f} ms" for one in (fast.communication, fast.not_hidden, fast.step)]
    share = (job.forward + job.backward) / whole.step
    rows = {
        "job": f"{job.hosts} hosts of {job.workers} workers, compression {job.compression}",
        "gradients": f"{job.nbytes / 1e6:.1f} MB",
        "forward, backward": f"{1e3 * job.forward:.1f} ms, {1e3 * job.backward:.1f} ms",
        "communication": f"{ms[0]} ({ms_fast[0]} if messages cost no time)",
        "not hidden": f"{ms[1]} ({ms_fast[1]})",
        "step": f"{ms[2]} ({ms_fast[2]}), of which forward and backward are {share:.0%}",
        "memory per worker": f"{whole.memory / 1e6:.0f} MB without activations: {_memory(job)}",
        "bytes per host": f"{whole.crossing / 1e6:.1f} MB in a step, each way",
        "processor, waiting": f"{1e3 * whole.waiting:.2f} ms of a core in a step",
        "off by at most": "; ".join(f"{most:.0%} in {what}" for what, most in ERRORS.items()),
    }
    return "\n".join(f"{name:<20}{text}" for name, text in rows.items())


def _memory(job: Job) -> str:
    return f"weights, gradients, {job.states} of the optimizer, mykv's own"


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="a name of gluon.model_zoo.vision, such as resnet50 or mobilenet1.0")
    what.add_argument("--parameters", type=float, help="number of trained parameters, such as 110e6")
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--workers-per-host", type=int, default=1)
    parser.add_argument("--link", type=bits, default=1e10, help="rate of a host's link: 10gbit (default), 200mbit")
    parser.add_argument("--compression", choices=COMPRESSION, default="none")
    parser.add_argument("--states", type=int, default=1, help="1: SGD with momentum (default), 2: Adam")
    parser.add_argument("--batch-time", type=float, help="ms of forward and backward; a third of it counts as forward")
    parser.add_argument("--forward", type=float, help="ms; with --backward in place of --batch-time")
    parser.add_argument("--backward", type=float, help="ms")
    parser.add_argument("--batch-size", type=int, default=8, help="of what is measured here without a given time")
    parser.add_argument("--message", type=float, default=1e6 * MESSAGE, help="microseconds (default: %(default)g)")
    given = parser.parse_args()
    if (given.forward is None) != (given.backward is None):
        parser.error("--forward and --backward belong together.")
    if given.parameters and given.batch_time is None and given.forward is None:
        parser.error("--parameters needs --batch-time, or --forward and --backward: there is no network to measure.")
    if min(given.hosts, given.workers_per_host) < 1:
        parser.error("--hosts and --workers-per-host count from 1.")
    return given


def _job(given: argparse.Namespace) -> Job:
    net, pixels = network_of(given.model) if given.model else (None, 0)
    if given.batch_time is not None:
        forward, backward = given.batch_time / 3e3, given.batch_time / 1.5e3
    elif given.forward is not None:
        forward, backward = given.forward / 1e3, given.backward / 1e3
    else:
        forward, backward = measured(net, given.batch_size, pixels)
    return Job(
        nbytes=nbytes_of(net) if net else int(4 * given.parameters),
        forward=forward,
        backward=backward,
        hosts=given.hosts,
        workers=given.workers_per_host,
        link=given.link,
        compression=given.compression,
        states=given.states,
        message=given.message / 1e6,
    )


def main() -> None:
    """Print the cost of a step."""
    print(report(_job(_parsed())))


if __name__ == "__main__":
    main()
