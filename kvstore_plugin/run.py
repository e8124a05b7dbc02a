"""``python -m kvstore_plugin.run`` starts the launcher. ``mykvrun`` is faster: it does not import MXNet."""

import sys

from mykvrun.function_job import run
from mykvrun.main import main

if __name__ == "__main__":
    raise SystemExit(main())

sys.modules[__name__] = run  # type: ignore[assignment]  # importing this module must not replace the function mykv.run
