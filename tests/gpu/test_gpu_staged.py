"""Arrays on GPUs that go through host memory (MYKV_GPU=host), on a stand-in for CUDA (gpu_support.py).

What comes out is compared bit for bit with what the same operations on numpy arrays give, and in the end nothing may
have been done that a real machine would punish.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time

import numpy as np
import pytest
from harness import dtypes
from harness.marks import needs_standin
from standin import gpu_support
from standin.gpu_support import Cuda, CudaError, DeviceArray

_DEVICES = 3
_FRESH_DEVICE = _DEVICES  # of one test alone
_ENV = {"MYKV_TEST_POOL": "staged", **gpu_support.environment(devices=_DEVICES + 1, delay_us=60)}
_PART, _STAGING = 16 << 10, 64 << 10  # bytes
_LARGE = 3 * _STAGING
_OPS = ["sum", "min", "max", "product"]
_OUT_OF_MEMORY, _LOST = 2, 719
_TEXTS = {_OUT_OF_MEMORY: "cudaErrorMemoryAllocation", _LOST: "cudaErrorLaunchFailure"}
_PATIENCE_S = 20

_one_and_two = pytest.mark.parametrize("hosts", [1, 2])


@pytest.fixture(scope="module")
def cuda():
    """The stand-in, as the core has loaded it."""
    return Cuda()


def _start(hosts: int, **options) -> None:
    from compiled import core
    from mpi4py import MPI

    core.find_gpus([gpu_support.cuda_library()], [gpu_support.nccl_library()])
    given = {"gpu": "host", "virtual_hosts": hosts, "part_bytes": _PART, "staging_bytes": _STAGING, **options}
    core.init(MPI.COMM_WORLD.py2f(), given)


@pytest.fixture
def hosts() -> int:
    """Number of hosts; a parameter of some tests."""
    return 1


@pytest.fixture
def core(hosts, gather, cuda):
    """The core over so many hosts, made for this test."""
    from compiled import core

    before, registered = cuda.violations(), cuda.standin_registered()
    _start(hosts)
    yield core
    gather("no rank asks for anything more")
    if core.is_initialized():
        core.shutdown()
    assert cuda.violations() == before
    assert cuda.standin_calls("cudaDeviceSynchronize") == 0
    assert cuda.standin_calls("cudaStreamSynchronize") == 0
    assert cuda.standin_registered() == registered
    assert "mxnet" not in sys.modules


@pytest.fixture
def on_gpu(cuda):
    """``on_gpu(values, device=0)``: a DeviceArray that is freed at the end of the test."""
    made = []

    def make(values, device=0):
        made.append(DeviceArray(values, device, cuda))
        return made[-1]

    yield make
    for array in made:
        with contextlib.suppress(CudaError):  # of a device that was lost
            array.free()


def _whole(arrays) -> list[tuple[int, int]]:
    return [(array.pointer, array.device) for array in arrays]


def _submit(core, name, kind, shape, dtype="float32", *, inputs=(), outputs=(), **options):
    """Start an operation on whole arrays, or on the pieces that `options` names."""
    memory = {"inputs": _whole(inputs), "outputs": _whole(outputs)}
    for key in ("sources", "targets", "shards", "streams"):
        if key in options:
            memory[key] = options.pop(key)
    return core.submit_on_gpu(name, kind, str(dtype), list(shape), memory, **options)


def _values(rng, shape, dtype: str) -> np.ndarray:
    if dtype == "bool":
        return rng.rand(*shape) < 0.5
    if dtype.startswith("float"):
        return rng.uniform(-2, 2, shape).astype(dtype)
    return rng.randint(0, 120, shape).astype(dtype)


def _done(works) -> None:
    for work in works:
        assert work.wait(_PATIENCE_S), "an operation hangs"


def _same(array: DeviceArray, expected: np.ndarray) -> None:
    assert array.numpy().tobytes() == np.ascontiguousarray(expected).tobytes()


def _works(core, on_gpu, size: int, name: str) -> None:
    """Assert that all ranks can still reduce together."""
    array = on_gpu(np.ones(10))
    _done([_submit(core, name, "allreduce", (10,), "float64", inputs=[array], outputs=[array])])
    _same(array, np.full(10, float(size)))


@dataclasses.dataclass
class _Step:
    """One operation of a random program, the same on all ranks but for its arrays' number and places."""

    name: str
    kind: str
    dtype: str
    shape: tuple
    op: str
    scale: float
    root: int
    priority: int


