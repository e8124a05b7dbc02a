"""PowerSGD: a communication hook that sends each gradient matrix as the product of two narrow matrices.

(Vogels, Karimireddy and Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization, 2019.)

A gradient of shape (n, ...) is a matrix M of n rows; each worker adds the error of earlier steps to it. With a
matrix Q of r columns, the workers average P = M Q, make its columns orthonormal, average Q = transposed(M) P, and use
P transposed(Q) as the mean of M. The next step begins with this Q.

All workers must get the same bits. P and Q are averages, so their bits are equal. But sums of products may be rounded
differently by another type of CPU or another number of threads. So rank 0 of the process set broadcasts its products of
the columns of P before they are used. All other computations with P and Q are element-wise, and these are rounded in
the same way on all machines.
"""

from __future__ import annotations

import logging
import weakref
import zlib
from typing import BinaryIO, Callable, NamedTuple, Sequence

import numpy as np

from ..collectives.reduce import broadcast_, grouped_allreduce_
from ..collectives.reduce_ops import Sum
from ..compat import arrays
from ..compat.arguments import whole_number
from ..compat.mxnet import NDArray, Parameter, finite_flags, mx
from ..sharded_optimizer import atomic_file
from ..world import process, training_warnings
from .communication_hook import GradientBucket

# Gram-Schmidt subtracts the earlier columns from a column of P. If less than this share of its squared length is left,
# the rest is a rounding error, since P has about 7 digits; such a column is replaced by zeros.
_DEPENDENT = 1e-12

_log = logging.getLogger("kvstore_plugin")


class _State(NamedTuple):
    """The state of PowerSGD for a gradient. The arrays are written in place, in the update of a step.

    Attributes
    ----------
    name : str
        The parameter's name.
    error : NDArray, shape (n, m)
        The part of this worker's gradients that earlier steps have left out.
    q : NDArray, shape (m, r)
        The matrix Q of the last step; the same on all workers.
    first_q : NDArray, shape (m, r)
        The random matrix Q of the first step; the same on all workers.
    """

    name: str
    error: NDArray
    q: NDArray
    first_q: NDArray


class _Matrix(NamedTuple):
    """A gradient in one step."""

    gradient: NDArray  # an array of mx.nd in the gradient's own shape and dtype
    state: _State
    values: NDArray  # shape (n, m): the gradient plus the error


class _Fresh(NamedTuple):
    """A state's new values from one step."""

    state: _State
    error: NDArray
    q: NDArray


class _Step:
    """The new states from a step, for the buckets of a process set. Called after the step's updates.

    A step that fails, or whose gradients are not finite, changes no state.
    """

    def __init__(self, when_updated: Callable[[], None]) -> None:
        self._when_updated = when_updated
        self._fresh: list[_Fresh] = []
        self._finite: list[NDArray] = []  # for each bucket: 1 if its gradients are finite, else 0
        self._parameters: list[Parameter] = []  # a parameter of each bucket

    def add(self, bucket: GradientBucket, fresh: Sequence[_Fresh]) -> None:
        """Add the states of a bucket whose gradients were reduced."""
        self._fresh.extend(fresh)
        self._finite.extend(finite_flags([_real(array) for array in bucket.arrays if arrays.kind(array) == "float"]))
        self._parameters.append(bucket.parameters[0])

    def __call__(self) -> None:
        self._when_updated()
        flags = [*map(_is_reduced, self._parameters), *self._finite]
        good: dict[mx.Context, NDArray] = {}
        for state, error, q in self._fresh:
            at = error.context
            if at not in good:
                good[at] = _are_all_set([_at(at, flag) for flag in flags])
            mx.nd.where(_repeated(good[at], q.shape[0]), q, state.q, out=state.q)
            mx.nd.where(_repeated(good[at], error.shape[0]), error, state.error, out=state.error)


# When the user reads the error of a failed step, the engine clears it for all arrays (fence.py). Operations that have
# not begun by then run with inputs that were never written. So each operation between the gradient and where() writes
# into zeros, which mean "do not change the state". Other arrays may hold any values, even NaN.


def _is_reduced(parameter: Parameter) -> NDArray:
    """An array: not 0 if the gradient was reduced; 0 if its step has failed, even after the error was raised.

    The operation that reads the gradient does not run after a failure. It precedes the fence after the updates, which
    raises the error.
    """
    gradient = parameter._grad[0].as_nd_ndarray()
    size = mx.nd.zeros((1,), ctx=gradient.context, dtype="int64")
    mx.nd.size_array(gradient, out=size)
    flag = mx.nd.zeros((1,), ctx=gradient.context)
    return mx.nd.cast(size, dtype="float32", out=flag)


