"""Makes a script of the fixture ``mpirun`` print its Python stacks on SIGUSR1, without a line in the script itself."""

import faulthandler
import signal

faulthandler.register(signal.SIGUSR1, all_threads=True)
