"""Parameters of networks: their names on all ranks, broadcasts, deferred shapes, loading, checks."""
