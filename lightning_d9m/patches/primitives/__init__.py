"""Building blocks that the kernels share.

Elements with keys come in; a reduction of each key's elements in their order goes out, or torch's
own result for arguments that a kernel does not take. Read ``segment_reduce.py`` first.
"""
