"""The launcher: ``mykvrun -n 4 python train.py`` starts the mpirun or srun that belongs to this environment's MPI.

It imports neither MXNet nor the core, so it starts at once. It starts no daemons: mpirun or srun runs the job, and
``--dry-run`` prints the command of mpirun or srun.
"""
