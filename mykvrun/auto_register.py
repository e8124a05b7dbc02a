"""Makes the store 'mykv' available in programs that do not import kvstore_plugin.

An installation has a file mykv-auto-register.pth, by which Python imports this module when it starts. So this
module imports only os and sys, and puts a finder on ``sys.meta_path`` that compares the names of modules with
``mxnet``.
Before MXNet is imported, the finder makes MXNet work with new releases of numpy (numpy_for_mxnet.py). Then it wraps the
functions of MXNet that take a store's name. The first use of the name 'mykv', or of a name that can only mean 'mykv',
imports kvstore_plugin, which handles the name. Until then neither MPI nor mpi4py is imported.

``MYKV_AUTO_REGISTER=0`` disables the finder (kvstore_plugin/world/settings.py lists the setting).
"""

import os
import sys

_NAME = "mykv"
# This package, and libraries whose scripts it supports. MXNet 1.9 creates a store of one process for these names too.
_LIBRARIES = ("kvstore_plugin", "horovod", "byteps")
# MXNet's functions that take the name of a store: module, class or '', function, name and position of the argument.
# With one device MXNet drops the name before it creates a store, and for an unknown name it creates a store of one
# process, so the registry of stores does not suffice.
_CALLS = (
    ("mxnet.kvstore", "", "create", "name", 0),
    ("mxnet.gluon.trainer", "Trainer", "__init__", "kvstore", 4),
    ("mxnet.module.module", "Module", "init_optimizer", "kvstore", 1),
    ("mxnet.model", "FeedForward", "fit", "kvstore", 7),
)
_replaced = []  # module or class, name of the function, the function, and what replaces it


class _Finder:
    """Does not find modules itself: for MXNet it asks the other finders, and replaces the loader with a `_Loader`."""

    _is_asking = False

    def find_spec(self, name, path=None, target=None):
        if name != "mxnet" or self._is_asking:
            return None
        import contextlib

        from . import numpy_for_mxnet

        with contextlib.suppress(ImportError):  # MXNet itself reports that numpy is missing
            numpy_for_mxnet.install()
        self._is_asking = True  # another finder may ask all finders, including this one
        try:
            spec = numpy_for_mxnet.found_by_others(self, name, path, target)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader:
    """MXNet's loader, which wraps functions of MXNet at the end of the import."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        if name == "_loader":  # while copy.copy() creates a copy, the copy has no attributes
            raise AttributeError(name)
        return getattr(self._loader, name)

    def exec_module(self, module):
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if _finder in sys.meta_path:  # kvstore_plugin may have been imported meanwhile
            _watch()


_finder = _Finder()


def withdraw():
    """Undo all that this module has changed; kvstore_plugin calls this when it is imported."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    while _replaced:
        owner, method, original, substitute = _replaced.pop()
        if vars(owner)[method] is substitute:
            setattr(owner, method, original)
    base = sys.modules.get("mxnet.kvstore.base")
    if base is not None and base.KVStoreBase.kv_registry.get(_NAME) is _create:
        del base.KVStoreBase.kv_registry[_NAME]


def _watch():
    """Wrap all functions of MXNet that take a store's name."""
    base = sys.modules.get("mxnet.kvstore.base")
    if base is None:  # a stand-in for MXNet, or a release without such stores
        return
    base.KVStoreBase.kv_registry.setdefault(_NAME, _create)
    for module, name, function, argument, position in _CALLS:
        owner = sys.modules.get(module)
        owner = getattr(owner, name, None) if name else owner  # MXNet 2 lacks some classes
        original = None if owner is None else vars(owner).get(function)
        if original is not None:
            substitute = _watched(owner, function, original, argument, position)
            _replaced.append((owner, function, original, substitute))
            setattr(owner, function, substitute)


def _watched(owner, function, original, argument, position):
    """A function that imports kvstore_plugin if its argument is the name 'mykv', or can only mean it."""
    import functools

    @functools.wraps(original)
    def watched(*args, **named):
        store = named.get(argument, args[position] if len(args) > position else None)
        # After withdraw() another wrapper may still call this one.
        waits = any(substitute is watched for _, _, _, substitute in _replaced)
        if waits and isinstance(store, str) and _is_meant(store.lower()):
            _import_package()
            return getattr(owner, function)(*args, **named)
        return original(*args, **named)

    return watched


def _is_meant(name):
    """Whether a name is 'mykv', or an unknown name that can only mean 'mykv'."""
    if name == _NAME or name in sys.modules["mxnet.kvstore.base"].KVStoreBase.kv_registry:
        return name == _NAME
    return can_only_mean_mykv(name)


def can_only_mean_mykv(name):
    """Whether an unknown store name is almost 'mykv', or a library's name (horovod): store/names.py rejects it."""
    import difflib

    return name in _LIBRARIES or bool(difflib.get_close_matches(name, [_NAME]))


def _create():
    """Placeholder for the store's class in MXNet's registry."""
    _import_package()
    return sys.modules["mxnet.kvstore.base"].KVStoreBase.kv_registry[_NAME]()


def _import_package():
    withdraw()
    try:
        import kvstore_plugin  # noqa: F401
    except BaseException:
        # If the program catches the error and uses the name again, it must get the error again, and not train alone.
        _watch()
        raise


if os.environ.get("MYKV_AUTO_REGISTER") != "0":
    sys.meta_path.insert(0, _finder)
