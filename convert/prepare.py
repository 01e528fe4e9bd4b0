"""One conversion from request to container: plan, preflight, convert, publish.

plan = make_plan(Request(Path("checkpoint"), encodings.get("int8")))
prepare(plan, Path("container"), workers=2)
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagestone.convert.checkpoint import open_checkpoint
from pagestone.convert.encode import MATRIX_NOTES, REQUANTISED
from pagestone.convert.errors import machine_errors
from pagestone.convert.job import identity
from pagestone.convert.journal import FinishedFile, file_digest
from pagestone.convert.machine import LACKS, SPACE, disk_space, is_there, own_file, sync_directory, write_durably
from pagestone.convert.outcome import Outcome
from pagestone.convert.pipeline import ALL_ZERO, Progress, convert
from pagestone.convert.plan import Plan, Request, check_paths, plan_checkpoint
from pagestone.convert.publish import (
    JOURNAL,
    REPLACED,
    WorkDirectory,
    check_output,
    finish_interrupted,
    open_work,
    published,
    was_container,
)
from pagestone.convert.unchanged import require_unchanged, small_digests, used_stamps
from pagestone.formats.dense_matrices import DenseEncoding, DenseMatrix
from pagestone.formats.digests import digest
from pagestone.formats.errors import DataError, MachineError, PagestoneError, RequestError
from pagestone.formats.layout import CODES, PARTS, tensor_name
from pagestone.formats.manifest import (
    EXPERTS_TABLE,
    MANIFEST,
    PARTIAL,
    RECORDS,
    FileDigest,
    LayerEntry,
    Manifest,
    columns_for,
    places,
    write_experts,
)
from pagestone.formats.storage import named, place_of
from pagestone.formats.text import natural

SPARE = 16 << 20
"""Bytes asked for beyond the plan's: journal, directory entries, what the estimate of small files leaves out."""


def ready(request: Request, output: Path, *, force: bool = False) -> Plan | Outcome:
    """The plan for what is asked for; or the outcome, where a publication that was cut short is all that was left.

    That needs no source, and is done also where there is one that cannot be planned. Raises what `plan_for` raises.
    """
    with machine_errors(output, "converting"):
        source = place_of(request.source)
        if source.exists() and output.exists():
            check_paths(source, output)
        try:
            return plan_for(request, output)
        except PagestoneError:
            completed = finish_interrupted(output, force=force)
            if completed is None or source.exists():
                raise
            return Outcome("finished publishing", completed, ())


def prepare(
    plan: Plan,
    output: Path,
    *,
    workers: int,
    force: bool = False,
    sha256: bool = False,
    progress: Progress = lambda _: None,
) -> Outcome:
    """Carry out a plan: a container at `output`.

    Equal plans give the same container id whatever `workers` is. Raises `RequestError`, `DataError` or `MachineError`;
    nothing is then published, and an older container at `output` is intact. `force` replaces one, `sha256` adds that
    digest of every file to the manifest; the container id does not depend on it.
    """
    with machine_errors(output, "converting"):  # whatever does not say better itself what it was doing
        check_paths(plan.request.source, output)
        completed = finish_interrupted(output, force=force)
        job = identity(plan)
        try:
            old = published(output)
        except DataError:
            if not force and was_container(output):
                raise
            old = None  # a damaged manifest: what the new one lists is overwritten, the rest is left
        if old is not None and not force:
            return _already_there(old, plan, output, job, sha256=sha256, finished=completed is not None)
        return _convert(plan, output, workers, job, force, sha256, progress)


def _already_there(
    old: Manifest, plan: Plan, output: Path, job: dict[str, Any], *, sha256: bool, finished: bool
) -> Outcome:
    """Nothing to do, if the container that is here is the one this job would make as far as small files can tell."""
    differing = _differences(old, plan)
    if sha256 and any(f.sha256 is None for f in old.files.values()):
        differing.append("--sha256")
    if differing:
        raise RequestError(
            f"a container is here already, and its {', '.join(differing)} differ(s) from this job's",
            code="E0808",
            file=output,
            remedy="give another --output, or --force to replace it once the new one is complete",
        )
    _require_whole(old, output)
    if (output / PARTIAL).exists():
        with machine_errors(output, "removing the remains of an interrupted run"), open_work(output) as work:
            work.remove_remains(job)
    made = (output / MANIFEST).stat().st_mtime_ns
    newer = sorted(name for name, stamp in used_stamps(plan).items() if max(stamp[1:]) > made)
    warnings = list(plan.warnings)
    if newer and not finished:
        warnings.append(
            f"{len(newer)} file(s) of the source are newer than this container, first {newer[0]}; their data was not "
            f"compared: `pagestone verify {output} --source {plan.checkpoint.path}` does that"
        )
    return Outcome("finished publishing" if finished else "already there", old, tuple(warnings))


