"""The rules of ``d9m scan``."""
