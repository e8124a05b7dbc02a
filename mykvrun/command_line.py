"""The options of mykvrun, including those of horovodrun."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Callable

from .errors import LaunchError
from .hosts import parse_hosts, read_hostfile
from .job import Job
from .rank_files import RankFolders
from .restarts import Restarts
from .shown_ranks import parse_ranks

_EPILOG = """examples:
  mykvrun -n 4 python train.py                       4 workers on this host
  mykvrun -H node1:4,node2:4 python train.py         8 workers on two hosts
  mykvrun -n 4 --dry-run python train.py             print the command of mpirun or srun

In an allocation of Slurm the job is started with srun, elsewhere with the mpirun of the MPI that mpi4py uses.
The options of horovodrun are understood too."""

# Options of horovodrun 0.28 about Horovod's internals, by their number of values. They have no effect here.
_HOROVOD_IGNORED = {
    0: [
        "--gloo",
        "--mpi",
        "--disable-cache",
        "--autotune",
        "--no-autotune",
        "--hierarchical-allreduce",
        "--no-hierarchical-allreduce",
        "--hierarchical-allgather",
        "--no-hierarchical-allgather",
        "--mpi-threads-disable",
        "--no-mpi-threads-disable",
        "--log-with-timestamp",
        "--log-without-timestamp",
        "--log-hide-timestamp",
        "--no-log-hide-timestamp",
        "--timeline-mark-cycles",
        "--no-timeline-mark-cycles",
    ],
    1: [
        "--gloo-timeout-seconds",
        "--fusion-threshold-mb",
        "--cycle-time-ms",
        "--cache-capacity",
        "--num-nccl-streams",
        "--thread-affinity",
        "--log-level",
        "--start-timeout",
        "--autotune-log-file",
        "--autotune-warmup-samples",
        "--autotune-steps-per-sample",
        "--autotune-bayes-opt-max-samples",
        "--autotune-gaussian-process-noise",
        # Horovod, too, uses these only for jobs that grow.
        "--elastic-timeout",
        "--reset-limit",
    ],
    2: ["--blacklist-cooldown-range"],
}
# Shells export functions by names such as BASH_FUNC_module%%.
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.%()-]*")
_GROWS = "is Horovod's option to add workers. Use --elastic, and in the script run_elastic(..., grow_to=, hostfile=)."
# Options of horovodrun that cannot be ignored: number of values, and why they are rejected.
_HOROVOD_REFUSED = {
    "--min-np": (1, _GROWS),
    "--max-np": (1, _GROWS),
    "--min-num-proc": (1, _GROWS),
    "--max-num-proc": (1, _GROWS),
    "--host-discovery-script": (1, _GROWS),
    "--slots-per-host": (1, _GROWS),
    "--config-file": (
        1,
        "is not read: its settings are Horovod's. Write those that you need on the command line, such as --timeline "
        "and --stall-check-warning-time-seconds.",
    ),
    "--jsrun": (0, "is not supported: start the job with jsrun itself, like any MPI program."),
}


@dataclass
class Request:
    """A parsed command line: the job, and the launcher's own actions."""

    job: Job
    is_dry_run: bool
    is_check: bool
    is_verbose: bool
    launcher: str
    ignored: list[str]
    timestamps: bool
    folders: RankFolders
    ranks: frozenset[int] | None  # ranks whose output is shown; None: all
    restarts: Restarts
    min_workers: int | None
    caller: int | None  # a pipe that is closed when the caller ends; see `end_with_caller`


