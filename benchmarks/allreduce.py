"""Time of one allreduce against the size of the array: ``python -m benchmarks.allreduce --sizes 4KB,64MB``."""

from __future__ import annotations

from . import cases
from .command_line import measure, numbers, parser

# Here 1 MB is 2^20 bytes.
SIZES = "4KB,32KB,256KB,2MB,16MB,64MB"


def main() -> None:
    """Measure pushpull of every peer."""
    arguments = parser(__doc__)
    arguments.add_argument("--sizes", default=SIZES, help="bytes of the array, such as %(default)s")
    given = arguments.parse_args()
    each = [cases.pushpull(nbytes) for nbytes in numbers(given.sizes)]
    measure(given, dict.fromkeys(("mykv", "horovod", "dist_sync", "mpi"), each))


if __name__ == "__main__":
    main()