def _at(context: mx.Context, flag: NDArray) -> NDArray:
    return flag if flag.context == context else flag.copyto(mx.nd.zeros((1,), ctx=context, dtype=flag.dtype))


def _are_all_set(flags: Sequence[NDArray]) -> NDArray:
    """A flag that is 0 if any of these flags is 0."""
    result = flags[0]
    for flag in flags[1:]:
        both = mx.nd.zeros((1,), ctx=result.context)
        result = mx.nd.broadcast_logical_and(result, flag, out=both)
    return result


def _repeated(flag: NDArray, count: int) -> NDArray:
    return mx.nd.tile(flag, reps=(count,), out=mx.nd.zeros((count,), ctx=flag.context))


def _real(array: NDArray) -> NDArray:
    """The array in a dtype that numpy knows."""
    plain = array.as_nd_ndarray()
    return plain.astype("float32") if np.dtype(plain.dtype).kind == "V" else plain


class PowerSGD:
    """A communication hook that sends gradient matrices as products of two narrow matrices, with error feedback.

    Pass a separate object to each trainer: ``DistributedTrainer(..., communication_hook=PowerSGD())``. For a gradient
    of shape (n, ...) with n * m elements, workers send (n + m) * rank numbers, and rank * rank numbers of float64.
    Gradients of one dimension, and gradients that have fewer numbers than this, are averaged without compression. The
    difference between a gradient and its product is kept, and added to the gradient of the next step. This state takes
    as much memory as the gradients, and twice as much within a step. It changes when the trainer updates the
    parameters. So a step that fails, that AMP skips or that has a gradient which is not finite changes no state.

    Parameters
    ----------
    rank : int, optional
        The number of columns, at least 1.
    seed : int, optional
        Seed of the random matrices in the first step. Must be the same on all workers.

    Raises
    ------
    TypeError, ValueError
        An argument is not an int or is too small.

    Notes
    -----
    Vogels, Karimireddy and Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization, 2019.

    Examples
    --------
    >>> hook = mykv.PowerSGD(rank=2)
    >>> trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", communication_hook=hook)
    >>> with autograd.record():
    ...     loss = loss_of(net(images), labels).mean()
    >>> loss.backward()
    >>> trainer.step(1)
    >>> hook.save_states(f"powersgd{mykv.rank()}.states")  # a file for each worker
    >>> hook.load_states(f"powersgd{mykv.rank()}.states")
    """

    def __init__(self, rank: int = 2, seed: int = 0) -> None:
        self.rank = whole_number("rank", rank, 1)
        self.seed = whole_number("seed", seed, 0)
        self._states: weakref.WeakKeyDictionary[Parameter, _State] = weakref.WeakKeyDictionary()
        self._generation = 0
        self._loaded: dict[str, np.ndarray] = {}  # arrays from load_states() that are not yet used
        self._checks_loaded = False  # True from load_states() to the first update: the file must have each state

    def __call__(self, bucket: GradientBucket) -> None:
        """Reduce a bucket. Returns at once."""
        if self._generation != process.generation:  # after a new init(), ranks may have different matrices
            self._checks_loaded &= not self._states  # if there are states, the loaded arrays were used
            self._states.clear()
            self._generation = process.generation
        plain, matrices = [], []
        step = bucket._when_updated.setdefault(self, _Step(self._end_check))
        for name, parameter, given in zip(bucket.names, bucket.parameters, bucket.arrays):
            gradient = given.as_nd_ndarray()
            if self._compresses(gradient):
                matrices.append(_matrix(gradient, self._state_of(name, parameter, gradient)))
            else:
                plain.append(gradient)
        if not matrices:
            bucket.allreduce_()
            step.add(bucket, [])
            return
        size = bucket.process_set.size()
        how = {
            "op": Sum,
            "postscale_factor": 1.0 / size,
            "process_set": bucket.process_set,
            "priority": bucket.priority,
        }
        factor = bucket.scale * size  # converts means to the trainer's scale
        left = [mx.nd.dot(matrix.values, matrix.state.q) for matrix in matrices]
        grouped_allreduce_([*left, *plain], **how)
        for gradient in plain if factor != 1.0 else ():
            gradient *= factor
        fresh = []
        for width in sorted({product.shape[1] for product in left}):
            chosen = [number for number, product in enumerate(left) if product.shape[1] == width]
            fresh += self._reduce(bucket, [matrices[at] for at in chosen], [left[at] for at in chosen], factor, how)
        step.add(bucket, fresh)

    def _reduce(
        self, bucket: GradientBucket, matrices: Sequence[_Matrix], left: Sequence[NDArray], factor: float, how: dict
    ) -> list[_Fresh]:
        """Average Q and set the gradients, for matrices with the same number of columns. `left`: the averages of P."""
        basis = _Basis(left, bucket)
        right = [mx.nd.dot(matrix.values, p, transpose_a=True) for matrix, p in zip(matrices, basis.columns)]
        grouped_allreduce_(right, **how)
        fresh = []
        for number, (matrix, p, q) in enumerate(zip(matrices, basis.columns, right)):
            mean = _product(p, q)
            random = mx.nd.broadcast_mul(_row(basis.dropped, number).astype(q.dtype), matrix.state.first_q)
            fresh.append(_Fresh(matrix.state, matrix.values - mean, q + random))
            result = mean if factor == 1.0 else mean * factor
            arrays.copy(result.reshape(matrix.gradient.shape), matrix.gradient)
        return fresh

    def _compresses(self, gradient: NDArray) -> bool:
        if len(gradient.shape) < 2 or gradient.size == 0 or arrays.kind(gradient) != "float":
            return False
        rows = gradient.shape[0]
        return (rows + gradient.size // rows) * self.rank < gradient.size

    def _state_of(self, name: str, parameter: Parameter, gradient: NDArray) -> _State:
        """The state of a gradient; a new state at first, and after its shape, dtype or device has changed."""
        rows = gradient.shape[0]
        shape, columns = (rows, gradient.size // rows), min(self.rank, rows, gradient.size // rows)
        dtype = np.float64 if arrays.dtype_name(gradient.dtype) == "float64" else np.float32
        state = self._states.get(parameter)
        if (
            state is None
            or (state.name, state.error.shape, state.q.shape[1]) != (name, shape, columns)
            or (state.error.dtype, state.error.context) != (dtype, gradient.context)
        ):
            random = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
            first = random.standard_normal((shape[1], columns)).astype(dtype)
            made = [
                self._loaded_or(f"{name}/error", np.zeros(shape, dtype)),
                self._loaded_or(f"{name}/q", first),
                first,
            ]
            self._loaded.pop(f"{name}/error", None)
            self._loaded.pop(f"{name}/q", None)
            state = _State(name, *(mx.nd.array(array, ctx=gradient.context, dtype=dtype) for array in made))
            self._states[parameter] = state
        return state

    def _loaded_or(self, key: str, default: np.ndarray) -> np.ndarray:
        loaded = self._loaded.get(key)
        if loaded is not None and loaded.shape == default.shape:
            return loaded
        if self._checks_loaded:
            found = "nothing" if loaded is None else f"an array of shape {loaded.shape}"
            raise ValueError(
                f"PowerSGD needs an array of shape {default.shape} as {key!r}, but load_states() has read {found}. "
                "Load a file of the same network and the same rank."
            )
        return default

    def _end_check(self) -> None:
        """After the first update since load_states(): drop unused states, with a warning."""
        if self._checks_loaded and self._loaded:
            names = ", ".join(sorted({key.rpartition("/")[0] for key in self._loaded}))
            training_warnings.warn(
                "PowerSGD.load_states() has read states of gradients that the trainer does not compress, and forgets "
                "them: %s. These parameters are frozen, or the file is of another network.",
                names,
            )
            self._loaded = {}
        self._checks_loaded = False

    def save_states(self, fname: str) -> None:
        """Write this worker's state to a file, atomically. Waits for the steps so far.

        Workers have different states, so each worker needs a separate file, in addition to the trainer's states.

        Parameters
        ----------
        fname : str
            For example ``f"power-sgd-{rank()}.npz"``.

        Raises
        ------
        OSError
            The file cannot be written. An existing file is unchanged.
        """
        values = self._values()

        def fill(file: BinaryIO) -> None:
            np.savez(file, **values)

        atomic_file.write(fname, fill)

    def load_states(self, fname: str) -> None:
        """Load a state that save_states() has written on the worker with this rank. The next step uses it.

        The next step raises a ValueError if the file has no state for a gradient, or a state of another shape: the file
        belongs to another network or to another `rank`. If the file has states for gradients that the trainer does not
        compress, they are ignored with a warning.

        Raises
        ------
        OSError, ValueError
            The file cannot be read, or save_states() has not written it.
        """
        with np.load(fname, allow_pickle=False) as file:
            loaded = {key: file[key] for key in file.files}
        if not all(key.endswith(("/error", "/q")) for key in loaded):
            raise ValueError(f"{fname} is not a file of PowerSGD.save_states(). Load a file that it has written.")
        self._states.clear()
        self._loaded, self._checks_loaded = loaded, bool(loaded)

    def _values(self) -> dict[str, np.ndarray]:
        values = dict(self._loaded)
        for state in self._states.values():
            values[f"{state.name}/error"] = state.error.asnumpy()
            values[f"{state.name}/q"] = state.q.asnumpy()
        return values

    def __getstate__(self) -> dict:
        # A copy of a trainer has new Parameters with the same names, so the copy finds its states by name.
        loaded = {"_loaded": self._values(), "_checks_loaded": self._checks_loaded}
        return {"rank": self.rank, "seed": self.seed, **loaded}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update({"_checks_loaded": False, **state}, _states=weakref.WeakKeyDictionary(), _generation=0)

    def __repr__(self) -> str:
        return f"PowerSGD(rank={self.rank}, seed={self.seed})"


class _Basis:
    """Orthonormal columns for several matrices P with the same number of columns; the same bits on all workers.

    Gram-Schmidt in terms of the products of columns, in float64: column j of the result is the sum over l of
    ``factors[j][l]`` times column l of P.

    Attributes
    ----------
    columns : list of NDArray
        Of the shapes of the matrices. A column that depends on the columns before it is replaced by zeros.
    dropped : NDArray of float64, shape (number of matrices, columns)
        1 for a column that was replaced by zeros, otherwise 0.
    """

    def __init__(self, left: Sequence[NDArray], bucket: GradientBucket) -> None:
        wide = [array.astype("float64") for array in left]
        grams = mx.nd.stack(*[mx.nd.dot(array, array, transpose_a=True) for array in wide])
        process_set = bucket.process_set
        broadcast_(grams, process_set.ranks[0], process_set=process_set, priority=bucket.priority)
        width = left[0].shape[1]
        gram = [[_entry(grams, row, column) for column in range(width)] for row in range(width)]
        factors, dropped = _gram_schmidt(gram)
        self.dropped = mx.nd.concat(*dropped, dim=1)
        self.columns = [
            mx.nd.concat(*[_combined(one, some, number) for some in factors], dim=1).astype(given.dtype)
            for number, (one, given) in enumerate(zip(wide, left))
        ]


def _gram_schmidt(gram: Sequence[Sequence[NDArray]]) -> tuple[list[list[NDArray]], list[NDArray]]:
    """The factors of the columns, and for each column whether it was dropped; all of shape (matrices, 1)."""
    factors: list[list[NDArray]] = []
    dropped = []
    for j, square in enumerate(gram[place][place] for place in range(len(gram))):
        rest, column = square, [mx.nd.zeros_like(square) for _ in range(j)]
        for before in factors:
            along = _sum([factor * gram[row][j] for row, factor in enumerate(before)])
            rest = rest - along * along
            for row, factor in enumerate(before):
                column[row] = column[row] - along * factor
        depends = rest <= square * _DEPENDENT
        length = mx.nd.sqrt(mx.nd.where(depends, mx.nd.ones_like(rest), rest))
        keeps = 1.0 - depends
        factors.append([factor * keeps / length for factor in [*column, mx.nd.ones_like(rest)]])
        dropped.append(depends)
    return factors, dropped


def _matrix(gradient: NDArray, state: _State) -> _Matrix:
    values = arrays.with_dtype_of(state.error, gradient.reshape(state.error.shape))
    return _Matrix(gradient, state, values + state.error)


def _entry(grams: NDArray, row: int, column: int) -> NDArray:
    """An element of each matrix, of shape (matrices, 1)."""
    return grams.slice_axis(axis=1, begin=row, end=row + 1).slice_axis(axis=2, begin=column, end=column + 1).flatten()


def _row(array: NDArray, number: int) -> NDArray:
    return array.slice_axis(axis=0, begin=number, end=number + 1)


def _column(array: NDArray, number: int) -> NDArray:
    return array.slice_axis(axis=1, begin=number, end=number + 1)


def _sum(terms: Sequence[NDArray]) -> NDArray:
    """The sum, added in the order of the terms."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _combined(matrix: NDArray, factors: Sequence[NDArray], number: int) -> NDArray:
    """The sum of the first columns of a matrix, each times its factor for the matrix with this number."""
    return _sum([mx.nd.broadcast_mul(_column(matrix, at), _row(factor, number)) for at, factor in enumerate(factors)])


def _product(p: NDArray, q: NDArray) -> NDArray:
    """P times the transposed Q, added column by column in their order.

    A dot product of one column is one multiplication for each element, and faster than broadcast_mul.
    """
    rows = q.transpose()
    total = mx.nd.dot(_column(p, 0), _row(rows, 0))
    for column in range(1, p.shape[1]):
        total += mx.nd.dot(_column(p, column), _row(rows, column))
    return total
