"""GPU kernels. Nothing outside this package imports Triton, and nothing here is imported before it is called."""
