"""How the gradients of a trainer become sums: buckets, sparse rows, local devices, fences."""
