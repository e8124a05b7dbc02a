from kvstore_plugin import *  # noqa: F403
from kvstore_plugin import __all__ as __all__
from kvstore_plugin import __version__ as __version__
