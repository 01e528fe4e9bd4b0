"""Container to views (and, later, to tokens). Knows `formats`; knows nothing of `convert`."""
