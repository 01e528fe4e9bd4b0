"""The old name of `pagestone.formats.encodings`, for work that was begun before it was renamed; goes with that."""

from pagestone.formats.encodings import Codec, ConfigFacts, EncodeStats, Option, get, registry

__all__ = ["Codec", "ConfigFacts", "EncodeStats", "Option", "get", "registry"]
