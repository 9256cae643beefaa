"""Run each op of the catalog many times and count its distinct outputs."""