def parse(arguments: list[str]) -> Request:
    """Parse a command line; ends the process with a usage message if an option is wrong.

    Raises
    ------
    LaunchError
        An option cannot be fulfilled, or two options exclude each other.
    """
    parser = _parser()
    own, program = _divided(parser, arguments)
    found = parser.parse_args(own)
    if found.check_build:  # Horovod's option, which starts no program
        found.check, program = True, []
        found.workers = found.workers or (None if found.hosts or found.hostfile else 1)
    if not program and not found.check:
        parser.error("no program: mykvrun -n 4 python train.py")
    if found.refused:
        raise LaunchError(f"{found.refused[0]} {_HOROVOD_REFUSED[found.refused[0]][1]}")
    if found.hosts and found.hostfile:
        raise LaunchError("-H and --hostfile must not both be given. Give one of them.")
    if (found.output_filename or found.log_dir) and found.elastic:
        option = "--output-filename" if found.output_filename else "--log-dir"
        raise LaunchError(f"{option} and --elastic must not both be given: ranks of new workers begin at 0 again.")
    if found.max_restarts and found.elastic:
        raise LaunchError(
            "--max-restarts and --elastic must not both be given: a job that continued after a worker died still ends "
            "with an error, so mykvrun cannot tell whether to restart it."
        )
    hosts = parse_hosts(found.hosts) if found.hosts else read_hostfile(found.hostfile) if found.hostfile else []
    job = Job(
        program=program or [sys.executable],
        workers=found.workers,
        hosts=hosts,
        cores_per_worker=found.cores_per_worker,
        threads=found.threads,
        variables=_variables(found),
        elastic=found.elastic,
        tag_output=found.tag_output,
        ssh_port=found.ssh_port,
        ssh_key=found.ssh_identity_file,
        interfaces=",".join(found.network_interfaces) or None,
        tcp_only=found.tcp,
        mpi_arguments=[*_words(found.binding_args, "--binding-args"), *_words(found.mpi_args, "--mpi-args")],
    )
    return Request(
        job,
        is_dry_run=found.dry_run,
        is_check=found.check,
        is_verbose=found.verbose,
        launcher=found.launcher,
        ignored=found.ignored,
        timestamps=found.timestamps,
        folders=RankFolders(found.output_filename, found.log_dir),
        ranks=None if found.ranks is None else parse_ranks(found.ranks, job.workers),
        restarts=Restarts(found.max_restarts, found.restart_pause),
        min_workers=found.min_workers,
        caller=found.caller,
    )


