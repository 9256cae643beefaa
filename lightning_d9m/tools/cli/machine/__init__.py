"""The commands that tell what is on this machine: its settings, its ops, its Horovod.

Words come in, and facts go out as text or JSON. Read ``doctor.py`` first.
"""
