"""Layers that compute across workers."""

from .collective_blocks import AllGather as AllGather
from .collective_blocks import AllReduce as AllReduce
from .collective_blocks import AllToAll as AllToAll
from .collective_blocks import Broadcast as Broadcast
from .collective_blocks import ReduceScatter as ReduceScatter
