"""Time of allreduce_grads() for a network's gradients: ``python -m benchmarks.gradients --models resnet50,bert``.

mykv runs with the stock gluon.Trainer ('stock') and with DistributedTrainer ('own'); a peer has one trainer for both.
"""

from __future__ import annotations

from . import cases
from .command_line import measure, parser


def main() -> None:
    """Measure every peer that has a trainer."""
    arguments = parser(__doc__)
    arguments.add_argument("--models", default="resnet50,bert", help="resnet18, resnet50, bert or COUNTxBYTES")
    arguments.add_argument("--dtype", default="float32")
    arguments.add_argument("--step", action="store_true", help="time step() with gradients ready instead")
    given = arguments.parse_args()
    own, stock = ([_case(model, flavour, given) for model in given.models.split(",")] for flavour in ("own", "stock"))
    measure(given, {"mykv": own + stock, "horovod": own, "dist_sync": stock})


def _case(model, flavour, given):
    return cases.step(model, flavour) if given.step else cases.gradients(model, flavour, given.dtype)


if __name__ == "__main__":
    main()
