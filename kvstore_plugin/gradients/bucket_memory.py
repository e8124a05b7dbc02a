"""Gradients in memory that the ranks can reduce in place: the host's shared memory, or a GPU's memory.

A trainer gives its parameters gradient arrays that are views of buckets in such memory: it adopts the gradients. That
must happen before the first backward that writes them: a network hybridized with static_alloc goes on writing to the
arrays of its first backward, whatever the Parameter holds later. MXNet gives a Parameter its gradient arrays in few
methods (first initialization, a new grad_req, reset_ctx, cast). This file patches these methods on the class, so that
the new arrays are adopted at once. Gradients that are older than the trainer are adopted only if no backward has run
since they were made; the other gradients are reduced by copying.
"""

from __future__ import annotations

import logging
import math
import weakref
from typing import Any, Callable, Iterable, Sequence

import numpy as np

from ..compat import patches
from ..compat.arrays import DTYPES
from ..compat.mxnet import NDArray, Parameter, autograd, view_of_device_memory, view_of_memory
from ..world import process
from ..world.process_set import ProcessSet

# DLPack's code for a CUDA device (kDLCUDA).
_DLPACK_GPU = 2

# A gradient starts on a cache line, so that no two gradients share a line, and is aligned for the widest vectors.
_ALIGNMENT = 64

_log = logging.getLogger("kvstore_plugin")

# Why gradients that are older than the trainer are not adopted, and what to do.
_WRITTEN = "a backward has run since they were made"
_UNSEEN = "they were made before the import of kvstore_plugin, or by a copy of the network"
_CURES = {
    _WRITTEN: "Make the trainer before the first backward, and after the last init().",
    _UNSEEN: "Write `import kvstore_plugin` at the top of the program, before the network is initialized, and all are "
    "reduced in place.",
}

_backwards = 0  # how often backward has run in this process
_born: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # Parameter: _backwards when it got its gradient arrays
_owners: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # Parameter: weak reference to its GradientMemory


class Bucket:
    """Gradients of one dtype on one device, side by side, reduced by one operation. Subclasses own the memory."""

    def __init__(self, dtype: np.dtype, capacity: int) -> None:
        self.dtype = dtype
        self.capacity = capacity  # bytes
        self.used = 0  # bytes
        self.members: list[tuple[Parameter, int, NDArray]] = []  # each with its offset in bytes and its view

    def add(self, parameter: Parameter, gradient: NDArray) -> NDArray:
        """A view for the gradient, with its shape, dtype and values."""
        begin = self.used
        self.used += _aligned(gradient.size * self.dtype.itemsize)
        view = self._view(begin, gradient)
        view[:] = gradient
        self.members.append((parameter, begin, view))
        return view

    def live(self) -> list[tuple[Parameter, int, NDArray]]:
        """Members whose Parameter still has this gradient array; the memory of the other members is unused."""
        return [member for member in self.members if member[0]._grad is not None and member[0]._grad[0] is member[2]]

    @property
    def attached(self) -> bool:
        """Whether the bucket belongs to the running core, and not to a core that was shut down."""
        raise NotImplementedError

    def prepare(self, name: str, count: int, layout: str, handles: list[int], *how: Any, **options: Any) -> Any:
        """The operation that reduces the first `count` elements, as the core's PreparedBucket."""
        raise NotImplementedError

    def _view(self, begin: int, gradient: NDArray) -> NDArray:
        """An array like the gradient at an offset in bytes."""
        raise NotImplementedError


class SharedBucket(Bucket):
    """In the shared memory of a process set."""

    def __init__(self, process_set: ProcessSet, dtype: np.dtype, capacity: int) -> None:
        super().__init__(dtype, capacity)
        self._buffer = process_set._core.reserve(capacity)

    @property
    def attached(self) -> bool:
        return self._buffer.attached

    def prepare(self, name: str, count: int, layout: str, handles: list[int], *how: Any, **options: Any) -> Any:
        kind = process.core.PreparedBucket
        return kind(name, self._buffer, 0, count, self.dtype.name, layout, handles, *how, **options)

    def _view(self, begin: int, gradient: NDArray) -> NDArray:
        self._buffer.commit(self.used)
        memory = np.frombuffer(self._buffer, dtype=self.dtype, count=gradient.size, offset=begin)
        return view_of_memory(memory.reshape(gradient.shape), gradient)