def _convert(
    plan: Plan,
    output: Path,
    workers: int,
    job: dict[str, Any],
    force: bool,
    sha256: bool,
    progress: Progress,
) -> Outcome:
    """Carry out a plan, or the rest of it, and publish the result."""
    check_output(output, force=force)
    replace = is_there(output / MANIFEST) or is_there(output / PARTIAL / REPLACED)  # then it was asked for: --force
    missing = [p for p in (output, *output.parents) if not p.exists()]
    experts = {t.name: t.header.count for t in plan.layers}
    dense = {t.name: len(t.matrices) for t in plan.matrices}
    files = {n: (size, experts.get(n, 0), dense.get(n, 0)) for n, size in plan.files.items()}
    with open_work(output) as work:
        fresh = not is_there(work.file(JOURNAL))
        try:
            with machine_errors(output, "starting the conversion"):
                work.begin(job, files, force=force)
            preflight(plan, work)
        except PagestoneError:
            if fresh and not is_there(work.file(REPLACED)):
                _withdraw(work, missing)
            raise
        convert(plan, work, workers, progress)
        notes: Counter[str] = Counter()
        for finished in work.finished.values():
            notes.update(finished.notes)
        zero = {n.removeprefix(ALL_ZERO) for n in notes if n.startswith(ALL_ZERO)}
        warnings = sorted(n for n in notes if n not in MATRIX_NOTES and not n.startswith(ALL_ZERO))
        warnings += zero_warnings(plan, work.finished, zero)
        with machine_errors(output, "publishing the container"):
            manifest = assemble(plan, work, sha256=sha256)
            require_unchanged(plan, work.finished)
            work.require_intact()
            work.publish(manifest.to_bytes(), replace=replace and force)
        warnings += [LACKS[what] for what in sorted(work.lacks)]
    counted = {what: notes[what] for what in MATRIX_NOTES if notes[what]}
    return Outcome("converted", manifest, (*plan.warnings, *warnings), counted)


def zero_warnings(plan: Plan, finished: Mapping[str, FinishedFile], dense: set[str]) -> Iterator[str]:
    """A sentence on expert matrices that are all zero, and one on the dense matrices named: their number, the first.

    A download that reserved its space and never came to its end looks like this, and encodes without an error.
    """
    zero = [
        f"{part} of {target.header.prefix}.{expert}"
        for target in plan.layers
        for expert, stats in enumerate(finished[target.name].stats)
        for part, norm in zip(PARTS, stats[1::2], strict=True)
        if norm == 0
    ]
    total = sum(t.header.count * len(PARTS) for t in plan.layers)
    if zero:
        yield f"{len(zero)} of {total} expert matrices are all zero, first {zero[0]}: is the source whole?"
    routers = [name for name in dense if name.endswith("." + plan.family.router)]
    if dense:
        what = f"{len(routers)} of them routers, first" if routers else "first"
        first = min(routers or dense, key=natural)
        yield f"{len(dense)} dense matrices are all zero, {what} {first}: is the source whole?"


def plan_for(request: Request, output: Path) -> Plan:
    """The plan of a conversion, after the checks that concern both ends."""
    source = place_of(request.source, once=True)
    with machine_errors(source, "reading the source"):
        checkpoint = open_checkpoint(source, merge_unlisted=request.merge_unlisted)
        check_paths(source, output)
        return plan_checkpoint(checkpoint, request)


def _differences(old: Manifest, plan: Plan) -> list[str]:
    pairs: Mapping[str, tuple[Any, Any]] = {
        "codec": (old.codec, plan.codec.name),
        "codec parameters": (dict(old.parameters), plan.codec.parameters),
        "source": (old.source.get("fingerprint"), plan.checkpoint.fingerprint),
        "--layers": (old.partial, plan.partial),
        "--dense": (None if old.dense is None else old.dense.identity, plan.dense_identity),
    }
    differing = [name for name, (have, want) in pairs.items() if have != want]
    if not differing:
        have = {name: f.nbytes for name, f in old.files.items() if name != EXPERTS_TABLE}
        differing = [f"file {name}" for name, size in sorted(have.items() ^ plan.files.items())][:1]
    return differing or [f"file {n}" for n, known in small_digests(plan).items() if known != old.files[n].xxh3][:1]


def _require_whole(old: Manifest, output: Path) -> None:
    for name, known in old.files.items():
        file = output / name
        if not file.is_file() or file.stat().st_size != known.nbytes:
            raise DataError(
                f"a container is here already, but this file of it, {known.nbytes} bytes, is gone or was cut",
                code="E0809",
                file=file,
                remedy="restore the file, or use --force to convert again",
            )


