"""The version of the package that is installed."""

from importlib import metadata

try:
    VERSION: str = metadata.version("mykv")
except metadata.PackageNotFoundError:  # imported from a source tree
    VERSION = "0+not.installed"
