"""The only code that knows Lightning, Horovod, pytest or the shell."""
