"""The plan and its outcome as text and as JSON."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from pagestone.convert.machine import disk_space
from pagestone.convert.matrices import savings
from pagestone.convert.outcome import Outcome
from pagestone.convert.plan import CONVERTED, COPIED, DECODED, EXCLUDED, UNKNOWN, Plan
from pagestone.convert.sources import LayerSource
from pagestone.formats.text import shown_lines, size_text

ALREADY = (
    "already there, nothing to do; headers, config and side files were compared with the source, the data of tensors "
    "were not (`verify --source` compares them, --force converts again)"
)
FATES = (CONVERTED, COPIED, UNKNOWN, DECODED, EXCLUDED)


def plan_table(plan: Plan, output: Path) -> dict[str, Any]:
    """Everything `--dry-run --json` prints: every tensor with its fate, every file with its length."""
    counts = Counter(d.fate for d in plan.dispositions)
    return {
        "family": plan.family.name,
        "codec": {"name": plan.codec.name, "parameters": plan.codec.parameters},
        "lossless": plan.lossless,
        "tensors": {"total": len(plan.checkpoint.tensors)} | {fate: counts.get(fate, 0) for fate in FATES},
        "layers": [
            {"file": t.name, "block": t.header.block, "layer": t.header.layer, "experts": t.header.count,
             "hidden": t.header.shape.hidden, "intermediate": t.header.shape.intermediate,
             "layout": "fused" if t.source.is_fused else "per-expert", **_orientation(t.source),
             "source_dtypes": list(t.source.dtypes),
             "stride": t.header.layout().stride}
            for t in plan.layers
        ],
        "dense": dense_table(plan),
        "bytes_in": plan.bytes_in,
        "bytes_out": plan.bytes_out,
        "disk_free": disk_space(output),
        "files": plan.files,
        "side_files": [{"name": f.name, "bytes": f.nbytes, "not_copied": f.rule} for f in plan.side_files],
        "warnings": list(plan.warnings),
        "dispositions": [
            {"tensor": d.tensor.name, "dtype": d.tensor.dtype, "shape": list(d.tensor.shape), "source": d.tensor.file,
             "fate": d.fate, "rule": d.rule, "target": d.target}
            for d in plan.dispositions
        ],
    }  # fmt: skip


def dense_table(plan: Plan) -> dict[str, Any]:
    """What becomes of dense matrices: those that are encoded, or what encoding them would save, in bytes."""
    encoded = [
        {"name": m.name, "rows": m.rows, "columns": m.columns, "bytes_in": m.nbytes_in, "bytes_out": record.nbytes,
         "tied": m.tied, "file": file.name}
        for file in plan.matrices for m, record in file.records()
    ]  # fmt: skip
    left = [t for shard in plan.dense for t in shard.tensors]
    would_save = {} if encoded else savings(plan.checkpoint, plan.family, left)
    return {"encoding": plan.dense_identity, "matrices": encoded, "would_save": would_save}


def _dense_text(plan: Plan) -> str:
    table = dense_table(plan)
    if not table["matrices"]:
        saved = ", ".join(f"{word} {size_text(nbytes)}" for word, nbytes in table["would_save"].items() if nbytes > 0)
        return f"dense matrices: kept; --dense would save: {saved or 'nothing, none is large enough'}"
    before, after = (sum(m[key] for m in table["matrices"]) for key in ("bytes_in", "bytes_out"))
    tied = "".join(f"; {m['name']} beside its table" for m in table["matrices"] if m["tied"])
    name = table["encoding"]["codec"]
    return f"dense matrices: {len(table['matrices'])} in {name}, {size_text(before)} to {size_text(after)}{tied}"


def _orientation(source: LayerSource) -> dict[str, bool]:
    fused = source.fused if source.is_fused else None
    return {"transposed": bool(fused and fused.transposed), "interleaved": bool(fused and fused.interleaved)}


def plan_text(plan: Plan, output: Path) -> str:
    """What `--dry-run` prints."""
    lines = [
        f"{plan.checkpoint.path}: family {plan.family.name}, {len(plan.checkpoint.shards)} shard(s), "
        f"{len(plan.checkpoint.tensors)} tensors",
        f"codec {plan.codec.name}{', lossless' if plan.lossless else ''}",
        "",
        f"{'fate':<16}{'tensors':>9}{'bytes':>12}  rule: names",
    ]
    groups: dict[tuple[str, str, str], list[int]] = {}
    for d in plan.dispositions:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", d.tensor.name)
        count = groups.setdefault((d.fate, d.rule, pattern), [0, 0])
        count[0] += 1
        count[1] += d.tensor.nbytes
    for (fate, rule, pattern), (number, nbytes) in sorted(groups.items(), key=lambda g: (FATES.index(g[0][0]), g[0])):
        lines.append(f"{fate:<16}{number:>9}{size_text(nbytes):>12}  {rule}: {pattern}")
    totals = Counter(d.fate for d in plan.dispositions)
    lines += ["", "total: " + ", ".join(f"{totals[f]} {f}" for f in FATES if totals[f])]
    for kind in dict.fromkeys((t.header.block, t.header.count, t.header.layout().stride) for t in plan.layers):
        block, experts, stride = kind
        members = [t for t in plan.layers if (t.header.block, t.header.count, t.header.layout().stride) == kind]
        lines.append(
            f"{block}: {len(members)} file(s) of {experts} experts, {size_text(stride)} a record, {members[0].name} ..."
        )
    lines.append(_dense_text(plan))
    for f in plan.side_files:
        lines.append(
            f"side file {f.name}: " + (f"not copied: {f.rule}" if f.rule else f"copied, {size_text(f.nbytes)}")
        )
    free = disk_space(output)
    lines += [
        "",
        f"reads {size_text(plan.bytes_in)}, writes {size_text(plan.bytes_out)} in {len(plan.files) + 2} files; "
        f"disk space free: {_free(free, plan.bytes_out)}",
    ]
    lines += [f"warning: {w}" for w in plan.warnings]
    return shown_lines(lines)


def _free(free: int | None, needed: int) -> str:
    if free is None:
        return "the file system does not say"
    return size_text(free) + ("" if free > needed else " - NOT ENOUGH")


def outcome_table(outcome: Outcome, output: Path, seconds: float) -> dict[str, Any]:
    """What a conversion prints with `--json`; `seconds` covers plan, conversion and publication, fsync included."""
    m = outcome.manifest
    return {
        "state": outcome.state,
        "output": str(output),
        "container_id": m.container_id,
        "codec": m.codec,
        "dense": None if m.dense is None else {"codec": m.dense.codec, "matrices": len(m.dense.matrices)},
        "layers": len(m.layers),
        "experts": sum(e.experts for e in m.layers),
        "bytes_out": sum(f.nbytes for f in m.files.values()),
        "seconds": round(seconds, 3),
        "warnings": list(outcome.warnings),
        "matrices": outcome.notes,
    }


def outcome_text(outcome: Outcome, output: Path, seconds: float) -> str:
    """What a conversion prints for people."""
    table = outcome_table(outcome, output, seconds)
    words = {"converted": "converted", "already there": ALREADY,
             "finished publishing": "an interrupted run had all but published it: finished"}  # fmt: skip
    encoded = table["dense"]
    dense = "" if encoded is None else f", {encoded['matrices']} dense matrices in {encoded['codec']}"
    lines = [
        f"{output}: {words[outcome.state]}",
        f"  {table['codec']}{dense}, {table['layers']} layers, {table['experts']} experts, "
        f"{size_text(table['bytes_out'])}, {seconds:.1f} s",
        f"  container id {table['container_id']}",
        *(
            ["  of the source's codes: " + ", ".join(f"{n} {what}" for what, n in outcome.notes.items())]
            if outcome.notes
            else []
        ),
    ]
    return shown_lines(lines)
