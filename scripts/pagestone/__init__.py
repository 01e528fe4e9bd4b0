"""pagestone: Mixture-of-Experts checkpoints as page-aligned containers whose experts are used straight from disk.

`open_container(path)` gives zero-copy views; the command line does everything else. Importing this module is cheap: the
reader is imported when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Container", "Expert", "Layer", "Matrix", "PagestoneError", "View", "__version__", "open_container"]

if TYPE_CHECKING:
    from pagestone.formats.errors import PagestoneError
    from pagestone.reader.container import Container, Expert, Layer, Matrix, View, open_container


def __getattr__(name: str) -> Any:
    if name == "PagestoneError":
        from pagestone.formats import errors

        return errors.PagestoneError
    if name in __all__:
        from pagestone.reader import container

        return getattr(container, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
