"""Gradients in memory that the ranks can reduce in place: the host's shared memory, or a GPU's memory.

A trainer replaces its parameters' gradient arrays by views of buckets in such memory ("in place"). But other holders of
an old gradient array would keep using the old memory: a variable of the program, a recorded graph whose backward pass
comes later, or a network hybridized with static_alloc, which writes to the arrays of its first backward pass. So a
gradient is moved only if nothing else holds its array. The other gradients are reduced by copying.

MXNet gives a Parameter its gradient arrays in a few methods (first initialization, a new grad_req, reset_ctx, cast).
This file patches these methods on the class, so that the new arrays are moved at once.

A gradient may be moved on some ranks only. So a trainer compares its layout with those of the other ranks after every
change. If the layouts differ, all gradients are reduced by copying.
"""

from __future__ import annotations

import ctypes
import logging
import math
import sys
import weakref
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence

import numpy as np

from ..compat import patches, references
from ..compat.arrays import DTYPES, wait_to_write
from ..compat.mxnet import NDArray, Parameter, autograd, fill_with_zeros, view_of_device_memory, view_of_memory
from ..world import process
from ..world.process_set import ProcessSet
from .bucket_sizes import BucketFiller

# DLPack's code for a CUDA device (kDLCUDA).
_DLPACK_GPU = 2

# A gradient starts on a cache line, so that no two gradients share a line, and is aligned for the widest vectors.
_ALIGNMENT = 64

_log = logging.getLogger("kvstore_plugin")

# Reasons why gradients older than the trainer are not moved, each with its remedy.
_KEPT = "something else holds their arrays"
_RECORDED = "a recorded forward pass uses their parameters"
_DETACHED = "a copy of a network does not attach them to its parameters"
_UNKNOWN = "this build of MXNet does not show what holds their arrays"
_CURES = {
    _KEPT: "Fetch gradients where they are used, or after the trainer is created; create the trainer of a network that "
    "is hybridized with static_alloc before its first backward, and after the last init().",
    _RECORDED: "Create the trainer before autograd.record(); a pass that is not recorded gives a network its shapes.",
    _DETACHED: "Initialize the copy, with force_reinit=True, or set its parameters' grad_req, before the trainer is "
    "created.",
    _UNKNOWN: "Create the trainer before the parameters are initialized.",
}

# Arguments of patches.replaces().
_MOVED = {
    "why": "Parameters get gradient arrays at many moments, and only arrays that nothing else holds can move to memory "
    "that the ranks share.",
    "undone_by": "nothing",
}
_STAYING = {
    "why": "One worker may call it alone, but about new arrays the workers ask each other. And MXNet copies running "
    "statistics too early, while a backward pass of a network with `static_alloc` still writes them.",
    "does": "On the device where the Parameter is, it only sets the gradient to zero.",
    "undone_by": "another device; several devices",
}

_recordings = 0  # number of recordings that this process has begun
_born: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # Parameter: _recordings when it got its gradient arrays
_owners: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # Parameter: weak reference to its GradientMemory
# Parameter: its Places so far, each with its bucket. A bucket refers to its Places, so a Place must not refer to its
# bucket: with such a cycle only the garbage collector would free the memory, later than the last Parameter.
_places: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class Place(NamedTuple):
    """A view of a bucket that is or was a Parameter's gradient."""

    parameter: Any  # a weak reference
    begin: int  # offset in the bucket, in bytes
    view: NDArray

    @property
    def end(self) -> int:
        """Bytes from the start of the bucket to the end of this place."""
        return self.begin + _aligned(self.view.size * np.dtype(self.view.dtype).itemsize)

    def is_current(self) -> bool:
        """Whether the Parameter has this gradient array now."""
        parameter = self.parameter()
        return parameter is not None and bool(parameter._grad) and parameter._grad[0] is self.view


