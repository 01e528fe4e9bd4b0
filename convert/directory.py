"""The directory of a checkpoint before anything in it is read: is it one, is it whole, which files are its shards.

What is taken is provably complete: `model.safetensors`, the shards an index names, or one file whose name counts no
parts. A file that a downloader has not finished is as long as the whole one, so its companions are what tells.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable

from pagestone.convert.side_files import UNFINISHED
from pagestone.formats.errors import DataError, PagestoneError, RequestError
from pagestone.formats.storage import Place, place_of

SINGLE = "model.safetensors"
PART_OF = re.compile(r".*?(\d+)[-_]of[-_](\d+)\.safetensors")
COUNTED = re.compile(r"(.*[^0-9A-Za-z])?\d{2,}([^0-9A-Za-z].*)?\.safetensors")
"""A name with a number of its own in it may be one part of several."""
BESIDE = re.compile(
    r"\.(index(\.\w+)*\.json|(sha(1|224|256|384|512)|md5|b3|b2|crc32)(sum)?|asc|sig|minisig|license)"
    r"|~|\.~\d+~|[.~](bak|backup|orig|old|save)(\.?\d+)?~?"
)
"""What may follow a shard's whole name in another file's: indexes, digests, signatures, copies (`cp --backup`)."""
HUB_MODEL = re.compile(r"models--.*--.*", re.DOTALL)
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
OTHER_WEIGHTS = {
    "GGUF": (".gguf",),
    "pickles": (".bin", ".pt", ".pth", ".ckpt", ".pkl"),
    "weights of other programs": (".h5", ".msgpack", ".onnx", ".npz"),
}
ADAPTER = "adapter_config.json"


def ending(root: Place, suffix: str = ".safetensors") -> list[Place]:
    """What is in a directory under names with this end, in order of names."""
    return sorted((p for p in root.entries() if p.name.endswith(suffix)), key=lambda p: p.name)


def require_directory(root: Place) -> None:
    """Raise `RequestError` unless `root` is a directory that may be a checkpoint, saying what it is instead."""
    if root.is_dir():
        wrong = _cache(root) or _adapter(root) or _other_weights(root)
        if wrong is not None:
            raise wrong
        return
    given = os.fspath(root)
    found = "a file" if root.exists() else "nothing"
    remedy = "give the directory that holds config.json and the .safetensors files"
    if found == "nothing" and HUB_NAME.fullmatch(given):
        remedy += "; if this is a model's name on a hub, download it first"
    if found == "a file" and given.lower().endswith(".gguf"):
        remedy += "; GGUF is not read"
    raise RequestError(f"a checkpoint directory expected, found {found}", code="E0401", file=root, remedy=remedy)


def _cache(root: Place) -> RequestError | None:
    """The directory of a model in a hub cache, or one above or below it, but no snapshot."""
    if (root / "config.json").exists():
        return None
    models = sorted(p.name for p in root.entries() if HUB_MODEL.fullmatch(p.name))
    here = root.path()
    snapshots = here if here is None or not (here / "snapshots").is_dir() else here / "snapshots"
    if snapshots is not None and snapshots.name == "snapshots" and (snapshots.parent / "blobs").is_dir():
        found = sorted(p for p in snapshots.iterdir() if p.is_dir())
        main = snapshots.parent / "refs" / "main"
        named = snapshots / place_of(main).read_bytes().decode("utf-8", "replace").strip() if main.is_file() else None
        found = [named] if named in found else found
        remedy = f"give a snapshot: {' or '.join(map(str, found))}" if found else "download the model: it has none"
        message = "a checkpoint directory expected, found a hub cache's directory of a model"
    elif models:
        remedy = f"give a snapshot of a model: {root / models[0]}/snapshots/..."
        message = f"a checkpoint directory expected, found a hub cache of {len(models)} models"
    else:
        return None
    return RequestError(message, code="E0417", file=root, remedy=remedy)


def _adapter(root: Place) -> RequestError | None:
    if not (root / ADAPTER).is_file() or (root / "config.json").is_file():
        return None
    return RequestError(
        "a whole model expected, found an adapter (LoRA) without the model it belongs to",
        code="E0419",
        file=root / ADAPTER,
        remedy="merge it into its base model, save that, and convert the result",
    )


def _other_weights(root: Place) -> RequestError | None:
    names = sorted(p.name for p in root.entries())
    if any(n.lower().endswith((".safetensors", ".safetensors.index.json")) for n in names):
        return None
    for kind, suffixes in OTHER_WEIGHTS.items():
        files = [n for n in names if n.lower().endswith(suffixes)]
        if files:
            return RequestError(
                f".safetensors files expected, found {kind} only ({len(files)}, first {files[0]})",
                code="E0416",
                file=root,
                remedy="give the model's release in safetensors"
                + ("; if there is none, load these with the program they belong to and save them as safetensors"
                   if kind != "GGUF" else ": GGUF holds other codes under other names"),
            )  # fmt: skip
    return None


def shards_without_index(root: Place, index: str) -> list[str]:
    """The one file that is the whole model where there is no index; `RequestError` if none is provably that."""
    shards = sorted(p.name for p in ending(root))
    if SINGLE in shards:
        return [SINGLE]
    if len(shards) != 1:
        raise RequestError(
            f"{SINGLE} or {index} expected, found {len(shards)} .safetensors files and no index",
            code="E0404",
            file=root,
            remedy="download the index of the checkpoint",
        )
    part = PART_OF.fullmatch(shards[0])
    if part is not None and int(part[1]) == int(part[2]) == 1:
        return shards
    if part is not None or COUNTED.fullmatch(shards[0]):
        what = f"part {int(part[1])} of {int(part[2])}" if part else "what may be one part of several"
        raise RequestError(
            f"{SINGLE} or {index} expected, found {what} and no index",
            code="E0404",
            file=root / shards[0],
            remedy=f"download the index and every file it names (if this is the whole model, call it {SINGLE})",
        )
    return shards


def stale_index(root: Place, index: str, shards: Collection[str], missing: Collection[str]) -> PagestoneError | None:
    """The error of an index that names other files than the ones that are here; None if only files are missing."""
    others = sorted(p.name for p in ending(root) if p.is_file() and p.name not in shards)
    if not missing or not others:
        return None
    return DataError(
        f"the index of these files expected; it names {len(missing)} that are not here, first {min(missing)}, and not "
        f"{len(others)} that are, first {others[0]}",
        code="E0413",
        file=root / index,
        remedy="download the index that belongs to these files, or the files that it names",
    )


def announced_parts(shards: Iterable[str]) -> str | None:
    """A sentence if the shards' own names count more parts than an index names."""
    parts = [m for s in shards if (m := PART_OF.fullmatch(s))]
    totals = {int(m[2]) for m in parts}
    if len(totals) != 1 or len(parts) == next(iter(totals)):
        return None
    return f"the shards' names count {totals.pop()} parts, the index names {len(parts)}: others may be missing"


def refuse_unfinished(root: Place, shards: Collection[str], others: Collection[str]) -> None:
    """Raise `DataError` if a file stands beside one of these that says it is not downloaded to its end.

    Beside a shard every longer name counts but the ones in `BESIDE`; beside `others` those a downloader is known for.
    `others` are files that results hang on: of a document that may not be whole, a warning is enough.
    """
    for entry in sorted(p.name for p in root.entries()):
        known = entry not in shards and entry not in others
        visible = entry.removeprefix(".") if entry.startswith(".") else entry
        owner = next((s for s in shards if visible.startswith(s) and len(visible) > len(s)), None)
        if owner is not None and (visible.endswith(".safetensors") or BESIDE.fullmatch(visible[len(owner) :].lower())):
            owner = None
        if owner is None and entry.lower().endswith(UNFINISHED):
            owner = next((o for o in others if visible.lower() in {o.lower() + u for u in UNFINISHED}), None)
        if known and owner is not None:
            raise DataError(
                f"a finished file expected, found {entry!r} beside it: a download that is unfinished, or its notes",
                code="E0414",
                file=root / owner,
                remedy="let the download end; if this file is complete, remove the other one",
            )