def _divided(parser: argparse.ArgumentParser, arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split the launcher's options from the program and its arguments, in which argparse would find options too."""
    index = 0
    while index < len(arguments) and arguments[index].startswith("-"):
        if arguments[index] == "--":
            return arguments[:index], arguments[index + 1 :]
        option, equals, _ = arguments[index].partition("=")
        action = parser._option_string_actions.get(option)
        if action is None:  # a short option with its value, such as -n4, or a mistake that argparse reports
            index += 1
        else:
            index += 1 + (0 if equals else 1 if action.nargs is None else int(action.nargs))
    return arguments[:index], arguments[index:]


def _words(text: str | None, option: str) -> list[str]:
    try:
        return shlex.split(text or "")
    except ValueError as error:
        raise LaunchError(f"{option} {text}: the words cannot be separated as a shell does ({error}).") from None


def _variables(found: argparse.Namespace) -> dict[str, str | None]:
    """Variables that the options set for all workers."""
    variables: dict[str, str | None] = {}
    if found.library:
        folder = Path(__file__).resolve().parents[1] / f"kvstore_plugin/as_{found.library}"
        given = [text.partition("=")[2] for text in found.env if text.startswith("PYTHONPATH=")]
        paths = [str(folder), *(given or [os.environ.get("PYTHONPATH", "")])]
        found.env.append("PYTHONPATH=" + os.pathsep.join(filter(None, paths)))
    for text in found.env:
        name, equals, value = text.partition("=")
        if not _VARIABLE.fullmatch(name):
            raise LaunchError(f"-x {text}: {name!r} is not the name of a variable. Give -x NAME or -x NAME=VALUE.")
        variables[name] = value if equals else None
    if found.timeline:
        variables["MYKV_TIMELINE"] = str(Path(found.timeline).absolute())
    if found.report is not None:
        variables["MYKV_REPORT"] = found.report
    if found.stall_warn is not None:
        variables["MYKV_STALL_WARN_S"] = found.stall_warn
    if found.stall_abort is not None:
        variables["MYKV_STALL_ABORT_S"] = found.stall_abort
    return variables


def _whole(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least or len(text) > 6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def _positive(text: str) -> int:
    return _whole(text, 1)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 86400")
    return value


class _Note(argparse.Action):
    """Collects the names of ignored options."""

    def __call__(self, _parser, namespace, _values, option=None):  # type: ignore[no-untyped-def]
        getattr(namespace, self.dest).append(option)


class _Version(argparse.Action):
    """Prints the version, and ends the program."""

    def __call__(self, parser, *_):  # type: ignore[no-untyped-def]
        try:
            version = metadata.version("mykv")
        except metadata.PackageNotFoundError:
            version = "of a source tree"
        print(f"mykv {version}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "mykvrun",
        "mykvrun [options] program ...",
        "Start a program in several workers.",
        _EPILOG,
        formatter_class=formatter,
        allow_abbrev=False,  # an abbreviation may be an option of the program or of a later release
    )
    add = parser.add_argument
    add("-n", "-np", "--num-proc", dest="workers", type=_positive, metavar="N", help="number of workers")
    add("-H", "--hosts", metavar="H1:4,H2:4", help="hosts, and how many workers each takes")
    add("-hostfile", "--hostfile", metavar="FILE", help="the same in a file, with lines such as: node1 slots=4")
    add("--cores-per-worker", type=_positive, metavar="N", help="bind each worker to N cores")
    add("--threads", type=_positive, metavar="N", help="OMP_NUM_THREADS of each worker (a worker's share of the cores)")
    add(
        "-x",
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="a variable for all workers, on all hosts",
    )
    add("--as", dest="library", choices=("horovod",), help="import horovod is mykv in the workers")
    add("--elastic", action="store_true", help="let the job go on when a worker dies (Open MPI 5)")
    add("--max-restarts", type=_whole, default=0, metavar="N", help="start a failed job again, at most N times")
    add(
        "--restart-pause",
        type=_seconds,
        default=1.0,
        metavar="S",
        help="seconds before the first restart; then doubled",
    )
    add("--min-workers", type=_positive, metavar="N", help="leave out hosts that do not answer, down to N workers")
    add("--timeline", "--timeline-filename", metavar="FILE", help="record a timeline from init() to the end")
    add(
        "--report", action="store_const", const="1", help="print at the end which worker was slow, and other statistics"
    )
    add("--report-every", dest="report", metavar="S", help="the same, and also every S seconds")
    _add_output(add)
    add("--check", action="store_true", help="run the self-test on all hosts first; without a program nothing else")
    add("--dry-run", action="store_true", help="print the command, and start nothing")
    add("--verbose", action="store_true", help="print the command, and start it")
    add("--launcher", choices=("auto", "mpirun", "srun"), default="auto", help="srun within Slurm, else mpirun (auto)")
    add("-p", "--ssh-port", type=_positive, metavar="PORT", help="port of ssh on the other hosts (Open MPI)")
    add("-i", "--ssh-identity-file", metavar="FILE", help="ssh's private key (Open MPI)")
    interfaces = ("--network-interfaces", "--network-interface", "--nics")
    add(*interfaces, action="append", default=[], metavar="NAMES", help="interfaces that MPI uses")
    add("--tcp", action="store_true", help="MPI uses TCP between hosts, and no faster network")
    add("--mpi-args", metavar="TEXT", help='more options for mpirun or srun: --mpi-args="--mca btl tcp,self"')
    add("--stall-check-warning-time-seconds", dest="stall_warn", metavar="S", help="MYKV_STALL_WARN_S")
    add("--stall-check-shutdown-time-seconds", dest="stall_abort", metavar="S", help="MYKV_STALL_ABORT_S")
    add("-v", "--version", nargs=0, action=_Version, help="print the version of mykv")
    _add_hidden(parser)
    return parser


def _add_output(add: Callable[..., Any]) -> None:
    """Options for the workers' output."""
    add("--tag-output", action="store_true", help="begin each line of output with the rank that wrote it")
    timestamps = ("--prefix-output-with-timestamp", "-prefix-timestamp")
    add(*timestamps, dest="timestamps", action="store_true", help="begin each line of output with the time")
    add("--output-filename", metavar="FOLDER", help="write each rank's output to FOLDER/rank.RANK too")
    add("--log-dir", metavar="FOLDER", help="write each rank's output to the file FOLDER/rank.RANK.log too")
    add("--ranks", "--quiet-except", metavar="RANKS", help="show these ranks, such as 0,3-5, and errors of others")


def _add_hidden(parser: argparse.ArgumentParser) -> None:
    """Options that the help does not show, for command lines of horovodrun and for function_job.py."""

    def add(*names: str, **settings: Any) -> None:
        parser.add_argument(*names, help=argparse.SUPPRESS, **settings)

    add("--no-stall-check", dest="stall_warn", action="store_const", const="0")
    add("--stall-check", dest="stall_warn", action="store_const", const=None)
    add("-cb", "--check-build", action="store_true")
    add("--binding-args")
    add("--caller", type=_whole)
    for values, options in _HOROVOD_IGNORED.items():
        for option in options:
            add(option, dest="ignored", nargs=values, action=_Note, default=[])
    for option, (values, _) in _HOROVOD_REFUSED.items():
        add(option, dest="refused", nargs=values, action=_Note, default=[])
