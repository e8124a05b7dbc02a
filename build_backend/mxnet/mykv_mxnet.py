"""The PEP 517 build backend of the package mxnet in this folder: MXNet's own wheel with other requirements.

The wheel of MXNet requires numpy below 2, and graphviz below 0.9, so pip would downgrade common packages. MXNet works
with the newer releases if mykv is installed (mykvrun/numpy_for_mxnet.py). No release of MXNet will change its metadata,
so this backend downloads the wheel and rewrites the requirements; the code stays as it is.
"""

import glob
import os
import re
import subprocess
import sys
import tempfile
import zipfile

from wheel.wheelfile import WheelFile

_RELEASE = "mxnet==1.9.1"
_REQUIREMENTS = ["numpy>1.16", "requests>=2.20,<3", "graphviz>=0.8.1"]


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Download MXNet's wheel for this machine and rewrite its requirements; the new wheel's file name."""
    with tempfile.TemporaryDirectory() as folder:
        download = ["download", "--no-deps", "--only-binary", ":all:", "--dest", folder, _RELEASE]
        subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *download], check=True)
        (source,) = glob.glob(os.path.join(folder, "*.whl"))
        _rewrite(source, os.path.join(wheel_directory, os.path.basename(source)))
        return os.path.basename(source)


def _rewrite(source, target):
    # WheelFile writes the list of files with their hashes itself. Not compressed: pip unpacks it at once.
    with WheelFile(source) as old, WheelFile(target, "w", zipfile.ZIP_STORED) as new:
        for entry in old.infolist():
            if entry.filename == new.record_path or entry.is_dir():
                continue
            content = old.read(entry.filename)
            if entry.filename == f"{new.dist_info_path}/METADATA":
                content = _with_requirements(content.decode("utf-8")).encode("utf-8")
            new.writestr(entry, content)


def _with_requirements(metadata):
    head, separator, description = metadata.partition("\n\n")
    head = re.sub(r"^Requires-Dist: .*\n?", "", head, flags=re.MULTILINE).rstrip("\n")
    return head + "".join(f"\nRequires-Dist: {one}" for one in _REQUIREMENTS) + separator + description


def build_sdist(sdist_directory, config_settings=None):
    raise NotImplementedError("MXNet's sources are not here: this folder makes a wheel from MXNet's own wheel.")
