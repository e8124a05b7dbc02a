"""Every parser in Python of what users and other processes have written, as a function of bytes.

What is malformed must be refused with the error that is caught here; any other one is a defect.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import sys
from typing import Any, Callable, Iterator

import kvstore_plugin  # noqa: F401
import mxnet as mx
import numpy as np
from compiled import testing
from kvstore_plugin.collectives import gradient_compression
from kvstore_plugin.sharded_optimizer import state_file
from kvstore_plugin.timeline import joined, page, recording, trace
from kvstore_plugin.world import launch_checks as launch
from kvstore_plugin.world import settings

from mykvrun import hosts
from mykvrun.errors import LaunchError

# What Python's audit hooks report when MXNet reads the bytes of an array; anything else is an effect outside.
_HARMLESS = {"ctypes.dlsym", "ctypes.cdata", "ctypes.cdata/buffer", "builtins.id", "object.__getattr__"}
_effects: list[str] | None = None


def _hook(event: str, arguments: tuple) -> None:
    if _effects is not None and event not in _HARMLESS:
        _effects.append(f"{event}{arguments}"[:200])


@contextlib.contextmanager
def without_effects() -> Iterator[None]:
    """Fail if what runs in this block opens files or libraries, imports modules, or calls what Python audits."""
    global _effects
    if not _hooked:
        _hooked.append(True)
        codecs.lookup("raw_unicode_escape")  # the reader of old pickles needs it, and Python imports it once
        sys.addaudithook(_hook)  # cannot be removed again
    _effects = found = []
    try:
        yield
    finally:
        _effects = None
        assert not found, found


_hooked: list[bool] = []


def states(data: bytes) -> None:
    """A file of optimizer states. What was read holds arrays that can be read; nothing outside was called."""
    with contextlib.suppress(ValueError):
        with without_effects():
            content = state_file.parse(data, "file")
        for state in content.states.values():
            _read(state)


def _read(state: Any) -> None:
    if isinstance(state, (tuple, list)):
        for one in state:
            _read(one)
    elif isinstance(state, mx.nd.NDArray):
        with mx.util.np_shape(True):
            assert state.size == np.prod(state.shape, dtype=np.int64) == state.asnumpy().size


_SETTINGS = (
    "MYKV_PART_BYTES",
    "MYKV_VIRTUAL_HOSTS",
    "MYKV_EXIT_WAIT_S",
    "MYKV_STALL_WARN_S",
    "MYKV_CHECKPOINT_WAIT_S",
)


def setting(data: bytes) -> None:
    """An environment variable. The first byte says which one."""
    variable = _SETTINGS[data[0] % len(_SETTINGS)] if data else _SETTINGS[0]
    text = os.fsdecode(data[1:].replace(b"\0", b""))
    before = os.environ.get(variable)
    os.environ[variable] = text  # not by mock.patch.dict, which copies all variables and is 20 times slower
    try:
        made = settings._parsed(variable)  # value() would give what init() has read
    except ValueError:
        return
    finally:
        os.environ.pop(variable)
        if before is not None:
            os.environ[variable] = before
    assert 0 <= made < 2**63  # what the core takes


def launcher(data: bytes) -> None:
    """What MPI and a launcher say: no text of theirs is an error."""
    text = os.fsdecode(data.replace(b"\0", b""))
    launch.parse_version(text)
    words = text.split("\n")
    names = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    launched = launch.launched_processes(dict(zip(names, words)))
    assert launched is None or launched[1] >= 0


def compression(data: bytes) -> None:
    """Compression parameters, which come as JSON here. What is accepted the core can make."""
    try:
        params = json.loads(data)
    except (ValueError, RecursionError):
        return  # no concern of ours
    with contextlib.suppress(TypeError, ValueError):
        wire = gradient_compression.gradient_compression(params).wire
        if wire not in ("", "float16", "bfloat16"):
            assert testing.Compressor(wire).text == wire


def hostfile(data: bytes) -> None:
    """A hostfile of `mykvrun --hostfile` or of run_elastic(grow_to=, hostfile=)."""
    with contextlib.suppress(LaunchError):
        found = hosts.parse_hostfile(data, "file")
        assert found and all(one.name and 0 < one.slots < 10**6 for one in found)


def timeline(data: bytes) -> None:
    """A file for `python -m kvstore_plugin.timeline`. If it is accepted, a page and a trace are made of it."""
    with contextlib.suppress(recording.TimelineError):
        with without_effects():
            one = recording.parse(data, "file")
        shifts = joined.clock_shifts([one])
        json.dumps(trace.trace([one], shifts))
        page.page([one], shifts)


PARSERS: dict[str, Callable[[bytes], None]] = {
    "compression": compression,
    "hostfile": hostfile,
    "launcher": launcher,
    "settings": setting,
    "states": states,
    "timeline": timeline,
}
