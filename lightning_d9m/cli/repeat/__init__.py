"""``d9m repeat`` and its variants."""
