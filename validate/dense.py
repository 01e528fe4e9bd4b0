"""The dense tensors of a container, judged by themselves: what would `prepare` make of them, had it to convert them?

Every one must come out as it is: numbers, or FP8 codes with their scale where others read them as codes. Codes that
stay are checked as those of experts are. No source is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pagestone.convert import families
from pagestone.convert.checkpoint import SourceTensor
from pagestone.convert.dense import COPY, SCALE_USED, DenseRules, pieces
from pagestone.convert.family import Family
from pagestone.convert.reading import SourceFiles
from pagestone.formats.encodings import Codec, ConfigFacts
from pagestone.formats.errors import PagestoneError
from pagestone.formats.manifest import Manifest
from pagestone.formats.safetensors_header import read_header
from pagestone.formats.storage import PIECE, place_of
from pagestone.validate.findings import ERROR, Finding, of_error


def check_dense_tensors(root: Path, manifest: Manifest, codec: Codec, dense: list[str]) -> Iterator[Finding]:
    """Scales without codes, codes without a scale, codes that nobody reads as such, and numbers that are none.

    `dense` are the files that hold dense tensors. One that cannot be opened is passed over: others report it.
    """
    tensors: dict[str, SourceTensor] = {}
    for shard in dense:
        try:
            entries = read_header(place_of(root / shard, once=True)).entries
        except (PagestoneError, OSError):
            continue
        tensors |= {e.name: SourceTensor(e.name, shard, e.dtype, e.shape, e.offset, e.nbytes) for e in entries}
    stated = {"quantization_config": codec.quantization_config(ConfigFacts((), ()))}
    rules = DenseRules(root, tensors, stated, _family(manifest), codec)
    refused: list[PagestoneError] = []
    sorted_tensors, fates = rules.sort(list(tensors), refused.append)
    for error in refused:
        yield of_error(error, "")
    for name, fate in fates.items():
        if fate not in (COPY, SCALE_USED):  # a scale goes with its codes
            tensor = tensors[name]
            message = f"{name}: numbers expected, found {tensor.dtype} that config.json does not declare as codes there"
            yield Finding(ERROR, "E0516", tensor.file, message, tensor.offset)
    files = SourceFiles(root)
    try:
        for codes in (t for t in sorted_tensors if t.kept):
            try:
                for _ in pieces(files, codes, memoryview(bytearray(PIECE))):
                    pass
            except PagestoneError as error:
                message = f"{codes.name}: {error.message}"
                code = "E1005" if error.code == "E0702" else error.code
                yield Finding(ERROR, code, codes.source.file, message, codes.source.offset)
    finally:
        files.close()


def _family(manifest: Manifest) -> Family | None:
    """The family the manifest names; None if there is none such, then no codes may stay."""
    stated = manifest.source.get("family")
    return next((f for f in families.registry().values() if f.name == stated), None)
