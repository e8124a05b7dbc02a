"""The options of mykvrun, among them those of horovodrun."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from .errors import LaunchError
from .hosts import parse_hosts, read_hostfile
from .job import Job

_EPILOG = """examples:
  mykvrun -n 4 python train.py                       4 workers on this host
  mykvrun -H node1:4,node2:4 python train.py         8 workers on two hosts
  mykvrun -n 4 --dry-run python train.py             print the command of mpirun or srun

In an allocation of Slurm the job is started with srun, elsewhere with the mpirun of the MPI that mpi4py uses.
The options of horovodrun are understood too."""

# Options of horovodrun that choose how Horovod works inside, with and without a value. They have no effect here.
_HOROVOD_FLAGS = [
    "--gloo",
    "--mpi",
    "--tcp",
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
    "--log-hide-timestamp",
    "--timeline-mark-cycles",
    "--no-timeline-mark-cycles",
]
_HOROVOD_VALUES = [
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
]
_HOROVOD_ELASTIC = [
    "--min-np",
    "--max-np",
    "--min-num-proc",
    "--max-num-proc",
    "--host-discovery-script",
    "--slots-per-host",
]


@dataclass
class Request:
    """A command line: the job, and what the launcher itself does."""

    job: Job
    is_dry_run: bool
    is_check: bool
    is_verbose: bool
    launcher: str
    ignored: list[str]


def parse(arguments: list[str]) -> Request:
    """Read a command line; ends the process with a usage message where an option is wrong.

    Raises
    ------
    LaunchError
        The options cannot be fulfilled together.
    """
    parser = _parser()
    found = parser.parse_args(arguments)
    if not found.program and not found.check:
        parser.error("no program: mykvrun -n 4 python train.py")
    if found.elastic_of_horovod:
        raise LaunchError(
            f"{found.elastic_of_horovod[0]} is Horovod's option to add workers. Use --elastic, and in the script "
            "run_elastic(..., grow_to=, hostfile=)."
        )
    if found.hosts and found.hostfile:
        raise LaunchError("-H and --hostfile must not both be given. Give one of them.")
    hosts = parse_hosts(found.hosts) if found.hosts else read_hostfile(found.hostfile) if found.hostfile else []
    job = Job(
        program=found.program or [sys.executable],
        workers=found.workers,
        hosts=hosts,
        cores_per_worker=found.cores_per_worker,
        threads=found.threads,
        variables=_variables(found),
        elastic=found.elastic,
        tag_output=found.tag_output,
        ssh_port=found.ssh_port,
        ssh_key=found.ssh_identity_file,
        interfaces=found.network_interfaces,
        mpi_arguments=shlex.split(found.mpi_args or ""),
    )
    return Request(job, found.dry_run, found.check, found.verbose, found.launcher, found.ignored)


def _variables(found: argparse.Namespace) -> dict[str, str | None]:
    """Variables that the options set for all workers."""
    variables: dict[str, str | None] = {}
    for text in found.env:
        name, equals, value = text.partition("=")
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


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0 or len(text) > 6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


class _Note(argparse.Action):
    """Collects the names of options that are only noted."""

    def __call__(self, _parser, namespace, _values, option=None):  # type: ignore[no-untyped-def]
        getattr(namespace, self.dest).append(option)


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "mykvrun",
        "mykvrun [options] program ...",
        "Start a program in several workers.",
        _EPILOG,
        formatter_class=formatter,
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
    add("--elastic", action="store_true", help="let the job go on when a worker dies (Open MPI 5)")
    add("--timeline", "--timeline-filename", metavar="FILE", help="record a timeline from init() to the end")
    add(
        "--report", action="store_const", const="1", help="print at the end which worker was slow, and other statistics"
    )
    add("--report-every", dest="report", metavar="S", help="the same, and also every S seconds")
    add("--tag-output", action="store_true", help="begin each line of output with the rank that wrote it")
    add("--check", action="store_true", help="run the self-test on all hosts first; without a program nothing else")
    add("--dry-run", action="store_true", help="print the command, and start nothing")
    add("--verbose", action="store_true", help="print the command, and start it")
    add("--launcher", choices=("auto", "mpirun", "srun"), default="auto", help="srun within Slurm, else mpirun (auto)")
    add("-p", "--ssh-port", type=_positive, metavar="PORT", help="port of ssh on the other hosts (Open MPI)")
    add("-i", "--ssh-identity-file", metavar="FILE", help="ssh's private key (Open MPI)")
    add("--network-interfaces", "--network-interface", "--nics", metavar="NAMES", help="interfaces that MPI uses")
    add("--mpi-args", metavar="TEXT", help='more options for mpirun or srun: --mpi-args="--mca btl tcp,self"')
    add("--stall-check-warning-time-seconds", dest="stall_warn", metavar="S", help="MYKV_STALL_WARN_S")
    add("--stall-check-shutdown-time-seconds", dest="stall_abort", metavar="S", help="MYKV_STALL_ABORT_S")
    hidden = argparse.SUPPRESS
    add("--no-stall-check", dest="stall_warn", action="store_const", const="0", help=hidden)
    for option in _HOROVOD_FLAGS:
        add(option, dest="ignored", nargs=0, action=_Note, default=[], help=hidden)
    for option in _HOROVOD_VALUES:
        add(option, dest="ignored", action=_Note, default=[], help=hidden)
    for option in _HOROVOD_ELASTIC:
        add(option, dest="elastic_of_horovod", action=_Note, default=[], help=hidden)
    add("program", nargs=argparse.REMAINDER, help=hidden)
    return parser
