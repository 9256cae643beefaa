"""The XXH3-64 of each chunk of memory: on the CPU, and on CUDA by a Triton kernel."""
