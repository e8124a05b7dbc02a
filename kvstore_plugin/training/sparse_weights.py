"""Parameters whose values are row_sparse, such as those of gluon.contrib.nn.SparseEmbedding.

With MXNet's own stores such a Parameter holds the rows of the last batch only, and a server all of them. There are no
servers here: each worker holds all rows, as it does of a dense Parameter, and the store or trainer that is asked for
some of them (row_sparse_pull) takes them from there. What is saved by this storage type is work, not memory.
"""

from __future__ import annotations

from typing import Any

from ..compat.mxnet import NDArray, Parameter


class Listed:
    """A row_sparse Parameter whose list_data() works; MXNet's own refuses, so that nobody misses the store."""

    def __init__(self, parameter: Parameter) -> None:
        self._parameter = parameter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter, name)

    def list_data(self) -> list[NDArray]:
        """The arrays themselves, one for each device."""
        return self._parameter._check_and_get(self._parameter._data, list)
