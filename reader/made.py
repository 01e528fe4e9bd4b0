"""A container that is on no disk: what it would hold is made as it is asked for, of whatever the maker knows.

A checkpoint can be run so without converting it (`validate/virtual.py`). Sessions, stores and hosts see a container
like any other, but for its files: there are none to map, and no digests to compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from pagestone.formats.dense_matrices import PlacedMatrix
from pagestone.formats.dtypes import Array
from pagestone.formats.errors import RequestError
from pagestone.formats.layer_file import LayerHeader
from pagestone.formats.manifest import LayerEntry, Manifest
from pagestone.formats.safetensors_header import TensorEntry
from pagestone.reader.container import Beside, Container, Layer

MODE = "encoded"
"""How bytes come: made at the moment they are asked for."""


class Maker(Protocol):
    """Makes the bytes of a container as they are asked for. For many threads."""

    def record(self, layer: Layer, expert: int, into: memoryview) -> None:
        """Fill `into` (`layer.stride` bytes) with the record of an expert."""

    def beside(self, layer: Layer) -> Beside:
        """What lies beside the layer's records: of an expert it is there once its record was made."""

    def dense_entries(self) -> Mapping[str, tuple[str, TensorEntry]]:
        """(file the container would have it in, type and shape) of every dense tensor by name."""

    def dense(self, name: str) -> Array:
        """uint8: the bytes of a dense tensor, in memory of its own."""

    def rows(self, name: str) -> Callable[[int, memoryview], None] | None:
        """What fills a buffer with one row of a dense tensor [rows, columns]; None for one that is only made whole."""

    def matrices(self) -> Mapping[str, PlacedMatrix]:
        """Every encoded dense matrix by the name of its module; where its record lies in a file says nothing here."""

    def matrix(self, name: str, into: memoryview) -> None:
        """Fill `into` with the record of an encoded dense matrix."""

    def close(self) -> None:
        """Let go of what it reads from; may be called twice."""


class MadeLayer(Layer):
    """A layer whose records are made: a store gives them out, there is no file to map."""

    def __init__(self, root: Path, entry: LayerEntry, manifest: Manifest, header: LayerHeader) -> None:
        super().__init__(root, entry, manifest)
        self.__dict__["_opened"] = (header, header.layout())

    @property
    def _mapped(self) -> Array:
        raise not_mapped(self.path)


def not_mapped(path: Path) -> RequestError:
    """Why experts that are made cannot be mapped."""
    return RequestError(
        "experts of a container on disk expected; those of a checkpoint are encoded as they are asked for",
        code="E1296",
        file=path,
        remedy="use --io direct, or convert the checkpoint first",
    )


class MadeContainer(Container):
    """A container whose bytes `maker` makes. `identity` stands where a container has its id: no bytes vouch for it."""

    def __init__(
        self, path: Path, manifest: Manifest, headers: Sequence[LayerHeader], maker: Maker, identity: str
    ) -> None:
        super().__init__(path, manifest)
        self.maker, self._identity = maker, identity
        for entry, header in zip(manifest.layers, headers, strict=True):
            (self.layers if entry.block == "layers" else self.mtp).update(
                {entry.layer: MadeLayer(path, entry, manifest, header)}
            )

    @property
    def container_id(self) -> str:
        return self._identity

    def close(self) -> None:
        super().close()
        self.maker.close()


class MadeRecords:
    """A `RecordReader` that asks the maker."""

    mode = MODE

    def __init__(self, container: MadeContainer) -> None:
        self._maker = container.maker

    def read(self, layer: Layer, expert: int, into: memoryview) -> None:
        """Have a record made."""
        self._maker.record(layer, expert, into)

    def beside(self, layer: Layer) -> Beside:
        """See `Maker.beside`."""
        return self._maker.beside(layer)

    def close(self) -> None:
        """Nothing is open: the container closes its maker."""