class Bucket:
    """Gradients of one dtype on one device, side by side, reduced by one operation. Subclasses own the memory."""

    def __init__(self, process_set: ProcessSet, dtype: np.dtype) -> None:
        self.process_set = process_set
        self.dtype = dtype
        self.used = 0  # bytes in use
        self.members: list[Place] = []

    def add(self, parameter: Parameter, gradient: NDArray) -> Place:
        """A view for the gradient, with its shape, dtype and values."""
        begin = self.used
        self.used += _aligned(gradient.size * self.dtype.itemsize)
        view = self._view(begin, gradient)
        view[:] = gradient
        place = Place(weakref.ref(parameter), begin, view)
        self.members.append(place)
        return place

    def live(self) -> list[Place]:
        """The members whose Parameter still has this gradient array; the memory of the other members is unused."""
        return [place for place in self.members if place.is_current()]

    @property
    def attached(self) -> bool:
        """Whether the bucket belongs to the running core, not to a core that was shut down."""
        raise NotImplementedError

    def prepare(self, name: str, count: int, layout: str, handles: list[int], *how: Any, **options: Any) -> Any:
        """The operation that reduces the first `count` elements, as the core's PreparedBucket."""
        raise NotImplementedError

    def _view(self, begin: int, gradient: NDArray) -> NDArray:
        """An array like the gradient, `begin` bytes after the start of the bucket."""
        raise NotImplementedError


class SharedBucket(Bucket):
    """A bucket in the shared memory of a process set."""

    def __init__(self, process_set: ProcessSet, dtype: np.dtype, size: int) -> None:
        super().__init__(process_set, dtype)
        self._buffer = process_set._core.reserve(size)

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
    """A bucket in the memory of a GPU."""

    def __init__(self, process_set: ProcessSet, dtype: np.dtype, size: int, device: int) -> None:
        super().__init__(process_set, dtype)
        self._generation = process.generation
        self._group = process_set._core if process_set._core is not process.core else process.core.world()
        self._memory = process.core.GpuMemory(device, size)

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
    """Allow the gradients of Parameters to be moved again. The caller ensures that no earlier graph writes to them."""
    for parameter in parameters:
        if parameter._grad is not None:
            _born[parameter] = _recordings


