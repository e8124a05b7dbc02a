"""Arrays of an MXNet that is built for CUDA, on a real GPU: `make test-gpu` with mxnet-cu112 in its environment.

MXNet's engine, its memory and its streams are the real ones here. Kernels are compiled while the tests run
(mx.rtc.CudaModule), since MXNet's own are for GPUs up to compute capability 8.6.
"""

from __future__ import annotations

import ctypes
import functools
import types

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.marks import ON_REAL_GPU
from harness.support import clear_errors, mx, numbers, total
from kvstore_plugin.selftest import gpu as selftest_gpu
from kvstore_plugin.world import process
from mxnet import autograd, gluon
from standin.gpu_support import Cuda

pytestmark = pytest.mark.skipif(
    not ON_REAL_GPU or mx.context.num_gpus() == 0, reason="needs a real GPU and an MXNet that is built for CUDA"
)

_DTYPES = ["float32", "float64", "float16", "uint8", "int32", "int8", "int64"]
_COMPUTE_CAPABILITY_MAJOR = 75  # cudaDevAttrComputeCapabilityMajor
_NEWEST_OF_MXNET = 8
_THREADS = 256
_SOURCE = r"""
extern "C" {
__global__ void weighted_sum(float *out, const float *x, const float *y, float a, float b, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = a * x[i] + b * y[i];
}
__global__ void product(float *out, const float *x, const float *y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] * y[i];
}
__global__ void descend(float *weight, const float *gradient, float rate, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) weight[i] -= rate * gradient[i];
}
__global__ void late_copy(float *out, const float *x, int cycles, int n) {
  long long start = clock64();
  while (clock64() - start < cycles) {}
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i];
}
}
"""


@functools.lru_cache(maxsize=None)
def _kernel(name: str, signature: str):
    return _module().get_kernel(name, signature)


@functools.lru_cache(maxsize=None)
def _module():
    return mx.rtc.CudaModule(_SOURCE)


