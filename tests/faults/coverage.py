"""Which tests are to notice a fault of a file: the fast ones of what it does, the likeliest first.

A fault that they do not notice counts as not noticed, even if a slow test would notice it.
"""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).parents[2]

PYTHON = {
    "kvstore_plugin/training/trainer.py": [
        "trainer",
        "trainer_options",
        "several_devices",
        "gradients_after_allreduce",
        "state_file",
        "equivalence",
        "join",
        "process_sets_of_trainers",
        "sparse_reducer",
        "mistakes",
        "clip_global_norm",
    ],
    "kvstore_plugin/gradients/dense_reducer.py": [
        "dense_reducer",
        "trainer",
        "trainer_options",
        "equivalence",
        "several_devices",
        "bucket_memory",
        "process_sets_of_trainers",
        "mistakes",
        "clip_global_norm",
        "statistics",
        "amp",
    ],
    "kvstore_plugin/store/kvstore.py": [
        "kvstore",
        "pushpull",
        "broadcast",
        "classic_calls",
        "bad_input",
        "sharded_optimizer",
        "sparse_store",
        "memory",
        "mistakes",
    ],
    "kvstore_plugin/store/requests.py": [
        "kvstore",
        "pushpull",
        "broadcast",
        "classic_calls",
        "bad_input",
        "sparse_store",
    ],
    "kvstore_plugin/sharded_optimizer/optimizer.py": [
        "sharded_optimizer",
        "partition",
        "state_file",
        "update_order",
        "classic_calls",
        "bad_input",
        "mistakes",
    ],
    "kvstore_plugin/sharded_optimizer/partition.py": ["partition", "sharded_optimizer", "state_file"],
    "kvstore_plugin/gradients/bucket_plan.py": [
        "bucket_plan",
        "bucket_memory",
        "trainer",
        "trainer_options",
        "several_devices",
        "equivalence",
        "deferred_init",
        "sharded_optimizer",
    ],
    "kvstore_plugin/gradients/bucket_memory.py": [
        "bucket_memory",
        "trainer",
        "trainer_options",
        "several_devices",
        "deferred_init",
    ],
    "kvstore_plugin/parameters/deferred_init.py": [
        "deferred_init",
        "broadcast_parameters",
        "check_in_step",
        "trainer",
    ],
    "kvstore_plugin/coordination/deadlock_check.py": [
        "deadlock_check",
        "bad_input",
        "stall_watch",
        "join",
        "check_in_step",
    ],
}

_CORE = ["core_numpy", "full_table", "table_lock", "collectives_random"]
_HOSTS = ["hosts", "core_numpy", "compressed_exchange", "namespaces"]
CPP = {
    "csrc/table/host_table.cpp": [*_CORE, "stall_watch", "statistics", "gpu_nccl"],
    "csrc/runtime/parts.cpp": [*_CORE, "hosts", "gpu_staged"],
    "csrc/runtime/requests.cpp": [*_CORE, "hosts", "stall_watch"],
    "csrc/runtime/sender.cpp": [*_CORE, "hosts"],
    "csrc/runtime/part_events.cpp": [*_CORE, "hosts"],
    "csrc/runtime/runtime_thread.cpp": [*_CORE, "hosts", "stall_watch"],
    "csrc/runtime/ending.cpp": [*_CORE, "hosts", "stall_watch", "departures"],
    "csrc/runtime/runtime.cpp": [*_CORE, "hosts", "stall_watch"],
    "csrc/agreement/agreement.cpp": [*_HOSTS, "stall_watch"],
    "csrc/transport/mpi/slice_exchange.cpp": _HOSTS,
    "csrc/transport/mpi/chunk.cpp": _HOSTS,
    "csrc/table/table_lock.cpp": ["table_lock", *_CORE],
    "csrc/memory/region.cpp": ["region", "memory", "core_numpy"],
}


def tests_of(file: str) -> list[str]:
    """Paths of test files from the root of the repository."""
    found = {path.stem: str(path.relative_to(_ROOT)) for path in _ROOT.glob("tests/*/test_*.py")}
    return [found[f"test_{name}"] for name in {**PYTHON, **CPP}[file]]
