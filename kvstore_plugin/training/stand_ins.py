"""Stand-ins for Parameters in a trainer's list while MXNet's own code updates the Parameters."""

from __future__ import annotations

from typing import Any

from ..compat.mxnet import NDArray, Parameter


class _LeftOut:
    """Replaces a Parameter that the update must not touch."""

    grad_req = "null"
    _data = _grad = None


LEFT_OUT = _LeftOut()


class Listed:
    """Replaces a Parameter with row_sparse values, so that list_data() works: MXNet's own list_data() expects a store.

    With MXNet's own stores such a Parameter (of gluon.contrib.nn.SparseEmbedding, say) holds the rows of the last batch
    only, and a server holds all rows. Without servers each worker holds all rows, as it does for a dense Parameter, and
    row_sparse_pull of the store or trainer copies rows from the worker's own array. So this storage type saves work,
    not memory.
    """

    def __init__(self, parameter: Parameter) -> None:
        self._parameter = parameter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter, name)

    def list_data(self) -> list[NDArray]:
        """The whole arrays, one for each device."""
        return self._parameter._check_and_get(self._parameter._data, list)