class GradientMemory:
    """The memory for the gradients that one trainer reduces over one process set.

    Parameters
    ----------
    process_set : ProcessSet
        The ranks that share the memory.
    bucket_bytes : int
        Gradients share a bucket up to this size, in bytes; a larger gradient has its own bucket. 0: no gradient is
        moved. Gradients of a group share a bucket of any size for each dtype and device.
    """

    def __init__(self, process_set: ProcessSet, bucket_bytes: int) -> None:
        self._process_set = process_set
        self.bucket_bytes = bucket_bytes
        self._generation = process.generation
        self._group_of: dict[Parameter, int | None] = {}  # in the order of the network
        self._filler = BucketFiller()
        self._late: dict[Parameter, str] = {}  # Parameters whose gradients could not be moved, and why

    def own(self, parameters: Sequence[tuple[Parameter, int | None]]) -> None:
        """Move the gradients that Parameters have now into buckets, and every gradient array that they get later.

        Parameters
        ----------
        parameters : sequence of (Parameter, int or None)
            In the order of their gradients in the buckets; each with the number of its group, or None without groups.
        """
        self._group_of = dict(parameters)
        kept = {id(place.view) for places in self.in_place(self._group_of).values() for place in places}
        for parameter in self._group_of:
            _owners[parameter] = weakref.ref(self)  # the newest trainer moves new gradient arrays
        present = [parameter for parameter in self._group_of if parameter._grad]
        moving = [
            parameter for parameter in present if self._fits_bucket(parameter) and id(parameter._grad[0]) not in kept
        ]
        self._late = _reasons_against(moving) if self.bucket_bytes else {}
        moved = [parameter for parameter in moving if parameter not in self._late] if self.bucket_bytes else []
        for parameter in moved:
            self._move(parameter)
        if moved:
            _return_freed_memory()
        for parameter in present:  # new lists on all ranks, moved or not: they make other trainers check again
            parameter._grad = list(parameter._grad)

    def _move(self, parameter: Parameter) -> None:
        """Move a Parameter's existing gradient and its values into a bucket; drop the Parameter's earlier Places."""
        held, fresh = parameter._grad, parameter._data[0]._fresh_grad
        earlier = _places.pop(parameter, [])
        self.put_in_bucket(parameter)
        parameter._data[0]._fresh_grad = fresh
        held[0] = parameter._grad[0]  # the program may hold the old list
        for bucket, place in earlier:
            bucket.members.remove(place)

    def warn_of_copies(self, whose: str, of: int) -> None:
        """Log a warning on rank 0 about gradients that own() could not move.

        `whose`: the trainer, as the warning names it; `of`: the number of its parameters.
        """
        for why, cure in _CURES.items():
            late = sum(reason == why for reason in self._late.values())
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

    def put_in_bucket(self, parameter: Parameter) -> None:
        """Give the Parameter a gradient array in a bucket, with the values of its present gradient array."""
        if not self.bucket_bytes or not self._fits_bucket(parameter):
            return
        gradient = parameter._grad[0]
        dtype = np.dtype(gradient.dtype)
        place = _earlier_place(parameter, gradient, self._process_set)
        if place is None:
            nbytes = _aligned(gradient.size * dtype.itemsize)
            bucket = self._bucket_for(self._group_of.get(parameter), dtype, _gpu_of(gradient), nbytes)
            place = bucket.add(parameter, gradient)
            _places.setdefault(parameter, []).append((bucket, place))
        _attach(parameter, place)

    def release(self) -> None:
        """Move no more gradients. A Parameter keeps its gradient here until another GradientMemory moves it."""
        for parameter in [one for one, owner in _owners.items() if owner() is self]:
            del _owners[parameter]

    def reasons_for_copies(self, parameters: Sequence[Parameter]) -> list[str | None]:
        """Why the present gradient of each Parameter is reduced by copying; None if it is reduced in place."""
        places = [place for members in self.in_place(parameters).values() for place in members]
        in_buckets = {place.parameter() for place in places}
        return [None if parameter in in_buckets else self._why_copied(parameter) for parameter in parameters]

    def _why_copied(self, parameter: Parameter) -> str:
        gradients, bucket = parameter._grad, _bucket_of(parameter)
        if not self.bucket_bytes:
            return "the trainer has no buckets (bucket_bytes=0)"
        if len(gradients) > 1:
            return "the gradient is on several devices"
        if not self._fits_bucket(parameter):
            return f"numpy cannot view the gradient ({gradients[0].dtype.__name__}, {gradients[0].context})"
        if bucket is not None and bucket.attached:
            return "it is in a bucket with gradients of another trainer"
        return self._late.get(parameter, "the trainer was created before the last init()")

    def in_place(self, parameters: Iterable[Parameter]) -> dict[Bucket, list[Place]]:
        """The buckets that can be reduced in place when the trainer reduces the gradients of these Parameters.

        An operation reduces a whole bucket. So all gradients in the bucket must belong to these Parameters, and to one
        group. An earlier trainer may have created the bucket.

        Parameters
        ----------
        parameters : iterable of Parameter
            In the order of the network, from which the order of the buckets follows.
        """
        group_of = {parameter: self._group_of.get(parameter) for parameter in parameters}
        found: dict[Bucket, list[Place]] = {}
        for parameter in group_of if self.bucket_bytes and self.attached() else ():
            bucket = _bucket_of(parameter)
            if bucket is not None and bucket not in found:
                found[bucket] = bucket.live()
        return {bucket: places for bucket, places in found.items() if self._is_usable(bucket, places, group_of)}

    def _is_usable(self, bucket: Bucket, places: Sequence[Place], group_of: Mapping[Parameter, int | None]) -> bool:
        members = [place.parameter() for place in places]
        is_here = bucket.process_set is self._process_set and bucket.attached
        return (
            is_here
            and all(member in group_of for member in members)
            and len({group_of[member] for member in members}) == 1
        )

    def attached(self) -> bool:
        """Whether new buckets would belong to the core that the trainer uses, not to a later core."""
        is_included = process.is_initialized() and self._process_set.included()
        return is_included and self._generation == process.generation

    def _bucket_for(self, group: int | None, dtype: np.dtype, gpu: int | None, nbytes: int) -> Bucket:
        def make() -> tuple[Bucket, int]:
            size = max(self.bucket_bytes if group is None else self._group_bytes(group, dtype), nbytes)
            if gpu is None:
                return SharedBucket(self._process_set, dtype, size), size
            return DeviceBucket(self._process_set, dtype, size, gpu), size

        return self._filler.bucket_for((group, dtype, gpu), nbytes, make)

    def _group_bytes(self, group: int, dtype: np.dtype) -> int:
        """Bytes for the gradients of a group that have no view yet; an estimate if some shapes are unknown."""
        members = [parameter for parameter, number in self._group_of.items() if number == group]
        shapes = [
            parameter.shape
            for parameter in members
            if _dtype_name(parameter.dtype) == dtype.name and _bucket_of(parameter) is None
        ]
        known = [shape for shape in shapes if shape is not None and all(length > 0 for length in shape)]
        needed = sum(_aligned(math.prod(shape) * dtype.itemsize) for shape in known)
        return needed if len(known) == len(shapes) else needed + self.bucket_bytes

    @staticmethod
    def _fits_bucket(parameter: Parameter) -> bool:
        # Replicas on several devices must be summed first. A reduction by copying sums them while it copies.
        if len(parameter._grad) != 1:
            return False
        gradient = parameter._grad[0]
        dense = gradient.stype == "default" and gradient.size > 0 and len(gradient.shape) > 0
        # Every cpu(n) is the same memory, and MXNet mixes arrays of several cpu(n). A view is always on cpu(0).
        on_device = gradient.context.device_type in ("cpu", "gpu")  # not cpu_pinned or cpu_shared
        return dense and on_device and np.dtype(gradient.dtype).name in DTYPES

    def __reduce__(self) -> tuple:
        # A copy of the trainer has other Parameters, which have no views yet.
        return GradientMemory, (self._process_set, self.bucket_bytes)


