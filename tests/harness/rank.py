"""A rank of a pool: a pytest process that runs the tests the controller names, and sends their reports back.

Started as ``python rank.py DIRECTORY pytest-arguments...``. Test files are collected with their first test, so that a
pool imports only what its tests need.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import queue
import shutil
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Client
from pathlib import Path

# Started by its path, this file would find its neighbours as top-level modules; they are members of `harness`.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import pytest  # noqa: E402
from _pytest.runner import runtestprotocol  # noqa: E402

from harness.launcher import rank_of_this_process  # noqa: E402
from harness.marks import parametrize_size, ranks_of  # noqa: E402


class PeerFailure(AssertionError):
    """Raised on all ranks for an example of a hypothesis test that failed on some rank."""


class Controller:
    """The rank's end of the connection to the controller."""

    def __init__(self, directory: Path) -> None:
        self.rank = rank_of_this_process()
        self.requests: queue.Queue = queue.Queue()
        self.capture_manager = None
        self._directory = directory
        self._gathered: queue.Queue = queue.Queue()
        self._connection = Client(str(directory / "socket"), "AF_UNIX")
        self.send("hello", self.rank, os.getpid())
        threading.Thread(target=self._read, name="harness", daemon=True).start()

    def send(self, *message) -> None:
        self._connection.send(message)

    def gather(self, value) -> list:
        """One picklable value of each rank, in the order of ranks; every rank must call it."""
        self.send("gather", value)
        return self._gathered.get()

    def _read(self) -> None:
        while True:
            try:
                kind, *payload = self._connection.recv()
            except (EOFError, OSError):
                shutil.rmtree(self._directory, ignore_errors=True)
                os._exit(1)  # the controller has ended, and nothing needs an answer
            if kind == "gathered":
                self._gathered.put(*payload)
            elif kind == "output":
                capture = self.capture_manager
                self.send("output", *(capture.read_global_capture() if capture else ("", "")))
            else:
                self.requests.put((kind, *payload))


class RankPlugin:
    """The pytest plugin of a rank: fixtures, and a loop of requests instead of a loop over collected tests."""

    def __init__(self, controller: Controller, stacks) -> None:
        self._controller = controller
        self._stacks = stacks
        self._items: dict[str, pytest.Item] = {}
        self._collected: set[str] = set()
        self._collection_errors: dict[str, str] = {}  # file -> why its tests are missing
        self._settings: tuple[tuple[str, str], ...] = ()  # of the package, those of the last test
        self._environment = dict(os.environ)

    @pytest.fixture
    def rank(self) -> int:
        """Rank of this process."""
        return self._controller.rank

    @pytest.fixture
    def gather(self):
        """``gather(value) -> list``: one picklable value of each rank, over the harness's own sockets."""
        return self._controller.gather

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        parametrize_size(metafunc)

    def pytest_collection(self, session: pytest.Session) -> bool:
        return True  # nothing yet: see _find

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._controller.capture_manager = session.config.pluginmanager.getplugin("capturemanager")
        while True:
            kind, *payload = self._controller.requests.get()
            if kind == "exit":
                return True
            # MPI_Init installs its own handlers; restore the handlers that show the Python stack.
            faulthandler.disable()
            faulthandler.enable(self._stacks)
            self._controller.send("done", self._run(session, payload[0]))

    def _run(self, session: pytest.Session, node_id: str) -> list[dict]:
        to_dict = session.config.hook.pytest_report_to_serializable
        item = self._find(session, node_id)
        if item is None:
            why = self._collection_errors.get(node_id.split("::")[0]) or f"{node_id} was not collected in this rank."
            report = pytest.TestReport(node_id, ("", 0, node_id), {}, "failed", why, "call")
            return [to_dict(config=session.config, report=report)]
        self._take_settings(item)
        self._agree_on_examples(item)
        reports = runtestprotocol(item, log=False, nextitem=None)
        left = _process_sets_left()
        if left and all(report.passed for report in reports):
            why = f"{node_id} leaves process sets, with which a later test of these ranks fails: {left}."
            reports.append(pytest.TestReport(node_id, item.location, {}, "failed", why, "teardown"))
        return [to_dict(config=session.config, report=report) for report in reports]

    def _take_settings(self, item: pytest.Item) -> None:
        """Set the variables of the package that a test names; all ranks leave init() for this, if they differ."""
        settings = ranks_of(item).settings
        if settings == self._settings:
            return
        package = sys.modules.get("kvstore_plugin")
        if package is not None and package.is_initialized():
            package.shutdown()
        for name, _ in self._settings:
            os.environ.pop(name)
            if name in self._environment:
                os.environ[name] = self._environment[name]
        os.environ.update(settings)
        self._settings = settings

    def _find(self, session: pytest.Session, node_id: str) -> pytest.Item | None:
        path = node_id.split("::")[0]
        if path not in self._collected:
            for item in session.perform_collect([str(session.config.rootpath / path)], genitems=True):
                self._items[item.nodeid] = item
            self._collected.add(path)
        return self._items.get(node_id)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._collection_errors[report.nodeid] = report.longreprtext

    def _agree_on_examples(self, item: pytest.Item) -> None:
        """Give a hypothesis test one verdict per example, the same on all ranks, so that all draw the same next one.

        Ranks draw alike as long as their examples end alike. An example that fails on one rank only is therefore
        raised on all, as one type from one line, which is how hypothesis tells failures apart.
        """
        handle = getattr(getattr(item, "obj", None), "hypothesis", None)
        if handle is None or getattr(handle, "agreed", False):
            return
        test, gather = handle.inner_test, self._controller.gather

        @functools.wraps(test)
        def agreed(*args, **kwargs):
            __tracebackhide__ = True
            text = passing = None
            try:
                test(*args, **kwargs)
            except Exception as error:
                if type(error).__module__.startswith("hypothesis"):
                    passing = error  # a rejected example: hypothesis's own business, the same on all ranks
                else:
                    text = traceback.format_exc()
            verdicts = gather(text)
            failed = [f"on rank {rank}:\n{verdict}" for rank, verdict in enumerate(verdicts) if verdict]
            if failed:
                raise PeerFailure("\n".join(failed))
            if passing is not None:
                raise passing

        handle.inner_test = agreed
        handle.agreed = True


def _process_sets_left() -> list[tuple[int, ...]]:
    sets = sys.modules.get("kvstore_plugin.coordination.process_sets")
    return [] if sets is None else [known.ranks for known in sets._known.values()]


def _hypothesis_profile() -> None:
    try:
        import hypothesis
    except ImportError:
        return
    # Features that depend on one rank's clock or disk would lead the ranks to different examples.
    hypothesis.settings.register_profile(
        "ranks", deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    hypothesis.settings.load_profile("ranks")


def main() -> int:
    directory = Path(sys.argv[1])
    stacks = (directory / f"stacks.{rank_of_this_process()}").open("w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    controller = Controller(directory)

    class Named:
        """Registers under a name, before conftest.py looks for it."""

        @pytest.hookimpl(tryfirst=True)
        def pytest_addoption(self, pluginmanager) -> None:
            pluginmanager.register(RankPlugin(controller, stacks), "harness-rank")

    _hypothesis_profile()
    code = pytest.main(sys.argv[2:], plugins=[Named()])
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else int(code)


if __name__ == "__main__":
    sys.exit(main())
