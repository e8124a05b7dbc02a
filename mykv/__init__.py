"""kvstore_plugin under the name of its distribution: ``import mykv`` is ``import kvstore_plugin as mykv``."""

import sys

import kvstore_plugin
from kvstore_plugin import *  # noqa: F403  what type checkers see
from kvstore_plugin import __all__ as __all__
from kvstore_plugin import __version__ as __version__

sys.modules[__name__] = kvstore_plugin
