"""The harness itself: a hang, a crash or a failure on one rank is one failed test; no process remains."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from harness import launcher
from harness.marks import long
from harness.processes import is_alive
from harness.several_hosts import Hosts

pytest_plugins = "pytester"

_TESTS = str(Path(__file__).parents[1])


@pytest.fixture
def inner(pytester, monkeypatch):
    """Run pytest, with the harness installed, on a file of its own."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeconftest(f"import sys; sys.path.insert(0, {_TESTS!r})\nfrom harness import pytest_configure")

    def run(source: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(test_inner="import os, signal, sys, time\nimport pytest\n" + source)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments, timeout=120)

    return run


def _processes_with(text: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if text in line:
                found.append(line)
    return found


def test_runs_once_per_size_in_all_ranks(inner, tmp_path):
    result = inner(
        f"""
        @pytest.mark.ranks(1, 2, 3)
        def test_it(rank, size, gather, tmp_path):
            assert gather(rank) == list(range(size))
            open({str(tmp_path)!r} + f"/{{size}}-{{rank}}", "w").close()
        """.replace("\n        ", "\n"),
        "-v",
    )
    result.assert_outcomes(passed=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-0", "2-0", "2-1", "3-0", "3-1", "3-2"]


def test_ranks_of_one_size_live_on_between_tests(inner):
    result = inner(
        """
pids = []
@pytest.mark.ranks(2)
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_it(turn):
    pids.append(os.getpid())
    assert pids == [os.getpid()] * (turn + 1)
"""
    )
    result.assert_outcomes(passed=3)


def test_the_default_of_pytest_timeout_does_not_concern_ranks(inner):
    result = inner(
        """
@pytest.mark.ranks(2)
def test_it():
    time.sleep(3)
""",
        "-o",
        "timeout=2",
    )
    result.assert_outcomes(passed=1)


def test_settings_of_the_package_need_no_other_ranks_but_a_shutdown_between_them(inner, monkeypatch):
    monkeypatch.setenv("MYKV_EXIT_WAIT_S", "7")
    result = inner(
        """
import types
said = []
package = types.SimpleNamespace(is_initialized=lambda: True)
names = ("MYKV_EXIT_WAIT_S", "MYKV_PART_BYTES")
package.shutdown = lambda: said.append((os.getpid(), *map(os.environ.get, names)))
sys.modules["kvstore_plugin"] = package

@pytest.mark.ranks(2)
@pytest.mark.parametrize("turn", [0, 1])
def test_none(turn):
    assert os.environ["MYKV_EXIT_WAIT_S"] == "7" and said == []

@pytest.mark.ranks(2, env={"MYKV_EXIT_WAIT_S": "3"})
def test_wait():
    assert os.environ["MYKV_EXIT_WAIT_S"] == "3" and "MYKV_PART_BYTES" not in os.environ
    assert said == [(os.getpid(), "7", None)]

@pytest.mark.ranks(2, env={"MYKV_EXIT_WAIT_S": "3", "MYKV_PART_BYTES": "4096"})
def test_both():
    assert (os.environ["MYKV_EXIT_WAIT_S"], os.environ["MYKV_PART_BYTES"]) == ("3", "4096")
    assert said == [(os.getpid(), "7", None), (os.getpid(), "3", None)]

@pytest.mark.ranks(2, env={"MYKV_PART_BYTES": "4096"})
def test_the_variable_of_the_user_comes_back():
    assert (os.environ["MYKV_EXIT_WAIT_S"], os.environ["MYKV_PART_BYTES"]) == ("7", "4096") and len(said) == 3
"""
    )
    result.assert_outcomes(passed=5)


def test_failure_on_one_rank_fails_the_test_with_its_values(inner):
    result = inner(
        """
@pytest.mark.ranks(3)
def test_bad(rank):
    print("said by", rank)
    value = rank * 10
    assert value != 10

@pytest.mark.ranks(3)
def test_good(rank): pass
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*rank 1 of 3*", "*assert 10 != 10*", "*Captured stdout call, rank 1*", "said by 1"])
    result.stdout.no_fnmatch_line("*rank 0 of 3*")
    result.stdout.fnmatch_lines(["FAILED*test_bad*rank 1*assert 10 != 10*"])


def test_failure_of_every_rank_shows_every_rank(inner):
    result = inner("@pytest.mark.ranks(2)\ndef test_bad(rank):\n    raise ValueError(f'no {rank}')\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*rank 0 of 2*", "*ValueError: no 0*", "*rank 1 of 2*", "*ValueError: no 1*"])


def test_hang_fails_one_test_with_stacks_and_output_of_the_hung_rank(inner):
    began = time.monotonic()
    result = inner(
        """
def stuck_here():
    time.sleep(600)

@pytest.mark.ranks(2, timeout=60)
def test_start_of_the_ranks(): pass  # on a busy machine longer than the limit of the test that hangs

@pytest.mark.ranks(2, timeout=3)
def test_hang(rank):
    print("before the hang")
    if rank == 1:
        stuck_here()

@pytest.mark.ranks(2)
def test_good(rank): pass
"""
    )
    assert time.monotonic() - began < 60
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*rank 1 did not finish*", "before the hang*", "*stuck_here*"])
    assert not _processes_with("test_hang")


def test_hang_in_c_code_that_holds_the_interpreter_is_ended_too(inner):
    result = inner(
        """
import ctypes
@pytest.mark.ranks(2, timeout=60)
def test_start_of_the_ranks(): pass  # on a busy machine longer than the limit of the test that hangs

@pytest.mark.ranks(2, timeout=3)
def test_hang(rank):
    ctypes.PyDLL(None).pause()  # PyDLL keeps the GIL
    while True:
        ctypes.PyDLL(None).pause()

@pytest.mark.ranks(2)
def test_good(rank): pass
"""
    )
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*rank 0 did not finish*", "*in test_hang*"])


def test_ranks_waiting_for_a_failed_one_do_not_use_up_the_time_limit(inner):
    began = time.monotonic()
    result = inner(
        """
@pytest.mark.ranks(2, timeout=100)
def test_bad(rank, gather):
    assert rank == 1, "the cause"
    gather(rank)
"""
    )
    assert time.monotonic() - began < 40
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*the cause*", "*rank 1 did not finish*", "FAILED*rank 0*the cause*"])


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_crash_fails_one_test(inner, number):
    result = inner(
        f"""
@pytest.mark.ranks(2)
def test_crash(rank, gather):
    if rank == 1:
        os.kill(os.getpid(), {int(number)})
    gather(rank)

@pytest.mark.ranks(2)
def test_good(rank): pass
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*rank 1 died*", "FAILED*rank 1 died*"])
    if number == signal.SIGSEGV:
        result.stdout.fnmatch_lines(["*in test_crash*"])


def test_exit_of_a_rank_with_code_zero_is_a_failure(inner):
    result = inner("@pytest.mark.ranks(2)\ndef test_exit(rank):\n    os._exit(0)\n")
    result.assert_outcomes(failed=1)


def test_error_in_a_fixture_is_an_error_of_the_test(inner):
    result = inner(
        """
@pytest.fixture
def broken(rank):
    assert rank == 0
@pytest.mark.ranks(2)
def test_it(broken): pass
"""
    )
    result.assert_outcomes(errors=1)


def test_skip_and_expected_failure_are_kept(inner):
    result = inner(
        """
@pytest.mark.ranks(2)
def test_skip(): pytest.skip("no")
@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True)
def test_xfail(): assert False
@pytest.mark.ranks(2)
def test_half(rank):
    if rank: pytest.skip("only here")
"""
    )
    result.assert_outcomes(skipped=1, xfailed=1, failed=1)
    result.stdout.fnmatch_lines(["*Skipped on ranks [[]1[]] only*"])


@pytest.mark.long
def test_module_that_cannot_be_imported_in_the_ranks_fails_its_test_only(inner):
    result = inner(
        """
if os.environ.get("IN_RANK"):
    raise RuntimeError("not here")
@pytest.mark.ranks(2, env={"IN_RANK": "1"})
def test_it(): pass
@pytest.mark.ranks(2)
def test_good(): pass
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*RuntimeError: not here*"])


def test_each_environment_is_a_pool_of_its_own_and_two_live_at_a_time(inner, tmp_path):
    result = inner(
        """
@pytest.mark.ranks(1, 2)
def test_without(): assert "COLOUR" not in os.environ

@pytest.mark.ranks(2, env={"COLOUR": "blue"})
def test_blue(): assert os.environ["COLOUR"] == "blue"

@pytest.mark.ranks(2, env={"COLOUR": "red"})
def test_red(rank):
    assert os.environ["COLOUR"] == "red"
    mpiruns = [pid for pid in os.listdir("/proc") if pid.isdigit() and is_ours(pid)]
    assert len(mpiruns) == 2

def is_ours(pid):
    try:
        return any("rank.py" in word for word in words(pid)) and parent(pid) == controller()
    except OSError:
        return False

def controller():
    # What lies between the pytest above and this rank differs from MPI to MPI.
    pid = os.getppid()
    while "-mpytest" not in words(pid):
        pid = parent(pid)
    return pid

def words(pid):
    return open(f"/proc/{pid}/cmdline").read().split("\\0")

def parent(pid):
    return int(open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[1])
"""
    )
    result.assert_outcomes(passed=4)


def test_hypothesis_draws_the_same_examples_on_all_ranks(inner):
    pytest.importorskip("hypothesis")
    result = inner(
        """
from hypothesis import given, strategies
@pytest.mark.ranks(2)
def test_same(gather):
    drawn = []
    @given(strategies.lists(strategies.integers()))
    def draw(values): drawn.append(values)
    draw()
    assert len(drawn) > 50
    first, second = gather(drawn)
    assert first == second

seen = []
@pytest.mark.ranks(2)
@given(value=strategies.integers(0, 1000))
def test_shrinks_together(rank, gather, value):
    first, second = gather(value)
    assert first == second, "out of step"
    assert rank == 0 or value < 100
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    text = result.stdout.str()
    assert "out of step" not in text.replace('"out of step"', "")
    assert "value=100," in text, "the failure of rank 1 was not shrunk to its smallest example"
    assert "on rank 1:" in text


def test_a_test_that_runs_alone_overlaps_no_other_of_any_worker(inner, tmp_path):
    pytest.importorskip("xdist")
    times = tmp_path / "times"
    result = inner(
        f"""
def take(name):
    begin = time.monotonic()
    time.sleep(0.3)
    with open({str(times)!r}, "a") as file:
        file.write(f"{{name}} {{begin}} {{time.monotonic()}}\\n")

@pytest.mark.parametrize("number", range(12))
def test_beside_others(number): take("any")

@pytest.mark.alone
@pytest.mark.parametrize("number", range(2))
def test_alone(number): take("alone")

@pytest.mark.alone
@pytest.mark.ranks(1)
def test_ranks_alone(rank): take("alone")
""",
        "-n3",
    )
    result.assert_outcomes(passed=15)
    taken = [(name, float(begin), float(end)) for name, begin, end in map(str.split, times.read_text().splitlines())]
    overlaps = [
        {one[0], other[0]}
        for number, one in enumerate(taken)
        for other in taken[:number]
        if one[1] < other[2] and other[1] < one[2]
    ]
    assert {"any"} in overlaps and all("alone" not in names for names in overlaps), taken


def test_plain_tests_and_their_fixtures_mix_with_tests_of_ranks(inner):
    result = inner(
        """
@pytest.fixture(scope="module")
def resource(): return object()
def test_plain(resource): pass
@pytest.mark.ranks(2)
def test_ranks(resource): pass
def test_plain_again(resource): pass
"""
    )
    result.assert_outcomes(passed=3)


@pytest.mark.parametrize(
    "number, workers",
    [
        *[(number, "0") for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)],
        long(signal.SIGINT, "2"),
        long(signal.SIGTERM, "2"),
        (signal.SIGKILL, "2"),
    ],
)
def test_nothing_is_left_when_pytest_is_ended(pytester, tmp_path, number, workers):
    if workers != "0":
        pytest.importorskip("xdist")
    pytester.makeconftest(f"import sys; sys.path.insert(0, {_TESTS!r})\nfrom harness import pytest_configure")
    mark = tmp_path / "pids"
    pytester.makepyfile(
        f"""
        import os, time, pytest
        @pytest.mark.ranks(2)
        def test_long(rank, gather):
            gather(0)
            with open({str(mark)!r}, "a") as file:
                file.write(f"{{os.getpid()}}\\n")
            time.sleep(600)
        """
    )
    folder = Path(tempfile.mkdtemp(prefix="t-"))  # not tmp_path, too long for the address of a Unix socket
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(["-n", workers] if workers != "0" else [])],
        cwd=str(pytester.path),
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # A script's background job ignores SIGINT, and so would its child processes.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        pids = _await(lambda: mark.exists() and len(mark.read_text().split()) == 2 and mark.read_text().split())
        process.send_signal(number)
        process.wait(40)  # pytest-xdist gives its workers ten seconds
        _await(lambda: not any(is_alive(int(pid)) for pid in pids))
        _await(lambda: not list(folder.glob("ranks-*")))
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _await(condition, timeout: float = 30.0):
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return value


def test_mpirun_returns_code_and_outputs(mpirun):
    result = mpirun(
        2,
        """
        import sys
        print("out of", sys.argv[1])
        print("to stderr", file=sys.stderr)
        sys.exit(3)
        """,
        "argument",
    )
    assert result.code == 3
    assert "out of argument" in result.stdout
    assert "to stderr" in result.stderr
    assert 0 < result.seconds < 30


def test_mpirun_that_hangs_fails_with_stacks_and_leaves_nothing(mpirun):
    running = mpirun.start(2, "import time\ndef stuck():\n    print('in', flush=True)\n    time.sleep(600)\nstuck()\n")
    running.wait_for("in")
    with pytest.raises(pytest.fail.Exception, match="in stuck"):
        running.wait(timeout=1)
    assert running.members() == []


@pytest.mark.skipif(not launcher.is_open_mpi(), reason="other launchers keep no files under their process id")
@pytest.mark.parametrize("hosts", [1, 2])
def test_killed_launchers_are_not_in_the_way_of_later_ones(mpirun, hosts):
    per_host = [2 // hosts] * hosts
    with Hosts(hosts) as up:
        if hosts > 1:
            up.require_network()
        running = up.start(mpirun, per_host, "import time\nprint('in', flush=True)\ntime.sleep(600)")
        running.wait_for("in")
        own = _launchers_folders(running.directory)
        for pid in running.members():
            os.kill(pid, signal.SIGKILL)
        running.wait(20)
        running.kill()
    # Files with this run's name are removed with it. With a common folder for all runs, one in a few thousand launchers
    # got the process id of a dead launcher, and only reported that its listener thread had failed to start.
    assert own and not own & _launchers_folders(Path(tempfile.gettempdir()))


@pytest.mark.skipif(not launcher.is_open_mpi(), reason="these are files of Open MPI's")
def test_files_through_which_messages_go_are_of_one_launch(mpirun):
    """In /dev/shm they have names that another job may have too, and then both crash."""
    script = """
    import os, re
    from mpi4py import MPI
    MPI.COMM_WORLD.Barrier()
    files = set(re.findall(r"\\S+/sm_segment\\S+", open("/proc/self/maps").read()))
    print(len(files), {os.path.dirname(file) for file in files} == {os.getcwd()})
    """
    result = mpirun(2, script)
    assert result.stdout == "2 True\n2 True\n", result.text


def _launchers_folders(directory: Path) -> set[str]:
    return {path.name for name in ("ompi.*[0-9]", "prte*.*[0-9]") for path in directory.glob(name)}


def test_mpirun_with_no_ranks_is_plain_python(mpirun):
    result = mpirun(0, "import os; print(sorted(v for v in os.environ if 'COMM_WORLD_SIZE' in v))")
    assert (result.code, result.stdout) == (0, "[]\n"), result.text


def test_mpirun_has_the_variables_it_was_given(mpirun, monkeypatch):
    monkeypatch.setenv("LANG", "C")
    result = mpirun(
        2, "import os; print(os.environ['COLOUR'], 'LANG' in os.environ)", env={"COLOUR": "red", "LANG": None}
    )
    assert result.stdout.splitlines() == ["red False"] * 2, result.text
