"""`pagestone inspect`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pagestone.formats.layout import PARTS
from pagestone.formats.manifest import EXPERTS, read_experts
from pagestone.reader.container import Container, open_container


def register(app: typer.Typer) -> None:
    """Add the commands of this room to the application."""
    app.command("inspect", help="Show what a container holds; nothing is checked beyond its tables.")(_inspect)


def describe(container: Container) -> dict[str, Any]:
    """Everything `inspect --json` prints."""
    manifest = container.manifest
    errors = _relative_errors(container)
    layers = []
    for layer in [*container.layers.values(), *container.mtp.values()]:
        file = layer.file
        layers.append(
            {
                "file": layer.entry.file,
                "block": file.block,
                "layer": file.layer,
                "experts": len(layer),
                "hidden": file.shape.hidden,
                "intermediate": file.shape.intermediate,
                "stride": layer.stride,
                "data_start": layer.layout.data_start,
                "prefix": file.prefix,
                "sidecar": layer.entry.sidecar,
                "relative_rms_error": errors.get(layer.entry.file),
                "record": [
                    {
                        "name": f"{file.part_names[PARTS.index(s.part)]}.{s.suffix}" if s.part else s.suffix,
                        "dtype": s.dtype,
                        "shape": list(s.shape),
                        "offset": s.offset,
                        "bytes": s.nbytes,
                    }
                    for s in layer.layout.record.slots
                ],
            }
        )
    return {
        "directory": str(container.path), "container_id": container.container_id, "codec": manifest.codec,
        "parameters": dict(manifest.parameters), "lossless": manifest.lossless, "partial": manifest.partial,
        "source": dict(manifest.source), "bytes": sum(f.nbytes for f in manifest.files.values()),
        "files": {name: f.nbytes for name, f in sorted(manifest.files.items())}, "layers": layers,
    }  # fmt: skip


def _relative_errors(container: Container) -> dict[str, float]:
    """Relative RMS error of every layer file against its source, from the sums in experts.parquet."""
    columns = read_experts(container.path / EXPERTS)
    sums: dict[str, list[float]] = {}
    for file, error, norm in zip(columns["file"], columns["squared_error"], columns["squared_norm"], strict=True):
        total = sums.setdefault(file, [0.0, 0.0])
        total[0] += error
        total[1] += norm
    return {file: (error / norm) ** 0.5 if norm else 0.0 for file, (error, norm) in sums.items()}


def _text(table: dict[str, Any]) -> str:
    lines = [
        f"{table['directory']}: {table['codec']} {table['parameters'] or ''}".rstrip(),
        f"  container id {table['container_id']}",
        f"  family {table['source']['family']}, experts from {', '.join(table['source']['expert_dtypes'])}"
        f"{', lossless' if table['lossless'] else ''}"
        + (f", partial: layers {table['partial'][0]} to {table['partial'][1] - 1}" if table["partial"] else ""),
        f"  {table['bytes']:,} bytes in {len(table['files']) + 1} files",
        "",
        f"  {'file':<24}{'experts':>8}{'hidden':>8}{'inter.':>8}{'record':>12}{'at':>10}{'rel. error':>12}",
    ]
    for x in table["layers"]:
        error = x["relative_rms_error"]
        lines.append(
            f"  {x['file']:<24}{x['experts']:>8}{x['hidden']:>8}{x['intermediate']:>8}{x['stride']:>12,}"
            f"{x['data_start']:>10,}{'' if error is None else format(error, '.5f'):>12}"
        )
    lines += ["", "  a record:"]
    for s in table["layers"][0]["record"]:
        lines.append(f"  {s['offset']:>12,}  {s['name']:<28}{s['dtype']:<9}{s['shape']}")
    return "\n".join(lines)


def _inspect(
    directory: Annotated[Path, typer.Argument(help="Directory of the container.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    table = describe(open_container(directory))
    print(json.dumps(table, indent=1) if as_json else _text(table))
