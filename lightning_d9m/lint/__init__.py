"""Read Python source without running it, and find what would make a run nondeterministic.

Nothing here imports torch. What is known of torch's ops comes from the catalogue in ``patches``.
"""
