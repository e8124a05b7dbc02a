"""Reduction of a trainer's gradients: buckets, sparse rows, local devices, fences."""
