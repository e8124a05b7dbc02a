"""Starts one measured process: python run_worker.py BACKEND JOB.json

The source tree goes to the end of the search path, so that an installed kvstore_plugin is measured rather than
a package in the tree, and so that the environments of peers, where nothing of ours is installed, find the workers.
"""

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    sys.path.remove(str(HERE))
    sys.path.append(str(HERE.parent))
    runpy.run_module(f"benchmarks.workers.{sys.argv[1]}", run_name="__main__", alter_sys=True)
