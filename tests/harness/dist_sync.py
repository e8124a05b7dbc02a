"""MXNet's own parameter server, dist_sync, on this machine, for comparison with the store 'mykv'."""

from __future__ import annotations

import contextlib
import socket

# Schedulers and servers run inside `import mxnet`, which needs numpy.bool, removed in newer releases of numpy.
_SERVER = "import numpy\nnumpy.bool = bool\nimport mxnet"


def run(mpirun, workers: int, script: str, *arguments: str, timeout: float = 120.0) -> None:
    """Run a script as the workers of dist_sync, with a scheduler and a server, and wait until all have succeeded.

    Parameters
    ----------
    mpirun : harness.script.MpiRun
        The fixture.
    workers : int
        Number of processes of the script.
    script, *arguments
        As for the fixture.
    timeout : float
        In seconds, for all of it.
    """
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": "1",
    }
    others = [mpirun.start(0, _SERVER, env={**common, "DMLC_ROLE": role}) for role in ("scheduler", "server")]
    started = [mpirun.start(0, script, *arguments, env={**common, "DMLC_ROLE": "worker"}) for _ in range(workers)]
    for one in started + others:
        result = one.wait(timeout)
        assert result.code == 0, result.text
