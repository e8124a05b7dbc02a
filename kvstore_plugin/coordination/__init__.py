"""How ranks agree: one operation of a set of ranks, labels, names, deadlocks, process sets."""
