"""``make sanitize``: the model, then the core under ThreadSanitizer, then under AddressSanitizer and its kin.

``--quick`` is what CI does: the model's small configurations and one round of the ranks that are threads.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import build
import model

# Tests that never import MXNet, which is not in this environment: arguments of pytest.
_RANKS = [f"tests/core/test_{name}.py" for name in ("core_numpy", "kernels", "compressed_exchange", "hosts", "inbox")]
_RANKS += ["tests/world/test_stall_watch.py"]
_RANKS += [f"tests/gpu/test_gpu_{name}.py" for name in ("staged", "nccl", "bridge")]
_RANKS += ["-m", "ranks", "-k", "not training_on_two_hosts and not pushpull_on_two_hosts"]
_ALONE = ["tests/core/test_compressors.py", "tests/core/test_table_lock.py"]
# LeakSanitizer looks through the process at its exit, and at times crashes in that.
_NOT_LOOKED = "LeakSanitizer has encountered a fatal error"
_MOST_NOT_LOOKED = 3
_TIME_LIMIT = 3600  # seconds for one step


def _step(name: str, command: list[str], env: dict[str, str] | None = None) -> bool:
    print(f"== {name}", flush=True)
    start = time.monotonic()
    code = subprocess.run(command, env={**os.environ, **(env or {})}, timeout=_TIME_LIMIT, check=False).returncode
    verdict = {0: "passed", model.SKIPPED: "SKIPPED"}.get(code, "FAILED")
    print(f"== {name}: {verdict}, {time.monotonic() - start:.0f} s", flush=True)
    return verdict != "FAILED"


def _threads(rounds: int) -> bool:
    program = build.build_ranks("thread")
    return _step(
        "ranks as threads, ThreadSanitizer",
        [str(program), "--rounds", str(rounds)],
        {"TSAN_OPTIONS": "halt_on_error=0 exitcode=66 second_deadlock_stack=1"},
    )


def _addresses(rounds: int) -> bool:
    for other in build.ROOT.glob("kvstore_plugin/_core*.so"):
        sys.exit(f"{other} would be imported in place of the module with AddressSanitizer: remove it first.")
    build.build_module()
    logs = build.ROOT / build.folder("address") / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for old in logs.iterdir():
        old.unlink()
    program = build.build_ranks("address")
    undefined = {"UBSAN_OPTIONS": "print_stacktrace=1"}
    good = _step(
        "ranks as threads, AddressSanitizer, UndefinedBehaviorSanitizer, LeakSanitizer",
        [str(program), "--rounds", str(rounds)],
        {"ASAN_OPTIONS": "detect_stack_use_after_return=1", **undefined},
    )
    libraries = ["libasan.so", "libubsan.so", "libstdc++.so"]
    preload = [
        subprocess.run(["gcc", f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
        for name in libraries
    ]
    # Without detect_stack_use_after_return: GCC before 13.3 puts variables of 64 bytes' alignment, as the kernels of
    # AVX-512 have them, at other addresses then, and stores into them crash (GCC's bug 110027).
    # The launcher inherits all of this; what it leaks goes to logs that are not looked at, and leaves its status alone.
    env = {
        "LD_PRELOAD": " ".join(preload),
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(build.ROOT),  # the package's sources: this environment has only the compiled core
        "ASAN_OPTIONS": f"exitcode=0:log_path={logs}/log:log_exe_name=1:detect_stack_use_after_return=0",
        "LSAN_OPTIONS": f"suppressions={build.ROOT / build.HERE}/leaks.supp:print_suppressions=0",
        **undefined,
    }
    for name, selection in (
        ("tests of several ranks", _RANKS),
        ("tests of compressors and of the table's lock", _ALONE),
    ):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selection]
        good &= _step(f"{name}, AddressSanitizer, UndefinedBehaviorSanitizer, LeakSanitizer", command, env)
    texts = [path.read_text(errors="replace") for path in sorted(logs.iterdir()) if path.name.startswith("log.python")]
    reports = [text for text in texts if _NOT_LOOKED not in text]
    print(*reports, sep="\n")
    unknown = len(texts) - len(reports)
    print(f"== {len(reports)} reports; of {unknown} processes LeakSanitizer could not look for leaks", flush=True)
    return good and not reports and unknown <= _MOST_NOT_LOOKED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="what CI does")
    parser.add_argument("--rounds", type=int, default=10, help="of each scenario of the ranks that are threads")
    parser.add_argument("only", nargs="*", choices=["model", "thread", "address", []], help="all, where none is named")
    arguments = parser.parse_args()
    os.chdir(build.ROOT)
    steps = arguments.only or (["model", "thread"] if arguments.quick else ["model", "thread", "address"])
    rounds = 1 if arguments.quick else arguments.rounds
    good = True
    if "model" in steps:
        script = str(build.HERE / "model.py")
        good &= _step("the protocol's model", [sys.executable, script, *([] if arguments.quick else ["--all"])])
    if "thread" in steps:
        good &= _threads(rounds)
    if "address" in steps:
        good &= _addresses(rounds)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
