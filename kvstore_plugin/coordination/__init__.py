"""Coordination of ranks: operations of a process set, labels, names, the deadlock check, process sets."""
