"""The functions and classes of the compiled core; kvstore_plugin calls them, and programs need none of them."""

from collections.abc import Sequence
from typing import Any, ClassVar, overload

from numpy.typing import NDArray

class Error(RuntimeError):
    code: str
    codes: ClassVar[tuple[str, ...]]
    ranks: tuple[int, ...]

class Work:
    def done(self) -> bool: ...
    def wait(self, timeout: float = -1.0) -> bool: ...

class Group:
    def agreement_traffic(self) -> list[int]: ...
    def allocate(self, nbytes: int) -> Buffer: ...
    def cross_rank(self) -> int: ...
    def cross_size(self) -> int: ...
    def exchange_traffic(self) -> list[int]: ...
    def forget(self, prefix: str) -> None: ...
    def give_up(
        self, name: str, reason: str, code: str = "given_up", ranks: Sequence[int] = ..., least_seconds: float = 0.0
    ) -> None: ...
    def gpu_road(self) -> tuple[bool, bool, str, bool]: ...
    def host_ranks(self) -> list[list[int]]: ...
    def leave(self, reason: str) -> None: ...
    def local_rank(self) -> int: ...
    def local_size(self) -> int: ...
    def push_allgather(
        self, name: str, input: int, output: int, rows: Sequence[int], priority: int = 0, label: str = ""
    ) -> None: ...
    def push_allreduce(
        self,
        name: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        op: str = "sum",
        scale: float = 1.0,
        priority: int = 0,
        label: str = "",
        wire: str = "",
        turn_of: str = "",
    ) -> None: ...
    def push_alltoall(
        self, name: str, input: int, output: int, rows: Sequence[Sequence[int]], priority: int = 0, label: str = ""
    ) -> None: ...
    def push_broadcast(
        self,
        name: str,
        input: int,
        outputs: Sequence[int],
        root: int = 0,
        priority: int = 0,
        label: str = "",
        turn_of: str = "",
    ) -> None: ...
    def push_gather_from_owners(
        self,
        name: str,
        arrays: Sequence[int],
        division: Sequence[tuple[int, int, int, int]],
        priority: int = 0,
        label: str = "",
        turn_of: str = "",
        fenced: Sequence[int] = ...,
    ) -> None: ...
    def push_group(
        self,
        name: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        op: str = "sum",
        scale: float = 1.0,
        priority: int = 0,
        label: str = "",
        wire: str = "",
        turn_of: str = "",
    ) -> None: ...
    def push_reduce_to_owners(
        self,
        name: str,
        arrays: Sequence[int],
        division: Sequence[tuple[int, int, int, int]],
        own: Sequence[int],
        next: Sequence[int] = ...,
        op: str = "sum",
        scale: float = 1.0,
        priority: int = 0,
        label: str = "",
        wire: str = "",
    ) -> None: ...
    def push_reducescatter(
        self,
        name: str,
        input: int,
        output: int,
        op: str = "sum",
        scale: float = 1.0,
        priority: int = 0,
        label: str = "",
        wire: str = "",
        turn_of: str = "",
    ) -> None: ...
    def rank(self) -> int: ...
    def refuse(self, name: str, reason: str, turn_of: str = "") -> None: ...
    def refuse_alltoall(self, name: str, input: int, rows: Sequence[Sequence[int]], reason: str) -> None: ...
    def rejected_callers(self) -> int: ...
    def reserve(self, nbytes: int) -> Buffer: ...
    def shutdown(self) -> None: ...
    def size(self) -> int: ...
    def submit_allreduce(
        self,
        name: str,
        inputs: Sequence[NDArray[Any]],
        outputs: Sequence[NDArray[Any]],
        op: str = "sum",
        scale: float = 1.0,
        priority: int = 0,
        label: str = "",
        wire: str = "",
        turn_of: str = "",
    ) -> Work: ...
    def submit_broadcast(
        self,
        name: str,
        input: NDArray[Any] | None,
        outputs: Sequence[NDArray[Any]],
        root: int = 0,
        priority: int = 0,
        label: str = "",
    ) -> Work: ...
    def submit_bucket(
        self,
        name: str,
        buffer: Buffer,
        begin: int,
        count: int,
        dtype: str,
        layout: str = "",
        op: str = "sum",
        scale: float = 1.0,
        priority: int = 0,
        wire: str = "",
        shards: Sequence[tuple[int, int, int]] = ...,
    ) -> Work: ...
    def submit_on_gpu(
        self,
        name: str,
        kind: str,
        dtype: str,
        shape: Sequence[int],
        memory: dict[str, Any],
        op: str = "sum",
        scale: float = 1.0,
        root: int = 0,
        priority: int = 0,
        label: str = "",
        wire: str = "",
    ) -> Work: ...
    def waiting(self, name: str = "", least_seconds: float = 0.0) -> list[tuple[str, float, list[int], list[int]]]: ...
    def statistics(self) -> dict[str, Any]: ...
    def waiting_for_this(self, names: Sequence[str], turn_of: str = "") -> list[list[int]]: ...
    def why_memory_is_not_shared(self) -> str: ...

