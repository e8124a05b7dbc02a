"""Starts a new worker: initializes MPI, tells the living workers which process this is, and runs the user's script.

new_workers.py starts this file, not the script itself. MPI_Comm_spawn waits endlessly for a process that ends before it
has initialized MPI. A script may end before that, and its imports take seconds. So this file runs first, and imports
neither kvstore_plugin nor MXNet.

Arguments: a JSON object, which names the script, and then the script's own arguments.
"""

import importlib.util
import json
import os
import runpy
import signal
import sys

TAG_HELLO = 32003  # tag of the message that tells each living worker this process's identity
MARK = "_MYKV_NEW_WORKER"  # variable with the new worker's pid, so that child processes do not count as new workers


def main() -> None:
    """Run the script in this `__main__`."""
    plan = json.loads(sys.argv[1])
    os.environ[MARK] = str(os.getpid())
    for name, value in plan["environment"].items():
        os.environ.setdefault(name, value)
    for path in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if path and path not in sys.path:
            sys.path.insert(1, path)
    watch = importlib.util.spec_from_file_location("_mykv_process_watch", plan["process_watch"])
    module = importlib.util.module_from_spec(watch)
    watch.loader.exec_module(module)

    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    # If MPI_Comm_spawn has failed in the living workers, MPI_Init waits endlessly, and mpirun waits for this process: a
    # signal ends it.
    signal.alarm(plan["wait"])
    try:
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    except MPI.Exception:  # a living worker has died meanwhile; the others start another new worker
        os.kill(os.getpid(), signal.SIGKILL)
    signal.alarm(0)
    parent = MPI.Comm.Get_parent()
    parent.Set_errhandler(MPI.ERRORS_RETURN)
    for rank in range(parent.Get_remote_size()):
        try:
            parent.send(module.this_process(), rank, TAG_HELLO)
        except MPI.Exception:  # the worker has died; the others notice
            continue
    _run(plan["kind"], plan["what"], sys.argv[2:])


def _run(kind: str, what: str, arguments: list) -> None:
    if kind == "module":
        sys.argv = [what, *arguments]
        sys.path[0] = os.getcwd()
        runpy._run_module_as_main(what)
        return
    sys.argv = ["-c" if kind == "code" else what, *arguments]
    sys.path[0] = "" if kind == "code" else os.path.dirname(os.path.realpath(what))
    names = sys.modules["__main__"].__dict__
    for name in [name for name in names if not name.startswith("__")]:
        del names[name]
    names["__doc__"] = None
    if kind == "code":
        del names["__file__"]
        exec(compile(what, "<string>", "exec"), names)
        return
    names["__file__"] = what
    with open(what, "rb") as file:
        text = file.read()
    exec(compile(text, what, "exec"), names)


if __name__ == "__main__":
    main()
