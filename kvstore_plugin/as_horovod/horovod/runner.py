"""The function horovod.run, also known as horovod.runner.run."""

import sys

from mykvrun import function_job


def run(
    func,
    args=(),
    kwargs=None,
    num_proc=None,
    min_num_proc=None,
    max_num_proc=None,
    slots=None,
    reset_limit=None,
    cooldown_range=None,
    hosts=None,
    hostfile=None,
    start_timeout=None,
    ssh_port=None,
    ssh_identity_file=None,
    disable_cache=None,
    output_filename=None,
    verbose=None,
    use_gloo=None,
    use_mpi=None,
    mpi_args=None,
    network_interfaces=None,
    executable=None,
    np=None,
    min_np=None,
    max_np=None,
    network_interface=None,
    env=None,
):
    """Call a function in several workers: `mykv.run` with the arguments of horovod.run.

    Arguments that choose how Horovod works inside have no effect: `reset_limit`, `cooldown_range`, `start_timeout`,
    `disable_cache`, `use_gloo` and `use_mpi`. Arguments that would add workers raise mykvrun's error.
    """
    if executable not in (None, sys.executable):
        raise ValueError(
            f"horovod.run(executable={executable!r}): mykv's workers run with this Python, {sys.executable}."
        )
    interfaces = network_interfaces or network_interface
    valued = {
        "--min-num-proc": min_num_proc or min_np,
        "--max-num-proc": max_num_proc or max_np,
        "--slots-per-host": slots,
        "--ssh-port": ssh_port,
        "--ssh-identity-file": ssh_identity_file,
        "--output-filename": output_filename,
        "--network-interfaces": interfaces if isinstance(interfaces, (str, type(None))) else ",".join(interfaces),
    }
    options = [word for option, value in valued.items() if value is not None for word in (option, str(value))]
    options += [f"--mpi-args={mpi_args}"] if mpi_args else []
    options += ["--verbose"] if verbose else []
    workers = num_proc or np or (None if hosts or hostfile else 1)
    return function_job.run(func, args, kwargs, workers, hosts, hostfile=hostfile, env=env, options=options)
