"""What programs import from Horovod."""

from kvstore_plugin import *  # noqa: F403