class Buffer:
    def commit(self, nbytes: int) -> None: ...
    @property
    def attached(self) -> bool: ...
    @property
    def nbytes(self) -> int: ...

class GpuMemory:
    def __init__(self, device: int, nbytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class PreparedBucket:
    @overload
    def __init__(
        self,
        name: str,
        buffer: Buffer,
        begin: int,
        count: int,
        dtype: str,
        layout: str,
        arrays: Sequence[int],
        op: str = "sum",
        scale: float = 1.0,
        priority: int = 0,
        wire: str = "",
        shards: Sequence[tuple[int, int, int]] = ...,
    ) -> None: ...
    @overload
    def __init__(
        self,
        name: str,
        group: Group,
        memory: GpuMemory,
        begin: int,
        count: int,
        dtype: str,
        layout: str,
        arrays: Sequence[int],
        op: str = "sum",
        scale: float = 1.0,
        priority: int = 0,
        wire: str = "",
        shards: Sequence[tuple[int, int, int]] = ...,
    ) -> None: ...
    def push(self, label: str = "", turn_of: str = "") -> None: ...

class Fence:
    def __init__(self, arrays: Sequence[int], gradients: Sequence[int] = ..., key: int = 0) -> None: ...
    def begin(self) -> None: ...
    def push(self, ends_step: bool = False, broken: bool = False) -> None: ...

def agreement_traffic() -> list[int]: ...
def allocate(nbytes: int) -> Buffer: ...
def attach_mxnet(dl_handle: int, major: int, blocking: bool = False, error_type: Any = None) -> None: ...
def begin_again() -> None: ...
def begin_stall_watch() -> None: ...
def build_info() -> dict[str, Any]: ...
def clipping_factor(squares: float, factor: float, most: float) -> float: ...
def cross_rank() -> int: ...
def cross_size() -> int: ...
def drop_crash_handler_of(library: str) -> bool: ...
def end_failed_exits_by_signal(on: bool) -> None: ...
def end_stall_watch() -> None: ...
def failed_operations() -> int: ...
def failures() -> dict[str, tuple[int, str]]: ...
def finalize_mpi_at_exit() -> None: ...
def find_gpus(cuda: Sequence[str], nccl: Sequence[str]) -> dict[str, Any]: ...
def exchange_traffic() -> list[int]: ...
def forget(prefix: str) -> None: ...
def give_up(
    name: str, reason: str, code: str = "given_up", ranks: Sequence[int] = ..., least_seconds: float = 0.0
) -> None: ...
def gpu_road() -> tuple[bool, bool, str, bool]: ...
def gpus() -> list[list[str]]: ...
def host_ranks() -> list[list[int]]: ...
def init(comm: int, options: dict[str, Any] = ...) -> None: ...
def is_initialized() -> bool: ...
def kernel_path() -> str: ...
def leave(reason: str) -> None: ...
def local_rank() -> int: ...
def local_size() -> int: ...
def lose(reason: str, ranks: Sequence[int] = ...) -> None: ...
def make_group(comm: int, labels: Sequence[int], options: dict[str, Any] = ...) -> Group: ...
def mpi_library_version() -> str: ...
def next_stalls(warn_seconds: float, abort_seconds: float) -> list[tuple[bool, str]] | None: ...
def push_allgather(
    name: str, input: int, output: int, rows: Sequence[int], priority: int = 0, label: str = ""
) -> None: ...
def push_allreduce(
    name: str,
    inputs: Sequence[int],
    outputs: Sequence[int],
    op: str = "sum",
    scale: float = 1.0,
    priority: int = 0,
    label: str = "",
    wire: str = "",
    turn_of: str = "",
) -> None: ...
def push_alltoall(
    name: str, input: int, output: int, rows: Sequence[Sequence[int]], priority: int = 0, label: str = ""
) -> None: ...
def push_broadcast(
    name: str,
    input: int,
    outputs: Sequence[int],
    root: int = 0,
    priority: int = 0,
    label: str = "",
    turn_of: str = "",
) -> None: ...
def push_failing(array: int) -> None: ...
def push_gather_from_owners(
    name: str,
    arrays: Sequence[int],
    division: Sequence[tuple[int, int, int, int]],
    priority: int = 0,
    label: str = "",
    turn_of: str = "",
    fenced: Sequence[int] = ...,
) -> None: ...
def push_clip(arrays: Sequence[int], squares: int, factor: float, most: float, priority: int = 0) -> None: ...
def push_group(
    name: str,
    inputs: Sequence[int],
    outputs: Sequence[int],
    op: str = "sum",
    scale: float = 1.0,
    priority: int = 0,
    label: str = "",
    wire: str = "",
    turn_of: str = "",
) -> None: ...
def push_reduce_to_owners(
    name: str,
    arrays: Sequence[int],
    division: Sequence[tuple[int, int, int, int]],
    own: Sequence[int],
    next: Sequence[int] = ...,
    op: str = "sum",
    scale: float = 1.0,
    priority: int = 0,
    label: str = "",
    wire: str = "",
) -> None: ...
def push_reducescatter(
    name: str,
    input: int,
    output: int,
    op: str = "sum",
    scale: float = 1.0,
    priority: int = 0,
    label: str = "",
    wire: str = "",
    turn_of: str = "",
) -> None: ...
def rank() -> int: ...
def refuse(name: str, reason: str, turn_of: str = "") -> None: ...
def refuse_alltoall(name: str, input: int, rows: Sequence[Sequence[int]], reason: str) -> None: ...
def rejected_callers() -> int: ...
def reserve(nbytes: int) -> Buffer: ...
def pushed_operations() -> int: ...
def push_sum_of_squares(
    pieces: Sequence[tuple[int, int, int]], squares: int, begin: float | None = 0.0, priority: int = 0
) -> None: ...
def select_kernel_path(name: str) -> bool: ...
def set_fork_status(status: int) -> None: ...
def set_step_part(part: str) -> None: ...
def shutdown() -> None: ...
def statistics() -> dict[str, Any]: ...
def step_times() -> dict[str, int]: ...
def size() -> int: ...
def start_timeline(fd: int, rank: int, mark_cycles: bool, zero_ns: int, members: str) -> int: ...
def stop_timeline() -> int: ...
def submit_allreduce(
    name: str,
    inputs: Sequence[NDArray[Any]],
    outputs: Sequence[NDArray[Any]],
    op: str = "sum",
    scale: float = 1.0,
    priority: int = 0,
    label: str = "",
    wire: str = "",
    turn_of: str = "",
) -> Work: ...
def submit_broadcast(
    name: str,
    input: NDArray[Any] | None,
    outputs: Sequence[NDArray[Any]],
    root: int = 0,
    priority: int = 0,
    label: str = "",
) -> Work: ...
def submit_bucket(
    name: str,
    buffer: Buffer,
    begin: int,
    count: int,
    dtype: str,
    layout: str = "",
    op: str = "sum",
    scale: float = 1.0,
    priority: int = 0,
    wire: str = "",
    shards: Sequence[tuple[int, int, int]] = ...,
) -> Work: ...
def submit_on_gpu(
    name: str,
    kind: str,
    dtype: str,
    shape: Sequence[int],
    memory: dict[str, Any],
    op: str = "sum",
    scale: float = 1.0,
    root: int = 0,
    priority: int = 0,
    label: str = "",
    wire: str = "",
) -> Work: ...
def take_failed_updates() -> list[int]: ...
def transports() -> dict[str, str]: ...
def waiting(name: str = "", least_seconds: float = 0.0) -> list[tuple[str, float, list[int], list[int]]]: ...
def waiting_for_this(names: Sequence[str], turn_of: str = "") -> list[list[int]]: ...
def watch(on: bool) -> None: ...
def why_memory_is_not_shared() -> str: ...
def world() -> Group | None: ...
