"""``d9m audit`` and its commands."""
