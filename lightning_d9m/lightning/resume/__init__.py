"""State that a checkpoint needs so that a resumed run is bit-exact."""
