"""`verify`: every check over a container, in the order in which a fault is easiest to understand."""

from __future__ import annotations

from pathlib import Path

from pagestone.formats.dtypes import Array
from pagestone.formats.errors import PagestoneError
from pagestone.formats.layer_file import sidecar_name
from pagestone.formats.manifest import EXPERTS, MANIFEST, Manifest, no_container, read_manifest
from pagestone.validate import checks
from pagestone.validate.dense import check_dense_tensors
from pagestone.validate.findings import Finding, Report, of_error
from pagestone.validate.source import Comparison, compare_with


def verify(
    root: Path,
    *,
    source: Path | None = None,
    sample: int | None = None,
    workers: int = 1,
    progress: checks.Progress = lambda _: None,
) -> Report:
    """Check the container at `root` completely; with `source`, compare it with what the source encodes to.

    Faults of the container become findings; `RequestError` is raised if there is no container, or if the source
    is not one that can be compared.
    """
    if not (root / MANIFEST).is_file():
        raise no_container(root)
    report = Report()
    try:
        manifest = read_manifest(root / MANIFEST)
        codec = checks.codec_of(manifest)
    except PagestoneError as error:
        report.add([of_error(error, MANIFEST)])
        return report
    report.add(checks.check_presence(root, manifest))
    layers: list[checks.OpenLayer] = []
    damaged: set[str] = set()
    for entry in manifest.layers:
        try:
            layers.append(checks.open_layer(root, manifest, entry))
        except (PagestoneError, OSError) as error:
            damaged.add(entry.file)
            report.add([of_error(error, entry.file)])
    columns = None
    if (root / EXPERTS).is_file() and not damaged:
        columns, findings = checks.check_experts(root, layers)
        report.add(findings)
    comparison = None if source is None else compare_with(source, manifest, columns, sample)
    try:
        _files(root, manifest, layers, columns, comparison, report, progress, workers)
        layer_files = {e.file for e in manifest.layers}
        sidecars = {sidecar_name(name) for name in layer_files}
        dense = [n for n in manifest.files if n.endswith(".safetensors") and n not in layer_files | sidecars]
        report.add(check_dense_tensors(root, manifest, codec, dense))
        if not damaged:
            try:
                report.add(checks.check_dense(root, dense))
                report.add(checks.check_index(root, layers, dense))
                report.add(checks.check_config(root, manifest, codec, layers, dense))
                report.add(checks.check_zeros(root, columns, layers, dense) if columns is not None else [])
            except (PagestoneError, OSError) as error:
                report.add([of_error(error, "")])
        if comparison is not None:
            report.add(comparison.everything_else(root, manifest, progress))
    finally:
        if comparison is not None:
            comparison.close()
    return report


def _files(
    root: Path,
    manifest: Manifest,
    layers: list[checks.OpenLayer],
    columns: checks.Columns | None,
    comparison: Comparison | None,
    report: Report,
    progress: checks.Progress,
    workers: int,
) -> None:
    """Digests of every file, and the contents of every layer."""
    layer_files = {e.file for e in manifest.layers}
    for name in manifest.files:
        if not (root / name).is_file():
            continue
        if name not in layer_files:
            report.add(checks.check_file_digest(root, manifest, name, progress))
            report.count("files")
        report.add(checks.check_sha256(root, manifest, name))
    recorded: dict[str, list[str]] = {}
    if columns is not None:
        for file, part, value in zip(columns["file"], columns["part"], columns["record_xxh3_128"], strict=True):
            if part == "gate":
                recorded.setdefault(file, []).append(value)

    def against_source(layer: checks.OpenLayer, expert: int, record: Array) -> list[Finding]:
        return [] if comparison is None else comparison.expert(layer, expert, record)

    for layer in layers:
        known = recorded.get(layer.entry.file)
        try:
            if comparison is not None:
                report.add(comparison.heads(root, layer))
            report.add(checks.check_layer(layer, manifest, known, against_source, progress, workers))
        except PagestoneError as error:
            report.add([of_error(error, layer.entry.file)])
        report.count("files")
        report.count("layers")
        report.count("experts", layer.file.count)
        if comparison is not None:
            compared = sum(comparison.covers(layer.entry.file, e) for e in range(layer.file.count))
            report.count("experts compared with the source", compared)
