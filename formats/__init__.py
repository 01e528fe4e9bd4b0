"""Bytes to values and back: layout, headers, digests, encodings.

Pure: NumPy only, no torch, no clock, no network. This package imports none of the others.
"""
