"""Facts of the plan, looked at again when they become a promise: a source that changes is not converted into a mixture.

Every file a container is made from is held to its stamp (`storage.Stamp`), the small ones to their contents too.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagestone.convert.errors import machine_errors
from pagestone.convert.journal import FinishedFile
from pagestone.convert.plan import Plan
from pagestone.formats.digests import Hasher, digest
from pagestone.formats.errors import DataError
from pagestone.formats.storage import Place, Stamp

FACTS = ("length", "modification time", "change time")


def used_stamps(plan: Plan) -> dict[str, Stamp]:
    """The stamps of the source files that the container is made from, as they were when each was first read."""
    unused = {f.name for f in plan.side_files if f.rule is not None}
    return {name: stamp for name, stamp in plan.checkpoint.stamps.items() if name not in unused}


def small_digests(plan: Plan) -> dict[str, bytes]:
    """Digests, as they are now, of the files of the container that are not weights: made here or copied."""
    found = {name: digest(data) for name, data in plan.generated.items()}
    for side in plan.side_files:
        if side.rule is None:
            with machine_errors(plan.checkpoint.path / side.name, "reading the source"):
                found[side.name] = _digest(plan.checkpoint.path / side.name)
    return found


def require_unchanged(plan: Plan, finished: Mapping[str, FinishedFile]) -> None:
    """Refuse to publish if the source is not what was planned: `DataError` (E0703) naming the file."""
    root = plan.checkpoint.path
    for name, known in sorted(used_stamps(plan).items()):
        with machine_errors(root / name, "reading the source"):
            try:
                now = (root / name).stamp()
            except FileNotFoundError:
                raise _changed(plan, name, "it is gone") from None
        if now != known:
            what = next(fact for fact, a, b in zip(FACTS, known, now, strict=True) if a != b)
            raise _changed(plan, name, f"its {what} is another")
    wanted = {name: known.hex() for name, known in plan.checkpoint.digests.items()}
    wanted |= {f.name: finished[f.name].xxh3 for f in plan.side_files if f.rule is None}
    for name, xxh3 in wanted.items():
        with machine_errors(root / name, "reading the source"):
            if _digest(root / name).hex() != xxh3:
                raise _changed(plan, name, "its contents are others")


def _digest(file: Place) -> bytes:
    hasher = Hasher()
    file.hash(hasher)
    return hasher.digest()


def _changed(plan: Plan, name: str, what: str) -> DataError:
    return DataError(
        f"the source changed while it was converted: {what} than when the work began; nothing was published",
        code="E0703",
        file=plan.checkpoint.path / name,
        remedy="see that nothing writes to the source, then start again with --force: it discards the finished work, "
        "which may come from either state",
    )
