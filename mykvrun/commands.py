"""The command of mpirun or srun that starts a job, with each launcher's own options."""

from __future__ import annotations

import os
from typing import Mapping, NamedTuple

from .errors import LaunchError
from .job import Job
from .mpi import INTEL_MPI, MPICH, OPEN_MPI, Mpi

_TCP_ONLY = {
    OPEN_MPI: {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^openib,uct,ofi,usnic,ugni,portals4", "NCCL_IB_DISABLE": "1"},
    MPICH: {"FI_PROVIDER": "tcp", "UCX_TLS": "tcp,sm,self", "NCCL_IB_DISABLE": "1"},
    INTEL_MPI: {"I_MPI_OFI_PROVIDER": "tcp", "FI_PROVIDER": "tcp", "NCCL_IB_DISABLE": "1"},
}


class Command(NamedTuple):
    """A command, and the variables that it needs in addition to this environment's."""

    arguments: list[str]
    variables: dict[str, str]


def mpirun_command(job: Job, mpi: Mpi) -> Command:
    """The command of this environment's mpirun.

    Raises
    ------
    LaunchError
        The job needs a feature that this MPI lacks.
    """
    if job.workers is None:
        raise LaunchError("The number of workers is missing. Give it with -n, or with -H HOST:WORKERS.")
    if mpi.kind == OPEN_MPI:
        return _open_mpi(job, mpi)
    if job.elastic:
        raise LaunchError(
            f"--elastic needs Open MPI 5, whose mpirun has --with-ft ulfm, but this environment has {mpi.kind}."
        )
    return _hydra(job, mpi)


def _open_mpi(job: Job, mpi: Mpi) -> Command:
    if job.elastic and mpi.major and mpi.major < 5:
        raise LaunchError(
            f"--elastic needs Open MPI 5, whose mpirun has --with-ft ulfm, but this is Open MPI {mpi.major}."
        )
    arguments = [mpi.mpirun]
    if os.geteuid() == 0:
        arguments.append("--allow-run-as-root")
    arguments += ["-n", str(job.workers)]
    if job.hosts:
        arguments += ["-H", ",".join(f"{host.name}:{host.slots}" for host in job.hosts)]
    if job.elastic:
        arguments += ["--with-ft", "ulfm"]
    cores = job.bound_cores()
    if job.outnumbers_cores():
        arguments.append("--oversubscribe")
    if not job.binds_itself:
        is_bound = cores and not job.outnumbers_cores()
        arguments += ["--map-by", f"slot:PE={cores}"] if is_bound else ["--bind-to", "none"]
    if job.tag_output or job.reading:
        tag = {"pieces": "tag-fullname:raw", "lines": "tag-fullname"}.get(job.reading, "tag")
        arguments += ["--output", tag] if mpi.major >= 5 else ["--tag-output"]
    arguments += _open_mpi_network(job, is_prrte=mpi.major >= 5)
    variables = _variables(job, mpi, job.share_of_cores())
    if not job.is_local:
        for name in job.forwarded(variables):
            arguments += ["-x", name]
    return Command([*arguments, *job.mpi_arguments, *job.program], variables)


def _variables(job: Job, mpi: Mpi, cores: int | None, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment variables that the workers get. If `job.tcp_only` is set, they also restrict MPI to TCP."""
    return {**(_TCP_ONLY[mpi.kind] if job.tcp_only else {}), **job.environment(cores, environment)}


def _open_mpi_network(job: Job, is_prrte: bool) -> list[str]:
    """Options for ssh and network interfaces; Open MPI 5 uses PRRTE's launcher."""
    arguments = []
    of_launcher = "--prtemca" if is_prrte else "--mca"
    if job.ssh_port or job.ssh_key:
        arguments += [of_launcher, "plm_ssh_agent" if is_prrte else "plm_rsh_agent", " ".join(job.ssh())]
    if job.interfaces:
        arguments += ["--mca", "btl_tcp_if_include", job.interfaces]
        arguments += [of_launcher, "prte_if_include" if is_prrte else "oob_tcp_if_include", job.interfaces]
    return arguments


def _hydra(job: Job, mpi: Mpi) -> Command:
    """Command for MPICH and Intel MPI, which share the process manager Hydra."""
    arguments = [mpi.mpirun, "-n", str(job.workers)]
    variables = _variables(job, mpi, job.share_of_cores())
    if job.hosts and mpi.kind == INTEL_MPI:
        counts = {host.slots for host in job.hosts}
        if len(counts) > 1:
            raise LaunchError(
                "Intel MPI's mpirun starts the same number of workers on each host. Give all hosts the same number."
            )
        arguments += ["-hosts", ",".join(host.name for host in job.hosts), "-ppn", str(counts.pop())]
    elif job.hosts:
        arguments += ["-hosts", ",".join(f"{host.name}:{host.slots}" for host in job.hosts)]
    cores = None if job.outnumbers_cores() else job.bound_cores()
    if job.binds_itself:
        pass
    elif mpi.kind == INTEL_MPI:
        variables.update({"I_MPI_PIN_DOMAIN": str(cores)} if cores else {"I_MPI_PIN": "0"})
    else:
        arguments += ["-bind-to", f"core:{cores}" if cores else "none"]
    if job.reading:
        arguments += ["-prepend-pattern", f"{job.mark}%r:"]
    elif job.tag_output:
        arguments.append("-prepend-rank")
    if job.ssh_port or job.ssh_key:
        raise LaunchError(f"{mpi.kind}'s mpirun has no option for ssh's port or key: write them into ~/.ssh/config.")
    if job.interfaces:
        arguments += ["-iface", job.interfaces]
    if not job.is_local:
        arguments += ["-genvlist", ",".join(job.forwarded(variables))]
    return Command([*arguments, *job.mpi_arguments, *job.program], variables)


def inside_slurm(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this runs in an allocation of Slurm (sbatch, salloc), but not in a step that srun has started."""
    in_allocation = "SLURM_JOB_ID" in environment or "SLURM_JOBID" in environment
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    # Batch scripts and interactive shells are steps with special numbers, higher than those of any step of srun.
    is_step = step.isdigit() and int(step) < 0xFFFFFFF0
    return in_allocation and not is_step


def srun_command(job: Job, mpi: Mpi, srun: str, environment: Mapping[str, str] = os.environ) -> Command:
    """The command of srun.

    Raises
    ------
    LaunchError
        The job needs a feature that srun lacks.
    """
    arguments = [srun, "--mpi=" + ("pmix" if mpi.kind == OPEN_MPI else "pmi2"), "--kill-on-bad-exit=1"]
    if job.workers is not None:
        arguments.append(f"--ntasks={job.workers}")
    if job.hosts:
        counts = {host.slots for host in job.hosts}
        if len(counts) > 1:
            raise LaunchError("srun starts the same number of workers on each host. Give all hosts the same number.")
        arguments += [f"--nodelist={','.join(host.name for host in job.hosts)}", f"--ntasks-per-node={counts.pop()}"]
    text = environment.get("SLURM_CPUS_PER_TASK", "")
    cores = job.cores_per_worker or (int(text) if text.isdigit() else None)
    if cores:
        arguments.append(f"--cpus-per-task={cores}")  # since Slurm 22.05 srun does not inherit it from sbatch
    if job.tag_output or job.reading:
        arguments.append("--label")
    if job.ssh_port or job.ssh_key or job.interfaces:
        raise LaunchError(
            "srun uses neither ssh nor chosen interfaces: leave these options out, or add --launcher mpirun."
        )
    variables = _variables(job, mpi, cores, environment)
    if mpi.kind == OPEN_MPI and "PMIX_MCA_psec" not in environment:
        # Slurm's PMIx offers munge too. Without this, a PMIx that lacks it warns on each worker, as PyPI's Open MPI.
        variables["PMIX_MCA_psec"] = "native"
    return Command([*arguments, "--export=ALL", *job.mpi_arguments, *job.program], variables)
