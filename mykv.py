"""kvstore_plugin under the name of its distribution: ``import mykv`` is ``import kvstore_plugin as mykv``."""

import sys

import kvstore_plugin

sys.modules[__name__] = kvstore_plugin
