"""``python -m kvstore_plugin.selftest``."""
