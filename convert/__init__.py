"""Checkpoint to container, one expert in memory per worker. Knows `formats`; knows nothing of `reader`."""
