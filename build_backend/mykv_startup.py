"""Installs the .pth file through which Python imports mykvrun/auto_register.py at its start.

Files of `data_files` go to a folder that Python does not search. Files in the folder of the built packages go to
site-packages, from wheels too, and pip removes them with the packages. An editable installation has no such file.
"""

import os

from setuptools.command.build_py import build_py

_FILE = "mykv-auto-register.pth"


class BuildPython(build_py):
    """setuptools' command build_py, which also copies the .pth file."""

    def run(self):
        super().run()
        for target in self._targets():
            self.copy_file(os.path.join("mykvrun", _FILE), target)

    def get_outputs(self, include_bytecode=1):
        return [*super().get_outputs(include_bytecode), *self._targets()]

    def _targets(self):
        is_editable = getattr(self, "editable_mode", False)  # setuptools 64 and later
        return [] if is_editable else [os.path.join(self.build_lib, _FILE)]