def _program(seed: int, size: int, steps: int) -> list[_Step]:
    rng = np.random.RandomState(seed)
    program = []
    for number in range(steps):
        dtype = dtypes.NUMPY[rng.randint(len(dtypes.NUMPY))]
        itemsize = np.dtype(dtype).itemsize
        longest = [0, 1, 7, 1001, _PART // itemsize, _PART // itemsize + 1, _LARGE // itemsize + 3]
        count = longest[rng.randint(len(longest))]
        program.append(
            _Step(
                f"step {number} of {seed}",
                ["allreduce", "allreduce", "broadcast", "reduce"][rng.randint(4)],
                dtype,
                [(count,), (1, count)][rng.randint(2)],
                _OPS[rng.randint(4)],
                [1.0, 1 / size, 0.3][rng.randint(3)],
                int(rng.randint(size)),
                int(rng.randint(-1, 2)),
            )
        )
    return program


def _reference(core, step: _Step, inputs: list[np.ndarray]) -> np.ndarray:
    """What the same operation gives on numpy arrays."""
    result = np.empty(step.shape, step.dtype)
    if step.kind == "broadcast":
        work = core.submit_broadcast(step.name + " on CPU", inputs[0] if inputs else None, [result], step.root)
    else:
        work = core.submit_allreduce(step.name + " on CPU", inputs, [result], step.op, step.scale)
    assert work.wait(_PATIENCE_S)
    return result


@pytest.mark.ranks(3, long=(1, 2, 4), env=_ENV)
@_one_and_two
def test_random_programs_give_the_bits_of_the_cpu(core, rank, size, hosts, on_gpu):
    """Operations of all kinds at once, each rank with arrays on other devices and in another order of calls."""
    if size < hosts:
        return
    mine = np.random.RandomState(1000 + rank)
    running = []
    for step in _program(17 * size + hosts, size, 25):
        root = step.root == rank
        several = mine.randint(1, 4) if step.kind != "broadcast" else int(root or mine.randint(2))
        inputs = [_values(mine, step.shape, step.dtype) for _ in range(several)]
        arrays = [on_gpu(values, mine.randint(_DEVICES)) for values in inputs]
        outputs = [on_gpu(np.zeros(step.shape, step.dtype), mine.randint(_DEVICES)) for _ in range(mine.randint(1, 3))]
        if arrays and mine.randint(2):
            outputs[0] = arrays[-1]  # in place
        if step.kind == "reduce" and not root:
            outputs = []
        running.append((step, inputs, arrays, outputs))
    works = []
    for number in np.random.RandomState(rank).permutation(len(running)):
        step, _, arrays, outputs = running[number]
        options = {"root": step.root, "priority": step.priority}
        if step.kind != "broadcast":
            options.update(op=step.op, scale=step.scale)
        works.append(
            _submit(core, step.name, step.kind, step.shape, step.dtype, inputs=arrays, outputs=outputs, **options)
        )
    _done(works)
    for step, inputs, arrays, outputs in running:
        expected = _reference(core, step, inputs)
        for output in outputs:
            _same(output, expected)
        for values, array in zip(inputs, arrays):
            if array not in outputs:
                _same(array, values)


@pytest.mark.ranks(2, 3, env=_ENV)
@_one_and_two
def test_every_dtype_and_operator_and_scale(core, rank, size, hosts, on_gpu):
    rng = np.random.RandomState(rank)
    shape = (3, 101)
    running = []
    for dtype in [*dtypes.NUMPY, "bfloat16"]:
        for op in _OPS:
            for scale in (1.0, 1 / size):
                held = "uint16" if dtype == "bfloat16" else dtype
                values = _values(rng, shape, held)
                if dtype == "bfloat16":
                    values = (_values(rng, shape, "float32").view("uint32") >> 16).astype("uint16")
                array = on_gpu(values, rng.randint(_DEVICES))
                work = _submit(
                    core,
                    f"{dtype} {op} {scale}",
                    "allreduce",
                    shape,
                    dtype,
                    inputs=[array],
                    outputs=[array],
                    op=op,
                    scale=scale,
                )
                running.append((dtype, op, scale, values, array, work))
    buffer = core.allocate(8 * 303)
    for dtype, op, scale, values, array, work in running:
        _done([work])
        in_buffer = np.frombuffer(buffer, values.dtype, 303)
        in_buffer[:] = values.ravel()
        assert core.submit_bucket(f"{dtype} {op} {scale} on CPU", buffer, 0, 303, dtype, "", op, scale).wait(20)
        _same(array, in_buffer)


def _rows(size: int, total: int) -> list[int]:
    """Borders of the shards of the ranks, some of them empty."""
    inner = sorted(np.random.RandomState(size).randint(0, total + 1, size - 1))
    return [0, *map(int, inner), total]


def _pieces(array: DeviceArray, pieces, itemsize: int) -> list[tuple[int, int, int, int]]:
    """Windows (begin, count) of an operation that lie in `array` at (first,) elements."""
    return [(begin, count, array.pointer + first * itemsize, array.device) for begin, count, first in pieces]


@pytest.mark.ranks(1, 2, 3, 4, env=_ENV)
@_one_and_two
@pytest.mark.parametrize("total", [5, 1001, _LARGE // 4])
def test_shards_as_in_allgather_reducescatter_and_alltoall(core, rank, size, hosts, total, on_gpu, gather):
    if size < hosts:
        return
    borders = _rows(size, total)
    begin, count = borders[rank], borders[rank + 1] - borders[rank]
    shards = [(borders[r], borders[r + 1] - borders[r], r) for r in range(size)]
    every = [_values(np.random.RandomState(r), (total,), "float32") for r in range(size)]

    own = on_gpu(every[rank][begin : begin + count], rank % _DEVICES)
    gathered = on_gpu(np.zeros(total, "float32"), 1)
    works = [
        _submit(
            core,
            "allgather",
            "broadcast",
            (total,),
            shards=shards,
            sources=_pieces(own, [(begin, count, 0)], 4),
            targets=_pieces(gathered, [(0, total, 0)], 4),
        )
    ]
    whole = on_gpu(every[rank], 2)
    part = on_gpu(np.zeros(count, "float32"), rank % _DEVICES)
    works.append(
        _submit(
            core,
            "reducescatter",
            "reduce",
            (total,),
            shards=shards,
            sources=_pieces(whole, [(0, total, 0)], 4),
            targets=_pieces(part, [(begin, count, 0)], 4),
            scale=0.5,
        )
    )
    # Every rank sends its array of `total` elements, and keeps its own shard of each.
    sent = on_gpu(every[rank], 0)
    received = on_gpu(np.zeros(size * count, "float32"), 1)
    windows = [(r * total + begin, count, r * count) for r in range(size)]
    works.append(
        _submit(
            core,
            "alltoall",
            "broadcast",
            (size * total,),
            shards=[(r * total, total, r) for r in range(size)],
            sources=_pieces(sent, [(rank * total, total, 0)], 4),
            targets=_pieces(received, windows, 4),
        )
    )
    _done(works)
    reduced = np.empty(total, "float32")
    assert core.submit_allreduce("reduced on CPU", [every[rank]], [reduced], scale=0.5).wait(20)
    _same(gathered, np.concatenate([every[r][borders[r] : borders[r + 1]] for r in range(size)]))
    _same(part, reduced[begin : begin + count])
    _same(received, np.concatenate([every[r][begin : begin + count] for r in range(size)]))
    _same(whole, every[rank])


@pytest.mark.ranks(2, env=_ENV)
def test_operation_comes_after_the_streams_that_write_its_arrays(core, rank, size, on_gpu, cuda):
    """Also after one that is late by far; what has come meanwhile is not held up."""
    late, other = on_gpu(np.zeros(1000)), on_gpu(np.ones(1000))
    source = on_gpu(np.full(1000, rank + 1.0))
    cuda.cudaSetDevice(0)
    stream = cuda.stream()
    cuda.cudaMemcpyAsync(late.pointer, source.pointer, 8000, gpu_support.DEVICE_TO_DEVICE, stream)
    _done(
        [
            _submit(
                core,
                "quick",
                "allreduce",
                (1000,),
                "float64",
                inputs=[late],
                outputs=[late],
                streams=[(stream.value, 0)],
            )
        ]
    )
    _same(late, np.full(1000, 3.0))

    cuda.hold(0, stream, True)
    cuda.cudaMemcpyAsync(late.pointer, source.pointer, 8000, gpu_support.DEVICE_TO_DEVICE, stream)
    work = _submit(
        core, "late", "allreduce", (1000,), "float64", inputs=[late], outputs=[late], streams=[(stream.value, 0)]
    )
    _done([_submit(core, "early", "allreduce", (1000,), "float64", inputs=[other], outputs=[other])])
    assert not work.done()
    cuda.hold(0, stream, False)
    _done([work])
    _same(late, np.full(1000, 3.0))
    _same(other, np.full(1000, 2.0))
    cuda.cudaStreamDestroy(stream)


@pytest.mark.ranks(2, env=_ENV)
def test_higher_priority_overtakes(core, rank, on_gpu, cuda):
    count = 16 * _LARGE // 4
    low, high = on_gpu(np.ones(count, "float32")), on_gpu(np.ones(10, "float32"))
    cuda.cudaSetDevice(0)
    stream = cuda.stream()
    cuda.hold(0, stream, True)
    cuda.delay(0, stream, 1)
    works = [
        _submit(
            core,
            name,
            "allreduce",
            shape,
            inputs=[array],
            outputs=[array],
            priority=priority,
            streams=[(stream.value, 0)],
        )
        for name, shape, array, priority in (("low", (count,), low, 0), ("high", (10,), high, 5))
    ]
    cuda.hold(0, stream, False)
    while True:
        low_is_done = works[0].done()
        if works[1].done():
            break
        assert not low_is_done
        time.sleep(0.0005)
    _done(works)
    _same(high, np.full(10, 2, "float32"))
    _same(low, np.full(count, 2, "float32"))
    cuda.cudaStreamDestroy(stream)


@pytest.mark.ranks(3, long=(2, 4), env=_ENV)
@_one_and_two
def test_more_parts_under_way_than_the_table_has_entries(rank, size, hosts, on_gpu, cuda, gather):
    """Each rank begins with another array; copies end in any order, and find the table full when they do."""
    from compiled import core

    _start(hosts, table_capacity=1, part_bytes=4096, staging_bytes=1 << 20)  # 16 entries for each rank
    values = [np.arange(40_000 + k, dtype="float32") % (7 + k) for k in range(8)]
    for turn in range(10):
        arrays = [on_gpu(mine * (rank + 1), (k + turn) % _DEVICES) for k, mine in enumerate(values)]
        works = []
        for k in np.random.RandomState(10 * turn + rank).permutation(len(arrays)):
            one = [arrays[k]]
            shape = (len(values[k]),)
            works.append(_submit(core, f"large {k}", "allreduce", shape, "float32", inputs=one, outputs=one))
        _done(works)
        for mine, array in zip(values, arrays):
            _same(array, mine * (size * (size + 1) // 2))
    gather("all have come")
    core.shutdown()
    assert cuda.violations() == []


@pytest.mark.ranks(3, 4, env=_ENV)
def test_groups_of_some_ranks_work_beside_the_world(core, rank, size, on_gpu):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Split(0 if rank < size - 1 else MPI.UNDEFINED, rank)
    group = core.make_group(comm.py2f(), list(range(size - 1)), {"gpu": "host"}) if rank < size - 1 else None
    running = []
    for number in range(5):
        for place, members in ((core, size), (group, size - 1)):
            if place is not None:
                array = on_gpu(np.full(3000, rank + number), number % _DEVICES)
                work = _submit(place, f"x{number}", "allreduce", (3000,), array.dtype, inputs=[array], outputs=[array])
                running.append((work, array, members * number + members * (members - 1) // 2))
    for work, array, expected in running:
        _done([work])
        _same(array, np.full(3000, expected))
    if group is not None:
        group.shutdown()
        comm.Free()


@pytest.mark.ranks(2, 3, env=_ENV)
@_one_and_two
@pytest.mark.parametrize("count", [10, _LARGE])
def test_array_on_the_cpu_of_one_rank_and_on_a_gpu_of_another_is_an_error(core, rank, size, hosts, count, on_gpu):
    array = np.ones(count, "float32")
    on_device = on_gpu(array)
    if rank == size - 1:
        work = core.submit_allreduce("mixed", [array], [array])
    else:
        work = _submit(core, "mixed", "allreduce", (count,), inputs=[on_device], outputs=[on_device])
    with pytest.raises(core.Error, match=r"mixed differs.*( on GPU.* on CPU| on CPU.* on GPU)"):
        work.wait(_PATIENCE_S)
    _works(core, on_gpu, size, "mixed")


@pytest.mark.ranks(2, env=_ENV)
@pytest.mark.parametrize("wrong", ["inputs", "outputs"])
def test_memory_that_is_not_where_it_is_said_to_be_is_an_error_on_all_ranks(core, rank, size, wrong, on_gpu, cuda):
    if wrong == "outputs" and cuda.at_hand(1) != 1:
        pytest.skip("needs two GPUs")
    array, here = on_gpu(np.ones(10, "float32")), np.ones(10, "float32")
    memory = {"inputs": _whole([array]), "outputs": _whole([array])}
    if rank == 1:
        memory[wrong] = [(here.ctypes.data, 0)] if wrong == "inputs" else [(array.pointer, 1)]
    work = core.submit_on_gpu("misplaced", "allreduce", "float32", [10], memory)
    with pytest.raises(core.Error, match="refused by rank 1: .*address is not in the memory of its device"):
        work.wait(_PATIENCE_S)
    _same(array, here)
    _works(core, on_gpu, size, "misplaced")


def _three(on_gpu) -> list[DeviceArray]:
    """Arrays of eight parts each."""
    return [on_gpu(np.ones(_PART), 1) for _ in range(3)]


def _errors(core, arrays: list[DeviceArray]) -> list[str]:
    """What operations after each other give on this rank; '' for a result."""
    errors = []
    for number, array in enumerate(arrays):
        try:
            work = _submit(core, f"x{number}", "allreduce", (_PART,), "float64", inputs=[array], outputs=[array])
            assert work.wait(_PATIENCE_S), "an operation hangs"
            errors.append("")
        except core.Error as error:
            errors.append(str(error))
    return errors


# Which call of which function fails: the first ones copy in, later ones out.
_PLANTS = [
    ("cudaGetDevice", 1),
    ("cudaGetDevice", 30),
    ("cudaSetDevice", 1),
    ("cudaSetDevice", 41),
    ("cudaPointerGetAttributes", 1),
    ("cudaPointerGetAttributes", 2),
    ("cudaDeviceGetStreamPriorityRange", 1),
    ("cudaDeviceGetStreamPriorityRange", 2),
    ("cudaStreamCreateWithPriority", 1),
    ("cudaStreamCreateWithPriority", 2),
    ("cudaMemcpyAsync", 1),
    ("cudaMemcpyAsync", 2),
    ("cudaMemcpyAsync", 12),
    ("cudaMemcpyAsync", 13),
    ("cudaEventRecord", 1),
    ("cudaEventRecord", 2),
    ("cudaEventRecord", 7),
    ("cudaEventQuery", 1),
    ("cudaEventQuery", 20),
]


@needs_standin("a failure is planted")
@pytest.mark.ranks(2, env=_ENV, timeout=120)
@_one_and_two
def test_failure_of_any_function_is_an_error_on_all_ranks(rank, size, hosts, on_gpu, cuda, gather):
    from compiled import core

    for number, (function, nth) in enumerate(_PLANTS):
        code, who = (_OUT_OF_MEMORY, _LOST)[number % 2], number % size
        _start(hosts)
        arrays, registered = _three(on_gpu), cuda.standin_registered()
        if rank == who:
            cuda.standin_plant(function, nth, code)
        gather("planted")
        seen = gather(_errors(core, arrays))
        core.shutdown()
        # Where nobody can know whether a copy still runs, its memory stays as it is.
        assert cuda.standin_registered() == registered or (rank == who and function == "cudaEventQuery")
        for r, texts in enumerate(seen):
            text = next(filter(None, texts), "")
            assert f"CUDA failed in {function}: {_TEXTS[code]}" in text, (function, nth, r, seen)
            assert f"rank {who}" in text, (function, nth, r, seen)
    gather("over")
    _start(hosts)
    _works(core, on_gpu, size, "again")
    gather("it works")
    core.shutdown()
    assert cuda.violations() == []


@needs_standin("a failure is planted")
@pytest.mark.ranks(2, env=_ENV)
def test_failure_to_make_an_event_is_an_error_on_all_ranks(core, rank, size, on_gpu, cuda):
    """On a device that has no event to use again, since no other test uses that device."""
    plants = cuda.standin_calls("cudaEventCreateWithFlags")
    arrays = [on_gpu(np.ones(10, "float32"), _FRESH_DEVICE) for _ in range(100)]
    cuda.cudaSetDevice(_FRESH_DEVICE)
    stream = cuda.stream()
    if rank == 1:
        cuda.standin_plant("cudaEventCreateWithFlags", 1, _OUT_OF_MEMORY)
    streams = [(stream.value, _FRESH_DEVICE)]
    works = [
        _submit(core, f"x{number}", "allreduce", (10,), inputs=[array], outputs=[array], streams=streams)
        for number, array in enumerate(arrays)
    ]
    errors = []
    for work in works:
        try:
            assert work.wait(_PATIENCE_S)
        except core.Error as error:
            errors.append(str(error))
    assert cuda.standin_calls("cudaEventCreateWithFlags") > plants
    assert len(errors) == 1
    assert "refused by rank 1: CUDA failed in cudaEventCreateWithFlags: cudaErrorMemoryAllocation" in errors[0]
    _works(core, on_gpu, size, "after it")
    cuda.cudaStreamDestroy(stream)


@needs_standin("a failure is planted")
@pytest.mark.ranks(2, env=_ENV)
def test_memory_that_cuda_does_not_register_serves_nevertheless(core, rank, size, on_gpu, cuda, gather):
    arrays = _three(on_gpu)
    if rank == 0:
        cuda.standin_plant("cudaHostRegister", 1, _OUT_OF_MEMORY)
    gather("planted")
    assert _errors(core, arrays) == ["", "", ""]
    for array in arrays:
        _same(array, np.full(_PART, 2.0))
    core.begin_stall_watch()
    notes = []
    watch = threading.Thread(target=lambda: notes.append(core.next_stalls(0.2, 0)), daemon=True)
    watch.start()
    if rank == 0:
        watch.join(10)
    core.end_stall_watch()
    watch.join(10)
    assert rank != 0 or "cudaHostRegister: cudaErrorMemoryAllocation" in notes[0][0][1]
    assert rank != 1 or notes == [None]


@needs_standin("a failure is planted")
@pytest.mark.ranks(2, 3, env=_ENV, timeout=60)
@_one_and_two
def test_gpu_that_is_lost_in_the_middle_ends_operations_on_all_ranks(rank, size, hosts, on_gpu, cuda, gather):
    from compiled import core

    for moment in (0.0, 0.003, 0.01):
        _start(hosts)
        arrays = [on_gpu(np.ones(_LARGE), 1) for _ in range(4)]
        gather("go")
        works = [
            _submit(core, f"x{number}", "allreduce", (_LARGE,), "float64", inputs=[array], outputs=[array])
            for number, array in enumerate(arrays)
        ]
        if rank == size - 1:
            time.sleep(moment)
            cuda.standin_lose_device(1, _LOST)
        begin, errors = time.monotonic(), []
        for work in works:
            try:
                assert work.wait(_PATIENCE_S), "an operation hangs"
            except core.Error as error:
                errors.append(str(error))
        assert time.monotonic() - begin < 10
        assert errors
        for error in errors:
            assert f"rank {size - 1}" in error and "cudaErrorLaunchFailure" in error
        gather("all have their answers")
        core.shutdown()
        cuda.standin_lose_device(1, 0)
    assert cuda.violations() == []


def _hold_an_operation(core, on_gpu, cuda, gather):
    """Start an operation whose copies wait until standin_hold() lets the device go on."""
    array = on_gpu(np.ones(_PART), 1)
    _works(core, on_gpu, core.size(), "first")  # makes the streams
    _done([_submit(core, "second", "allreduce", (_PART,), "float64", inputs=[array], outputs=[array])])
    gather("at rest")
    cuda.standin_hold(1, None, 1)
    return _submit(core, "held", "allreduce", (_PART,), "float64", inputs=[array], outputs=[array])


@pytest.mark.ranks(2, env=_ENV)
def test_slots_are_used_again(core, size, on_gpu, cuda):
    array, registered = on_gpu(np.zeros(_LARGE // 4, "float32")), []
    for _ in range(20):
        _done([_submit(core, "again", "allreduce", (_LARGE // 4,), inputs=[array], outputs=[array])])
        registered.append(cuda.standin_registered())
    assert registered[-1] == registered[4], registered


@needs_standin("a device is held")
@pytest.mark.ranks(2, env=_ENV)
def test_shutdown_waits_for_copies_under_way(core, rank, on_gpu, cuda, gather):
    work = _hold_an_operation(core, on_gpu, cuda, gather)
    time.sleep(0.05)
    begin = time.monotonic()
    threading.Timer(0.4, cuda.standin_hold, (1, None, 0)).start()
    core.shutdown()
    assert 0.2 < time.monotonic() - begin < 5
    with pytest.raises(core.Error, match="has left|shut mykv down"):
        work.wait(0)


@needs_standin("a device is held")
@pytest.mark.ranks(2, env=_ENV)
def test_nothing_is_given_back_that_a_gpu_may_still_write_to(rank, on_gpu, cuda, gather):
    """A rank that must go does not wait for a GPU for ever, but leaves it its memory."""
    from compiled import core

    _start(1)
    work = _hold_an_operation(core, on_gpu, cuda, gather)
    time.sleep(0.05)
    begin = time.monotonic()
    core.lose("a process was lost")
    with pytest.raises(core.Error, match="a process was lost"):
        work.wait(_PATIENCE_S)
    core.shutdown()
    core.begin_again()
    assert time.monotonic() - begin < 8
    assert cuda.standin_registered() > 0
    gather("both are gone")
    cuda.standin_hold(1, None, 0)
    assert cuda.violations() == []


@needs_standin("a device is held")
@pytest.mark.ranks(2, env=_ENV)
def test_a_result_on_its_way_to_a_gpu_comes_when_its_rank_breaks_down(rank, size, on_gpu, cuda, gather):
    """The other rank has it."""
    from compiled import core

    _start(1)
    count = _PART // 8  # a single part
    array = on_gpu(np.ones(count), 1)
    _done([_submit(core, "first", "allreduce", (count,), "float64", inputs=[array], outputs=[array])])  # makes streams
    gather("at rest")
    if rank == 0:
        work = _submit(core, "x", "allreduce", (count,), "float64", inputs=[array], outputs=[array])
        time.sleep(0.2)  # its values lie in their slot by then
        cuda.standin_hold(1, None, 1)
    gather("rank 0 has come")
    if rank == 1:
        work = _submit(core, "x", "allreduce", (count,), "float64", inputs=[array], outputs=[array])
        assert work.wait(_PATIENCE_S)
    gather("rank 1 has the result")
    if rank == 0:
        threading.Timer(0.3, cuda.standin_hold, (1, None, 0)).start()
        core.lose("a process was lost")
        assert work.wait(_PATIENCE_S)
    _same(array, np.full(count, float(size * size)))
    core.shutdown()
    core.begin_again()
    assert cuda.violations() == []


class _Road:
    """What the log asks a group."""

    def __init__(self, rank: int, *road) -> None:
        self.rank, self.gpu_road = (lambda: rank), (lambda: road)


def _logged(caplog, function, *arguments) -> list[tuple[str, str]]:
    caplog.clear()
    with caplog.at_level("INFO", "kvstore_plugin"):
        function(*arguments)
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_rank_0_logs_the_road_and_its_reason_once(caplog, monkeypatch):
    from kvstore_plugin.world import gpu_libraries as gpu

    def logged(*road):
        return _logged(caplog, gpu.log_road, _Road(*road))

    monkeypatch.setattr(gpu, "_logged", "")
    reason = "rank 1: NCCL was not found"
    host = "Arrays on GPUs are exchanged through host memory: "
    assert logged(0, False, False, "the CUDA runtime finds no GPU", False) == []
    assert logged(1, True, False, reason, False) == []
    monkeypatch.setattr(gpu, "mxnet_has_cuda", True)
    assert logged(0, True, False, reason, False) == [("WARNING", f"{host}{reason}.")]
    assert logged(0, True, False, reason, False) == []
    assert logged(0, True, False, "MYKV_GPU=host", True) == [("INFO", f"{host}MYKV_GPU=host.")]
    assert logged(0, True, True, "", False) == [("INFO", "Arrays on GPUs are exchanged by NCCL.")]
    monkeypatch.setattr(gpu, "mxnet_has_cuda", False)
    assert logged(0, True, False, reason, False) == [("INFO", f"{host}{reason}.")]


def test_the_first_member_of_a_set_logs_its_road_where_it_is_not_the_worlds(caplog, monkeypatch):
    from kvstore_plugin.world import gpu_libraries as gpu

    def logged(world, *road):
        return _logged(caplog, gpu.log_road_of_set, world, _Road(*road), "ProcessSet([1, 3])")

    by_nccl, by_host = _Road(1, True, True, "", False), _Road(1, True, False, "MYKV_GPU=host", True)
    text, reason = "Arrays on GPUs of ProcessSet([1, 3]) are exchanged ", "it is on several hosts"
    monkeypatch.setattr(gpu, "mxnet_has_cuda", True)
    assert logged(by_nccl, 0, True, False, reason, False) == [("WARNING", f"{text}through host memory: {reason}.")]
    assert logged(by_host, 0, True, True, "", False) == [("INFO", f"{text}by NCCL.")]
    assert logged(by_nccl, 1, True, False, reason, False) == []
    assert logged(by_nccl, 0, True, True, "", False) == []
    assert logged(by_host, 0, True, False, reason, False) == []
