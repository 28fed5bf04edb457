"""Reference models: plain and unfused, and the same written by hand on the fused ops, which is the ceiling."""
