"""``python -m mykvrun``: the same as the command ``mykvrun``."""

from .main import main

if __name__ == "__main__":
    raise SystemExit(main())
