"""The XXH3-64 of each chunk of memory: on the CPU, and on CUDA by a Triton kernel.

Addresses and sizes come in; 8 bytes for each chunk of 128 KiB go out. Read ``cpu.py`` first:
``cuda.py`` gives the same bytes.
"""