def _return_freed_memory() -> None:
    """Return the memory of moved gradients to the system: it is between arrays that stay, where glibc keeps it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have no such function
    if trim is not None:
        trim(0)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _gpu_of(array: NDArray) -> int | None:
    """Number of the GPU that an array is on, or None."""
    return array.context.device_id if array.context.device_type == "gpu" else None


def _dtype_name(dtype: Any) -> str:
    """Name of a Parameter's dtype. numpy lacks bfloat16, which is in no bucket, so any name will do."""
    try:
        return np.dtype(dtype).name
    except TypeError:
        return str(dtype)


def _owner(parameter: Parameter) -> GradientMemory | None:
    reference = _owners.get(parameter)
    return reference() if reference is not None else None


def _bucket_of(parameter: Parameter) -> Bucket | None:
    """The bucket that holds the Parameter's current gradient, or None."""
    if not parameter._grad or len(parameter._grad) > 1:
        return None
    return next((bucket for bucket, place in _places.get(parameter, ()) if place.view is parameter._grad[0]), None)


def _earlier_place(parameter: Parameter, gradient: NDArray, process_set: ProcessSet | None = None) -> Place | None:
    """An earlier place of the Parameter that fits the gradient, with the new values; None if no place fits.

    A network hybridized with static_alloc may still write to an old array, so the Parameter gets the old array back.
    `process_set`: only a place in its memory.
    """
    for bucket, place in _places.get(parameter, ()):
        view = place.view
        alike = type(view) is type(gradient) and view.dtype == gradient.dtype and view.shape == gradient.shape
        is_here = bucket.attached and (process_set is None or bucket.process_set is process_set)
        if alike and is_here and _gpu_of(view) == _gpu_of(gradient):
            view[:] = gradient
            return place
    return None


def _attach(parameter: Parameter, place: Place) -> None:
    """Make a place the Parameter's gradient."""
    parameter._grad = [place.view]
    autograd.mark_variables(parameter._data, parameter._grad, parameter.grad_req)


def _reasons_against(parameters: Sequence[Parameter]) -> dict[Parameter, str]:
    """For each Parameter whose gradient cannot be moved, the reason: the holder of the old memory."""
    if not parameters:
        return {}
    if not references.are_known():
        return dict.fromkeys(parameters, _UNKNOWN)
    held = [parameter for parameter in parameters if _reason_against(parameter)]
    for parameter in held:  # wait for pending operations that hold the arrays; a local variable would hold them too
        wait_to_write(parameter._data[0])
        wait_to_write(parameter._grad[0])
    references.settle(lambda: not any(map(_reason_against, held)))
    reasons = {parameter: _reason_against(parameter) for parameter in held}
    return {parameter: reason for parameter, reason in reasons.items() if reason}


def _reason_against(parameter: Parameter) -> str | None:
    graphs = references.of_variable(parameter._data[0])
    if not graphs:
        return _DETACHED
    if references.of_memory(parameter._grad[0]) > references.of_a_gradient() or _is_kept(parameter):
        return _KEPT
    # A network with static_shape refers to its parameters from the first pass onwards, recorded or not.
    return _RECORDED if graphs > 1 and _born.get(parameter) != _recordings else None


def _is_kept(parameter: Parameter) -> bool:
    """Whether Python has references to the gradient array other than those of the Parameter and this module."""
    gradient = parameter._grad[0]
    ours = 3 + (_bucket_of(parameter) is not None)  # the list, `gradient`, the argument of getrefcount(); the Place
    return sys.getrefcount(gradient) > ours


