"""`verify`: every check over a container, in the order in which a fault is easiest to understand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pagestone.convert.checkpoint import CONFIG, INDEX
from pagestone.formats.directories import directory
from pagestone.formats.errors import PagestoneError
from pagestone.formats.manifest import EXPERTS_TABLE, MANIFEST, RECORDS, no_container, read_manifest
from pagestone.formats.storage import AnyPlace
from pagestone.validate import checks
from pagestone.validate.checks import Check, Context
from pagestone.validate.dense import check_dense_tensors
from pagestone.validate.findings import ABSENT, Finding, Report, guarded, of_error
from pagestone.validate.matrices import check_matrices, open_matrices
from pagestone.validate.source import compare_with


def verify(
    root: Path,
    *,
    source: AnyPlace | None = None,
    sample: int | None = None,
    workers: int = 1,
    progress: checks.Progress = lambda _: None,
) -> Report:
    """Check the container at `root` completely; with `source`, compare it with what the source encodes to.

    Faults of the container become findings; `RequestError` is raised if there is no container, or if the source
    is not one that can be compared.
    """
    root = directory(root)
    if not (root / MANIFEST).is_file():
        raise no_container(root)
    report = Report()
    try:
        manifest = read_manifest(root / MANIFEST)
        codec = checks.codec_of(manifest)
    except (PagestoneError, OSError) as error:
        report.add([of_error(error, MANIFEST)])
        return report
    report.count("files")  # the manifest itself, which its own digest vouches for
    # the source first: where it cannot be opened, nothing that was found is lost
    comparison = None if source is None else compare_with(source, manifest, sample)
    every: tuple[Check, ...] = (*CHECKS, *OF_TABLE)
    if comparison is not None:
        every = (*CHECKS, comparison.check(), *OF_TABLE, comparison.check_of_table())
    context = Context(root, manifest, codec, every, progress, workers, report)
    try:
        for check in every:
            report.add(guarded(check.run(context), root.name))
    finally:
        if comparison is not None:
            comparison.close()
    return report


def _presence(context: Context) -> Iterator[Finding]:
    return checks.check_presence(context.root, context.manifest)


def _tables(context: Context) -> Iterator[Finding]:
    """Open every layer. Sidecars wait for their layer's turn: all of them at once are 90 MiB of a large model."""
    for entry in context.manifest.layers:
        try:
            layer = checks.open_layer(context.root, context.manifest, entry)
        except (PagestoneError, OSError) as error:
            context.complete = False
            yield of_error(error, entry.file)
            continue
        context.layers.append(layer)
    refused: list[Finding] = []
    context.matrices = open_matrices(context.root, context.manifest, refused.append)
    context.complete = context.complete and not refused
    yield from refused


def _digests(context: Context) -> Iterator[Finding]:
    """Digests of every file that is no layer file, and SHA-256 of all that have one."""
    layer_files = {e.file for e in context.manifest.layers}
    for name in context.manifest.files:
        yield from guarded(_digest(context, name, name in layer_files), name)


def _digest(context: Context, name: str, is_layer: bool) -> Iterator[Finding]:
    if not (context.root / name).is_file():
        return
    if not is_layer:
        yield from guarded(checks.check_file_digest(context.root, context.manifest, name, context.progress), name)
        context.report.count("files")
    yield from checks.check_sha256(context.root, context.manifest, name)


def _records(context: Context) -> Iterator[Finding]:
    """Digests of every layer and its records, each read once and shown to all checks that ask for records."""
    recorded: dict[str, tuple[bytes, ...]] = {}
    try:
        recorded = context.manifest.records((context.root / RECORDS).read_bytes())
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and not isinstance(error, ABSENT):  # which the check of presence has found
            yield of_error(error, RECORDS)
    for layer in context.layers:
        yield from guarded(_layer(context, layer, recorded.get(layer.entry.file)), layer.entry.file)


def _layer(context: Context, layer: checks.OpenLayer, recorded: tuple[bytes, ...] | None) -> Iterator[Finding]:
    try:
        layer = replace(layer, beside=checks.sidecar_arrays(context.root, layer))
    except (PagestoneError, OSError) as error:
        yield of_error(error, str(layer.entry.sidecar))
    for check in context.checks:
        if check.layer is not None:
            yield from guarded(check.layer(context, layer), layer.entry.file)
    yield from guarded(checks.check_layer(context, layer, recorded), layer.entry.file)
    context.report.count("files")
    context.report.count("layers")
    context.report.count("experts", layer.header.count)


def _matrices(context: Context) -> Iterator[Finding]:
    """The contents of encoded dense matrices."""
    dense = context.manifest.dense
    if dense is not None:
        yield from check_matrices(context.root, dense, context.matrices, context.progress, context.workers)
        context.report.count("dense matrices", len(context.matrices))


def _dense_tensors(context: Context) -> Iterator[Finding]:
    return check_dense_tensors(context.root, context.manifest, context.codec, context.dense)


def _dense_tables(context: Context) -> Iterator[Finding]:
    for finding in checks.check_dense(context.root, context.dense):
        context.complete = context.complete and finding.code == "E0225"  # which is read, but in no good place
        yield finding


def _index(context: Context) -> Iterator[Finding]:
    if context.complete:
        yield from guarded(checks.check_index(context.root, context.layers, context.dense, context.matrices), INDEX)


def _config(context: Context) -> Iterator[Finding]:
    if context.complete:
        found = checks.check_config(context.root, context.manifest, context.codec, context.layers, context.dense)
        yield from guarded(found, CONFIG)


def _experts(context: Context) -> Iterator[Finding]:
    if len(context.layers) == len(context.manifest.layers) and (context.root / EXPERTS_TABLE).is_file():
        context.sums, findings = checks.check_experts(context.root, context.layers)
        yield from findings


def _zeros(context: Context) -> Iterator[Finding]:
    if context.complete and context.sums is not None:
        yield from checks.check_zeros(context.root, context.sums, context.layers, context.dense)


CHECKS = (
    Check(_presence), Check(_tables), Check(_digests), Check(_records, record=checks.check_record), Check(_matrices),
    Check(_dense_tensors), Check(_dense_tables), Check(_index), Check(_config),
)  # fmt: skip
"""In the order in which a fault is easiest to understand; then comes the comparison with a source, if there is one."""
OF_TABLE = (Check(_experts), Check(_zeros))
"""The last, for the library that reads experts.parquet takes 40 MiB: what takes much besides is done by then."""
