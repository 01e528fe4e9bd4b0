"""Judges: what a container must be, checked against what is on disk. Knows all the other rooms."""
