"""Which tests are to notice a fault of a file: the fast ones of what it does, the likeliest first.

A fault that they do not notice counts as not noticed, even if a slow test would notice it.
"""

from __future__ import annotations

PYTHON = {
    "kvstore_plugin/training/trainer.py": [
        "trainer",
        "trainer_options",
        "equivalence",
        "join",
        "process_sets_of_trainers",
    ],
    "kvstore_plugin/gradients/reducer.py": [
        "trainer",
        "equivalence",
        "several_devices",
        "adoption",
        "process_sets_of_trainers",
    ],
    "kvstore_plugin/store/kvstore.py": [
        "store",
        "pushpull",
        "broadcast",
        "classic_calls",
        "store_optimizer",
        "sparse_store",
    ],
    "kvstore_plugin/store/requests.py": [
        "store",
        "pushpull",
        "broadcast",
        "classic_calls",
        "bad_input",
        "sparse_store",
    ],
    "kvstore_plugin/sharded_optimizer/optimizer.py": [
        "store_optimizer",
        "sharding",
        "optimizer_states",
        "update_order",
    ],
    "kvstore_plugin/sharded_optimizer/partition.py": ["sharding", "store_optimizer", "optimizer_states"],
    "kvstore_plugin/gradients/bucket_plan.py": ["adoption", "trainer", "several_devices", "equivalence", "deferred"],
    "kvstore_plugin/gradients/bucket_memory.py": ["adoption", "trainer", "several_devices", "deferred"],
    "kvstore_plugin/parameters/deferred_init.py": ["deferred", "broadcast_parameters", "trainer"],
    "kvstore_plugin/coordination/deadlock_check.py": ["bad_input", "stall", "join", "in_step"],
}

_CORE = ["core_numpy", "full_table", "table_lock", "collectives_random"]
_HOSTS = ["hosts", "core_numpy", "compressed_exchange", "namespaces"]
CPP = {
    "csrc/table/host_table.cpp": [*_CORE, "stall"],
    "csrc/runtime/parts.cpp": [*_CORE, "hosts"],
    "csrc/runtime/requests.cpp": [*_CORE, "hosts"],
    "csrc/runtime/sender.cpp": [*_CORE, "hosts"],
    "csrc/runtime/part_events.cpp": [*_CORE, "hosts"],
    "csrc/runtime/runtime_thread.cpp": [*_CORE, "hosts", "stall"],
    "csrc/runtime/ending.cpp": [*_CORE, "hosts", "stall", "departures"],
    "csrc/runtime/runtime.cpp": [*_CORE, "hosts", "stall"],
    "csrc/agreement/agreement.cpp": [*_HOSTS, "stall"],
    "csrc/transport/mpi/slice_exchange.cpp": _HOSTS,
    "csrc/transport/mpi/chunk.cpp": _HOSTS,
    "csrc/table/table_lock.cpp": ["table_lock", *_CORE],
    "csrc/memory/region.cpp": ["region", "memory", "core_numpy"],
}


def tests_of(file: str) -> list[str]:
    """Paths of test files."""
    return [f"tests/test_{name}.py" for name in {**PYTHON, **CPP}[file]]
