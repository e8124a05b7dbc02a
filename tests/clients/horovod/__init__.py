"""Stands in for Horovod: programs that import horovod.mxnet get kvstore_plugin."""