def _launch(name: str, signature: str, *arguments) -> None:
    """Run a kernel of this file where its first argument is, an element of it per thread."""
    n = arguments[0].size
    blocks = (-(-n // _THREADS), 1, 1)
    _kernel(name, signature).launch([*arguments, n], arguments[0].context, blocks, (_THREADS, 1, 1))


def _weighted_sum(x, y, a, b):
    out = mx.nd.empty(x.shape, ctx=x.context)
    _launch("weighted_sum", "float *o, const float *x, const float *y, float a, float b, int n", out, x, y, a, b)
    return out


def _product(x, y):
    out = mx.nd.empty(x.shape, ctx=x.context)
    _launch("product", "float *o, const float *x, const float *y, int n", out, x, y)
    return out


def _copy_late(out, x, cycles=2_000_000):
    """About a millisecond after the stream comes to it."""
    _launch("late_copy", "float *o, const float *x, int c, int n", out, x, cycles)


def _gpus(number=1):
    """So many GPUs of this worker's own; without them, the test is skipped."""
    devices = mykv.default_devices()
    if len(devices) < number:
        pytest.skip(f"needs {number} GPUs for each worker")
    return devices[:number]


def _on_gpu(values, device=None):
    return mx.nd.array(values, ctx=device or _gpus()[0], dtype=values.dtype)


@functools.lru_cache(maxsize=None)
def _has_kernels() -> bool:
    """Whether MXNet's own kernels run on this machine's GPUs."""
    major = ctypes.c_int()
    Cuda().cudaDeviceGetAttribute(ctypes.byref(major), _COMPUTE_CAPABILITY_MAJOR, 0)
    return major.value <= _NEWEST_OF_MXNET


def _need_kernels(why: str) -> None:
    if not _has_kernels():
        pytest.skip(f"needs MXNet's own kernels {why}")


@pytest.fixture(autouse=True)
def zeros_without_kernels(monkeypatch):
    """Fills arrays by copies where MXNet has no kernels for this GPU."""
    if _has_kernels():
        return

    def full(array, value):
        array._sync_copyfrom(np.full(array.shape, value, array.dtype))
        return array

    def zeros(shape, ctx=None, dtype=None, **_options):
        return mx.nd.array(np.zeros(shape), ctx=ctx, dtype=dtype)

    monkeypatch.setattr(mx.nd.NDArray, "_full", full)
    monkeypatch.setattr(mx.nd, "zeros", zeros)


@pytest.fixture
def store():
    return mx.kv.create("mykv")


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", _DTYPES)
def test_sum_of_every_dtype(store, rank, size, dtype):
    mine, out = _on_gpu(numbers(rank, (3, 1001), dtype)), _on_gpu(np.zeros((3, 1001), dtype))
    store.pushpull(3, mine, out)
    np.testing.assert_array_equal(out.asnumpy(), total(size, (3, 1001), dtype))
    assert out.context == _gpus()[0] and out.dtype == mine.dtype
    np.testing.assert_array_equal(mine.asnumpy(), numbers(rank, (3, 1001), dtype))


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("shape", [(1,), (7, 3), (1 << 20,), (3, 5_000_001)], ids=str)
def test_sums_and_broadcasts_of_any_size(store, rank, size, shape):
    mine = _on_gpu(numbers(rank, shape))
    store.pushpull(f"sum {shape}", mine)
    np.testing.assert_array_equal(mine.asnumpy(), total(size, shape))
    given, out = _on_gpu(numbers(rank + 5, shape)), _on_gpu(np.zeros(shape, "float32"))
    store.broadcast(f"values {shape}", given, out)
    np.testing.assert_array_equal(out.asnumpy(), numbers(5, shape))


@pytest.mark.ranks(1, 2, 4)
def test_sums_over_several_gpus_of_a_worker(store, rank, size):
    devices = _gpus(2)
    mine = [_on_gpu(numbers(2 * rank + gpu, (3, 1001)), device) for gpu, device in enumerate(devices)]
    store.pushpull("replicas", mine)
    for device, array in zip(devices, mine):
        assert array.context == device
        np.testing.assert_array_equal(array.asnumpy(), total(2 * size, (3, 1001)))


@pytest.mark.ranks(1, 2, 4)
def test_collectives(rank, size):
    mine = _on_gpu(np.full((4, 3), rank + 1, "float32"))
    sums = size * (size + 1) / 2
    assert (mykv.allreduce(mine, name="sum", op=mykv.Sum).asnumpy() == sums).all()
    assert (mykv.allreduce(mine, name="mean").asnumpy() == sums / size).all()
    gathered = mykv.allgather(mine, name="rows")
    assert gathered.shape == (4 * size, 3) and gathered.context == _gpus()[0]
    np.testing.assert_array_equal(gathered.asnumpy()[::4, 0], np.arange(1, size + 1))
    rows = _on_gpu(np.repeat(np.arange(size, dtype="float32")[:, None] + 10 * rank, 3, axis=1))
    np.testing.assert_array_equal(mykv.alltoall(rows, name="rows to all").asnumpy()[:, 0], 10 * np.arange(size) + rank)
    np.testing.assert_array_equal(
        mykv.reducescatter(rows, mykv.Sum, name="one row").asnumpy()[:, 0], [size * rank + 10 * sum(range(size))]
    )


@pytest.mark.ranks(1, 2, 4)
def test_an_operation_waits_for_what_writes_its_array_and_is_waited_for(store, rank, size):
    """Nothing here waits in Python: the engine alone orders a late kernel, the sum and the kernel that reads it."""
    n, steps = 300_000, 40
    sources = [_on_gpu(np.full(n, 100 * step + rank, "float32")) for step in range(steps)]
    mine, results = mx.nd.empty((n,), ctx=_gpus()[0]), []
    for source in sources:
        _copy_late(mine, source)
        store.pushpull("late", mine)
        results.append(_weighted_sum(mine, source, 1.0, 1.0))
    for step, result in enumerate(results):
        right = size * 100 * step + sum(range(size)) + 100 * step + rank
        np.testing.assert_array_equal(result.asnumpy(), np.full(n, right, "float32"))


class _HalfSquares(autograd.Function):
    """weight * x - target, whose gradient by the weight is that of half the sum of its squares."""

    def __init__(self, x, target):
        super().__init__()
        self._x, self._target = x, target

    def forward(self, weight):
        self._difference = _weighted_sum(_product(weight, self._x), self._target, 1.0, -1.0)
        return self._difference

    def backward(self, _above):
        gradient = _product(self._difference, self._x)
        late = mx.nd.empty(gradient.shape, ctx=gradient.context)
        _copy_late(late, gradient, cycles=200_000)
        return late


class _KernelSGD(mx.optimizer.Optimizer):
    """weight -= learning_rate * rescale_grad * gradient, by a kernel of this file."""

    def create_state(self, index, weight):
        return None

    def update(self, index, weight, grad, state):
        self._update_count(index)
        rate = self._get_lr(index) * self.rescale_grad
        _launch("descend", "float *w, const float *g, float r, int n", weight, grad, rate)


_SHAPES = [(5,), (300, 40), (1 << 18,), (3,)]


def _parameters(devices):
    parameters = gluon.ParameterDict()
    for index, shape in enumerate(_SHAPES):
        parameter = parameters.get(f"weight{index}", shape=shape, init=mx.init.Constant(0.5 + index))
        parameter.initialize(ctx=devices)
    return parameters


def _data(part, step, index):
    """x and target of one GPU of one worker, in one step, for one Parameter."""
    random = np.random.RandomState(1000 * step + 10 * part + index)
    return tuple(random.randint(-2, 3, _SHAPES[index]).astype("float32") for _ in range(2))


def _trained(parts, steps, rate):
    """What one process computes of all workers' data."""
    weights = [np.full(shape, 0.5 + index, "float64") for index, shape in enumerate(_SHAPES)]
    for step in range(steps):
        for index, weight in enumerate(weights):
            pairs = [_data(part, step, index) for part in range(parts)]
            weight -= rate / parts * sum((weight * x - target) * x for x, target in pairs)
    return weights


def _step(trainer, parameters, devices, rank, step, batch):
    """Forward, backward and update: one part of the data for each GPU."""
    differences = []
    for gpu, device in enumerate(devices):
        part = rank * len(devices) + gpu
        data = [[_on_gpu(values, device) for values in _data(part, step, index)] for index in range(len(_SHAPES))]
        with autograd.record():
            differences += [_HalfSquares(*pair)(each.data(device)) for pair, each in zip(data, parameters.values())]
    autograd.backward(differences, differences)
    trainer.step(batch)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("gpus", [1, 2], ids=["one GPU", "two GPUs"])
@pytest.mark.parametrize("kind", ["dist", "no buckets", "stock", "on the store"])
def test_training(rank, size, gather, kind, gpus):
    devices = _gpus(gpus)
    if kind == "on the store" and gpus > 1:
        _need_kernels("to add the gradients of several GPUs")
    parameters = _parameters(devices)
    optimizer = _KernelSGD(learning_rate=0.05)
    if kind in ("dist", "no buckets"):
        settings = {"bucket_bytes": 0} if kind == "no buckets" else {}
        trainer, batch = mykv.DistributedTrainer(parameters, optimizer, **settings), gpus
    else:
        trainer = gluon.Trainer(parameters, optimizer, kvstore="mykv", update_on_kvstore=kind == "on the store")
        batch = gpus * size
    for step in range(12):
        _step(trainer, parameters, devices, rank, step, batch)
    for parameter, right in zip(parameters.values(), _trained(gpus * size, 12, 0.05)):
        for data in parameter.list_data():
            mine = data.asnumpy()
            np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-5)
            assert len(set(gather(mine.tobytes()))) == 1


@pytest.mark.ranks(2)
def test_local_training(rank, size, gather):
    _need_kernels("to average weights")
    devices = _gpus(1)
    parameters = _parameters(devices)
    trainer = mykv.LocalTrainer(parameters, _KernelSGD(learning_rate=0.05), period=4)
    for step in range(12):
        _step(trainer, parameters, devices, rank, step, 1)
    for parameter in parameters.values():
        assert len(set(gather(parameter.data().asnumpy().tobytes()))) == 1


@pytest.mark.ranks(1, 2)
def test_batch_norm_over_all_workers(rank, size):
    """SyncBatchNorm computes on the CPU; its values come from the GPU and go back there."""
    _need_kernels("to update the running mean and variance")
    every = np.random.RandomState(3).randn(size * 6, 5, 4).astype("float32")
    above = np.random.RandomState(4).randn(size * 6, 5, 4).astype("float32")
    layer = mykv.SyncBatchNorm(in_channels=5, momentum=0.9, epsilon=1e-5)
    layer.initialize(ctx=_gpus()[0])
    mine = _on_gpu(every[rank * 6 : rank * 6 + 6])
    mine.attach_grad()
    with autograd.record():
        out = layer(mine)
    out.backward(_on_gpu(above[rank * 6 : rank * 6 + 6]))
    mean, variance = every.mean((0, 2), keepdims=True), every.var((0, 2), keepdims=True)
    normal = (every - mean) / np.sqrt(variance + 1e-5)
    right = (above - above.mean((0, 2), keepdims=True) - normal * (above * normal).mean((0, 2), keepdims=True)) / (
        np.sqrt(variance + 1e-5)
    )
    assert out.context == _gpus()[0]
    np.testing.assert_allclose(out.asnumpy(), normal[rank * 6 : rank * 6 + 6], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mine.grad.asnumpy(), right[rank * 6 : rank * 6 + 6], rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(2, 4)
def test_initial_values_are_those_of_rank_0(rank, gather):
    parameters = gluon.ParameterDict()
    for index, shape in enumerate(_SHAPES):
        parameters.get(f"weight{index}", shape=shape).initialize(mx.init.Constant(rank + index), ctx=_gpus()[0])
    trainer = mykv.DistributedTrainer(parameters, _KernelSGD(learning_rate=0.1))
    for parameter in parameters.values():
        nothing = _on_gpu(np.zeros(parameter.shape, "float32"))
        with autograd.record():
            difference = _HalfSquares(nothing, nothing)(parameter.data())
        autograd.backward([difference], [difference])
    trainer.step(1)
    for index, parameter in enumerate(parameters.values()):
        assert (parameter.data().asnumpy() == index).all()
    mykv.check_in_step(parameters)


@pytest.mark.ranks(2, 4)
def test_a_mistake_is_an_error_on_all_workers(store, rank, size):
    mine = _on_gpu(np.ones(3 + (rank == 1), "float32"))
    with pytest.raises(mx.MXNetError, match="(?s)bad shapes.*rank 1"):
        store.pushpull("bad shapes", mine)
        mine.wait_to_read()
    clear_errors()
    where = mx.cpu() if rank == 1 else _gpus()[0]
    elsewhere = mx.nd.array(np.ones(3, "float32"), ctx=where)
    with pytest.raises(mx.MXNetError, match="(?s)places.*rank 1"):
        store.pushpull("places", elsewhere)
        elsewhere.wait_to_read()
    clear_errors()
    good = _on_gpu(np.ones(3, "float32"))
    store.pushpull("good", good)
    assert (good.asnumpy() == size).all()


@pytest.mark.ranks(1, 2, 4)
def test_nccl_serves_workers_with_a_gpu_each(store, size):
    some_gpu, by_nccl, reason, _ = process.core.gpu_road()
    assert some_gpu and by_nccl == (mx.context.num_gpus() >= size), reason


@pytest.mark.ranks(1)
def test_the_selftest_says_whether_mxnet_computes_on_the_gpu(store):
    found = types.SimpleNamespace(facts={}, wrong=[])
    selftest_gpu._check_mxnet(found, 0)
    if _has_kernels():
        assert (found.facts, found.wrong) == ({"MXNet on GPUs": "it computes"}, [])
    else:
        assert not found.facts and "its build has no kernels for it" in found.wrong[0]
