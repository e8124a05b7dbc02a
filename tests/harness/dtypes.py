"""Names of the dtypes that the core reduces."""

FLOATS = ["float16", "float32", "float64"]
INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
NUMPY = [*FLOATS, *INTEGERS, "bool"]  # and bfloat16, which numpy lacks
NCCL = [*(dtype for dtype in NUMPY if dtype not in ("int16", "uint16", "bool")), "bfloat16"]
