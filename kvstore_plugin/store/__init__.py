"""The KVStore 'mykv'."""
