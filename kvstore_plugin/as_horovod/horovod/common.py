"""The module horovod.common, and at the same time each of its submodules."""

import sys

from kvstore_plugin import *  # noqa: F403
from mxnet.base import MXNetError as HorovodInternalError  # noqa: F401


def check_extension(*_):
    """Do nothing: in Horovod this raises an error if the extension of a framework was not built."""


def extension_available(name, verbose=False):
    """Whether the extension of a framework was built; true for MXNet only."""
    return name == "mxnet"


def gpu_available(name, verbose=False):
    """Whether MXNet sees a GPU."""
    from mxnet.context import num_gpus

    return num_gpus() > 0


def is_iterable(value):
    """Whether a value is an iterable but not a str."""
    return hasattr(value, "__iter__") and not isinstance(value, str)


def num_rank_is_power_2(number):
    """Whether a number of ranks is a power of two."""
    return number > 0 and number & (number - 1) == 0


def split_list(values, number):
    """Split a list into parts whose lengths differ by at most one."""
    short, longer = divmod(len(values), number)
    starts = [part * short + min(part, longer) for part in range(number + 1)]
    return [values[start:stop] for start, stop in zip(starts, starts[1:])]


for _name in ("basics", "exceptions", "process_sets", "util"):
    sys.modules[f"{__name__}.{_name}"] = globals()[_name] = sys.modules[__name__]