class DeviceBucket(Bucket):
    """In the memory of a GPU."""

    def __init__(self, process_set: ProcessSet, dtype: np.dtype, capacity: int, device: int) -> None:
        super().__init__(dtype, capacity)
        self._process_set = process_set
        self._generation = process.generation
        self._group = process_set._core if process_set._core is not process.core else process.core.world()
        self._memory = process.core.GpuMemory(device, capacity)

    @property
    def attached(self) -> bool:
        return self._generation == process.generation

    def prepare(self, name: str, count: int, layout: str, handles: list[int], *how: Any, **options: Any) -> Any:
        kind = process.core.PreparedBucket
        return kind(name, self._group, self._memory, 0, count, self.dtype.name, layout, handles, *how, **options)

    def _view(self, begin: int, gradient: NDArray) -> NDArray:
        memory = self._memory
        device = (_DLPACK_GPU, memory.device)
        return view_of_device_memory(memory, memory.address + begin, gradient.shape, self.dtype, device, gradient)


def renew(parameters: Iterable[Parameter]) -> None:
    """Let the gradients of Parameters be adopted again. The caller ensures that no earlier graph writes to them."""
    for parameter in parameters:
        if parameter._grad is not None:
            _born[parameter] = _backwards


class GradientMemory:
    """The memory for the gradients that one trainer reduces over one process set.

    Parameters
    ----------
    process_set : ProcessSet
        The ranks that share the memory.
    bucket_bytes : int
        Gradients share a bucket up to this size, in bytes; a larger gradient has its own bucket. 0: no gradient is
        adopted. Gradients of a group share a bucket of any size for each dtype and device.
    """

    def __init__(self, process_set: ProcessSet, bucket_bytes: int) -> None:
        self._process_set = process_set
        self.bucket_bytes = bucket_bytes
        self._group_of: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # Parameter: number of its group
        self._filling: dict[tuple, Bucket] = {}  # by group, dtype and GPU
        self.buckets: list[Bucket] = []
        self._views: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # Parameter: its views so far
        self._late: list[tuple[Parameter, str]] = []  # Parameters with gradients that are too old, and why they are

    def own(self, parameters: Sequence[tuple[Parameter, int | None]]) -> None:
        """Adopt the gradients that Parameters have now, and every gradient array that they get later.

        Parameters
        ----------
        parameters : sequence of (Parameter, int or None)
            In the order of their gradients in the buckets; each with the number of its group, or None without groups.
        """
        if not self.bucket_bytes:
            return
        free = [(parameter, group) for parameter, group in parameters if _owner(parameter) is None]
        self._group_of.update((parameter, group) for parameter, group in free if group is not None)
        for parameter, _ in free:
            self._own(parameter)

    def _own(self, parameter: Parameter) -> None:
        _owners[parameter] = weakref.ref(self)
        if parameter._grad is None:
            return
        if _born.get(parameter) == _backwards:
            self.adopt(parameter)
        elif self._adoptable(parameter):
            self._late.append((parameter, _WRITTEN if parameter in _born else _UNSEEN))

    def warn_of_copies(self, whose: str, of: int) -> None:
        """Log a warning on rank 0 about gradients that own() could not adopt, of `of` parameters of a trainer."""
        for why, cure in _CURES.items():
            late = sum(reason == why for _, reason in self._late)
            if late and self._process_set.rank() == 0:
                _log.warning(
                    "The gradients of %d of the %d parameters of %s are reduced by copying, which is slower, since "
                    "%s. %s",
                    late,
                    of,
                    whose,
                    why,
                    cure,
                )

    def adopt(self, parameter: Parameter) -> None:
        """Give the Parameter a gradient array in a bucket, with the values of its present gradient array."""
        if not self._adoptable(parameter):
            return
        gradient = parameter._grad[0]
        dtype = np.dtype(gradient.dtype)
        view = self._earlier_view(parameter, gradient)
        if view is None:
            nbytes = _aligned(gradient.size * dtype.itemsize)
            bucket = self._bucket_for(self._group_of.get(parameter), dtype, _gpu_of(gradient), nbytes)
            view = bucket.add(parameter, gradient)
            self._views.setdefault(parameter, []).append(view)
        parameter._grad = [view]
        autograd.mark_variables(parameter._data, parameter._grad, parameter.grad_req)

    def release(self) -> None:
        """Own no Parameter any more. A Parameter keeps its gradient here until another memory adopts it."""
        for parameter in [one for one, owner in _owners.items() if owner() is self]:
            del _owners[parameter]

    def why_copied(self, parameter: Parameter) -> str | None:
        """Why the Parameter's present gradient is reduced by copying; None if it lies in a bucket."""
        gradients = parameter._grad
        if len(gradients) == 1 and any(view is gradients[0] for view in self._views.get(parameter, ())):
            return None
        if not self.bucket_bytes:
            return "the trainer has no buckets (bucket_bytes=0)"
        if len(gradients) > 1:
            return "the gradient is on several devices"
        if not self._adoptable(parameter):
            return f"numpy cannot view the gradient ({gradients[0].dtype.__name__}, {gradients[0].context})"
        reasons = (reason for one, reason in self._late if one is parameter)
        return next(reasons, "another trainer has the parameter in its buckets")

    def attached(self) -> bool:
        """Whether the buckets belong to the running core, and not to a core that was shut down."""
        if not process.is_initialized() or not self._process_set.included():
            return False
        return all(bucket.attached for bucket in self.buckets)

    def _earlier_view(self, parameter: Parameter, gradient: NDArray) -> NDArray | None:
        """An earlier view of the Parameter that fits the gradient, with the new values; None if no view fits.

        A network hybridized with static_alloc may still write to the old array, so the Parameter gets it back.
        """
        for view in self._views.get(parameter, ()):
            alike = type(view) is type(gradient) and view.dtype == gradient.dtype and view.shape == gradient.shape
            if alike and _gpu_of(view) == _gpu_of(gradient):
                view[:] = gradient
                return view
        return None

    def _bucket_for(self, group: int | None, dtype: np.dtype, gpu: int | None, nbytes: int) -> Bucket:
        bucket = self._filling.get((group, dtype, gpu))
        if bucket is None or bucket.used + nbytes > bucket.capacity:
            capacity = max(self.bucket_bytes if group is None else self._group_bytes(group, dtype), nbytes)
            if gpu is None:
                bucket = SharedBucket(self._process_set, dtype, capacity)
            else:
                bucket = DeviceBucket(self._process_set, dtype, capacity, gpu)
            self._filling[group, dtype, gpu] = bucket
            self.buckets.append(bucket)
        return bucket

    def _group_bytes(self, group: int, dtype: np.dtype) -> int:
        """Bytes for the gradients of a group that have no view yet; an estimate if some shapes are unknown."""
        members = [parameter for parameter, number in self._group_of.items() if number == group]
        shapes = [
            parameter.shape
            for parameter in members
            if _dtype_name(parameter.dtype) == dtype.name and parameter not in self._views
        ]
        known = [shape for shape in shapes if shape is not None and all(length > 0 for length in shape)]
        needed = sum(_aligned(math.prod(shape) * dtype.itemsize) for shape in known)
        return needed if len(known) == len(shapes) else needed + self.bucket_bytes

    @staticmethod
    def _adoptable(parameter: Parameter) -> bool:
        # Replicas on several devices must be summed first. A reduction by copying sums them while it copies.
        if len(parameter._grad) != 1:
            return False
        gradient = parameter._grad[0]
        dense = gradient.stype == "default" and gradient.size > 0 and len(gradient.shape) > 0
        # Every cpu(n) is the same memory, and MXNet mixes arrays of several cpu(n). A view is always on cpu(0).
        on_device = gradient.context.device_type in ("cpu", "gpu")  # and not cpu_pinned or cpu_shared
        return dense and on_device and np.dtype(gradient.dtype).name in DTYPES

    def __reduce__(self) -> tuple:
        # A copy of the trainer has other Parameters, which have no views yet.
        return GradientMemory, (self._process_set, self.bucket_bytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _gpu_of(array: NDArray) -> int | None:
    """Number of the GPU that an array lies on, or None."""
    return array.context.device_id if array.context.device_type == "gpu" else None


def _dtype_name(dtype: Any) -> str:
    """Name of a Parameter's dtype. numpy does not know bfloat16; any name does for it, since it is never adopted."""
    try:
        return np.dtype(dtype).name
    except TypeError:
        return str(dtype)


def _owner(parameter: Parameter) -> GradientMemory | None:
    reference = _owners.get(parameter)
    return reference() if reference is not None else None


@patches.replaces(
    "gluon.Parameter._init_grad",
    "gluon.Parameter.cast",
    why="Parameters get gradient arrays before a trainer is made. Only arrays that no backward has written can move to "
    "memory that the ranks share.",
    does="Notes when the arrays were made. Those of a trainer's Parameter become views of its buckets.",
    undone_by="nothing",
)
def _make_gradients(original: Callable, self: Parameter, *args: Any, **kwargs: Any) -> Any:
    before = self._grad
    result = original(self, *args, **kwargs)
    if self._grad is not None and self._grad is not before:
        _born[self] = _backwards
        owner = _owner(self)
        if owner is not None and owner.attached():
            owner.adopt(self)
    return result


@patches.replaces(
    "base._LIB.MXAutogradBackwardEx",
    why="Backward may run before a trainer is made. All of MXNet's Python calls this function, also an "
    "`autograd.backward` that a program has imported before this package.",
    does="Counts how often backward has written gradients of Parameters.",
    undone_by="nothing",
)
def _backward(original: Callable, count: Any, outputs: Any, gradients: Any, variables: Any, *others: Any) -> int:
    global _backwards
    _backwards += not getattr(variables, "value", variables)  # autograd.grad() passes variables, and writes new arrays
    return original(count, outputs, gradients, variables, *others)
