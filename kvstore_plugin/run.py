"""``python -m kvstore_plugin.run``: the launcher ``mykvrun``, which starts faster, without importing MXNet."""

import sys

from mykvrun.function_job import run
from mykvrun.main import main

if __name__ == "__main__":
    raise SystemExit(main())

sys.modules[__name__] = run  # type: ignore[assignment]  # `mykv.run` stays the function where this module is imported