def preflight(plan: Plan, work: WorkDirectory) -> None:
    """Refuse before any work if the disk cannot take what is still to be written."""
    done = sum(f.nbytes for f in work.finished.values())
    needed = plan.bytes_out - done + SPARE
    free = disk_space(work.output)
    if free is None:
        work.lacks.add(SPACE)
    elif free < needed:
        raise MachineError(
            f"{needed:,} bytes of free disk space needed, found {free:,}",
            code="E0903",
            file=work.output,
            remedy="free space on that disk, or give another --output",
        )


def _withdraw(work: WorkDirectory, made: list[Path]) -> None:
    """Leave nothing behind if no work was done; `made` are the directories that were not there before."""
    shutil.rmtree(work.path, ignore_errors=True)
    for directory in made:
        try:
            directory.rmdir()
        except OSError:
            return  # somebody else put something there meanwhile


def assemble(plan: Plan, work: WorkDirectory, *, sha256: bool) -> Manifest:
    """Write records.xxh3 and experts.parquet, and make the manifest from the journal's digests.

    `sha256` reads every file back: workers write records in any order, and SHA-256 has no order but one.
    """
    raw = work.file(EXPERTS_TABLE)
    raw.unlink(missing_ok=True)
    with named(raw):
        write_experts(raw, expert_columns(plan, work.finished), record_roles(plan))
        with raw.open("rb") as handle:
            os.fsync(handle.fileno())
    files = {
        name: FileDigest(f.nbytes, bytes.fromhex(f.xxh3)) for name, f in work.finished.items() if name in plan.files
    }
    digests = b"".join(bytes.fromhex(r) for t in plan.layers for r in work.finished[t.name].records)
    write_durably(work.file(RECORDS), digests, work.lacks)
    files[RECORDS] = FileDigest(len(digests), digest(digests))
    files[EXPERTS_TABLE] = FileDigest(raw.stat().st_size, file_digest(raw, 0))
    sync_directory(work.path, work.lacks)
    if sha256:
        files = {name: replace(known, sha256=_sha256(work.file(name))) for name, known in files.items()}
    return Manifest(
        codec=plan.codec.name,
        parameters=plan.codec.parameters,
        lossless=plan.lossless and not any(f.notes.get(REQUANTISED) for f in work.finished.values()),
        partial=plan.partial,
        source=plan.source_facts,
        layers=tuple(
            LayerEntry(t.name, t.header.block, t.header.layer, t.header.count, t.sidecar) for t in plan.layers
        ),
        files=files,
        include_code=plan.request.include_code,
        merge_unlisted=plan.request.merge_unlisted,
        dense=dense_encoding(plan, work.finished),
    )


def dense_encoding(plan: Plan, finished: Mapping[str, FinishedFile]) -> DenseEncoding | None:
    """What the manifest says of encoded dense matrices; None if there are none."""
    codec = plan.dense_codec
    if codec is None:
        return None
    matrices = tuple(
        DenseMatrix(matrix.name, target.name, matrix.rows, matrix.columns, *sums)
        for target in plan.matrices
        for matrix, sums in zip(target.matrices, finished[target.name].matrices, strict=True)
    )
    return DenseEncoding(codec.name, codec.parameters, matrices)


def _sha256(path: Path) -> bytes:
    hasher = hashlib.sha256()
    own_file(path).hash(hasher)
    return hasher.digest()


def record_roles(plan: Plan) -> tuple[str, ...]:
    """The roles of the plan's encoding that lie in a record."""
    return plan.layers[0].header.layout(0).record.roles


def expert_columns(plan: Plan, finished: Mapping[str, FinishedFile]) -> Iterator[dict[str, list[Any]]]:
    """The columns of experts.parquet, a layer at a time: one row for every matrix, in order of expert and part."""
    roles = record_roles(plan)
    for target in plan.layers:
        columns: dict[str, list[Any]] = {name: [] for name, _ in columns_for(roles)}
        header, layout, done = target.header, target.header.layout(), finished[target.name]
        for expert in range(header.count):
            for number, part in enumerate(PARTS):
                codes = layout.record.slot(part, CODES)
                rows, cols = header.shape.matrix(part)
                row = {
                    "file": target.name, "block": header.block, "layer": header.layer, "expert": expert, "part": part,
                    "tensor": tensor_name(header.prefix, expert, header.part_names, codes),
                    "rows": rows, "columns": cols,
                    "record_offset": layout.record_offset(expert), "record_bytes": layout.stride,
                    **places(layout, expert, part),
                    "squared_error": done.stats[expert][2 * number], "squared_norm": done.stats[expert][2 * number + 1],
                }  # fmt: skip
                for name, value in row.items():
                    columns[name].append(value)
        yield columns
