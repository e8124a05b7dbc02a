"""``python -m kvstore_plugin.run``: the launcher ``mykvrun``, which starts sooner, since it imports no MXNet."""

from mykvrun.main import main

if __name__ == "__main__":
    raise SystemExit(main())