@patches.replaces(
    "gluon.Parameter._init_grad",
    does="Notes when the arrays were created. Those of a trainer's Parameter become views of its buckets. A Parameter "
    "that moves from CPU to CPU keeps its gradient arrays.",
    **_MOVED,
)
def _init_grad(original: Callable, self: Parameter) -> None:
    before = self._grad
    if before and process.is_initialized() and _has_moved_within_devices(self):
        autograd.mark_variables(self._data, before, self.grad_req)
        _forget_gradients(self)
        return
    original(self)
    _adopt_new_gradients(self, before)


@patches.replaces(
    "gluon.Parameter.cast",
    does="Notes when the arrays were created. Those of a trainer's Parameter become views of its buckets. A cast to "
    "the Parameter's own dtype changes nothing.",
    **_MOVED,
)
def _cast(original: Callable, self: Parameter, dtype: Any) -> None:
    before, weights, symbol = self._grad, self._data, self._var
    original(self, dtype)
    is_same = before and process.is_initialized() and before[0].dtype == self._grad[0].dtype
    if is_same and weights[0].grad is not None:  # a copy of a network has no attached gradients before
        self._data, self._grad, self._var = weights, before, symbol
    _adopt_new_gradients(self, before)


def _adopt_new_gradients(parameter: Parameter, before: list[NDArray] | None) -> None:
    """Note when the Parameter got its gradient arrays, and move them to its trainer's buckets, if they are new."""
    if parameter._grad is None or parameter._grad is before:
        return
    _born[parameter] = None if autograd.is_recording() else _recordings
    owner = _owner(parameter)
    if owner is not None and owner.attached():
        owner.put_in_bucket(parameter)
        return
    # The trainer is gone, perhaps on this rank only: the Parameter gets the same array as where the trainer lives.
    place = _earlier_place(parameter, parameter._grad[0]) if len(parameter._grad) == 1 else None
    if place is not None:
        _attach(parameter, place)


@patches.replaces("gluon.Parameter.reset_ctx", releases=(1,), **_STAYING)
@patches.replaces("gluon.Parameter.reset_device", releases=(2,), **_STAYING)
def _reset_ctx(original: Callable, self: Parameter, *where: Any, **keyword: Any) -> None:
    [device] = where or keyword.values() or [None]
    devices = list(device) if isinstance(device, (list, tuple)) else [device]
    # Several replicas get their mean from MXNet, and copies of networks get attached gradients.
    held = self._data if process.is_initialized() and self._data and len(self._data) == 1 else []
    if [array.context for array in held] == devices and (self._grad is None or held[0].grad is not None):
        _forget_gradients(self)
    else:
        original(self, *where, **keyword)


def _has_moved_within_devices(parameter: Parameter) -> bool:
    """Whether reset_ctx() has given a Parameter new weights, and its gradients are where MXNet would make new ones.

    One worker may call reset_ctx() alone, for example to evaluate the network. Or each worker moves to a cpu(n) of its
    own; every cpu(n) is the same memory. If the gradient arrays stay the same, the trainer sees no change, and does not
    ask the other workers.
    """
    data, gradients = parameter._data, parameter._grad
    if len(data) != len(gradients) or any(array.grad is not None for array in data):
        return False  # an attached gradient: grad_req has changed
    if (data[0].shape, data[0].dtype) != (gradients[0].shape, gradients[0].dtype):
        return False
    if [array.context for array in data] == [gradient.context for gradient in gradients]:
        return True
    return len(data) == 1 and data[0].context.device_type == gradients[0].context.device_type == "cpu"


def _forget_gradients(parameter: Parameter) -> None:
    """Set gradients to zero and stale, as MXNet's new gradient arrays are."""
    for weight, gradient in zip(parameter._data, parameter._grad or ()):
        fill_with_zeros(gradient)
        weight._fresh_grad = False


@patches.replaces(
    "base._LIB.MXAutogradSetIsRecording",
    why="A graph that was recorded before a trainer is created writes to the gradient arrays of that time. All of "
    "MXNet's Python calls this function.",
    does="Counts the recordings that the process has begun.",
    undone_by="nothing",
    makes=True,
)
def _set_recording(original: Callable) -> Callable:
    def set_recording(is_recording: Any, previous: Any) -> int:
        global _recordings
        if getattr(is_recording, "value", is_recording):
            _recordings += 1
        return original(is_recording, previous)

    return set_recording
