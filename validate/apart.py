"""Two models compared in the memory of one: the source runs first, what it said is kept on disk, then the container.

The source is a virtual container (`validate/virtual.py`) with reference products: its own weights, multiplied as
unmodified transformers does. Logits wait in a temporary file without a name, in the model's own type.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from pagestone.convert.errors import machine_errors
from pagestone.formats.errors import RequestError
from pagestone.formats.storage import forget
from pagestone.formats.text import size_text
from pagestone.reader.memory_plan import Line, MemoryPlan, trim
from pagestone.reader.model import Logits, Model, bytes_of
from pagestone.reader.session import Session
from pagestone.validate.choices import Score

LOGIT_BYTES = 4
"""The most bytes of a logit as models compute them."""
COMPARED = 16
"""Rows of logits that are taken to float64 at a time."""
WIDE = 6
"""Arrays of float64 that are there for each of them."""


class Scratch:
    """Where logits wait: a file that is gone when it is closed, also if the process ends."""

    def __init__(self, folder: Path | None, rows: int, vocabulary: int) -> None:
        """Refuse (E1332) a folder without room for `rows` of logits."""
        self._folder = Path(tempfile.gettempdir() if folder is None else folder)
        needed = rows * vocabulary * LOGIT_BYTES
        with machine_errors(self._folder, "keeping logits"):
            room = shutil.disk_usage(self._folder).free
            if room < needed:
                raise RequestError(
                    f"{size_text(needed)} of disk expected for {rows:,} rows of logits, found {size_text(room)}",
                    code="E1332",
                    file=self._folder,
                    remedy="give --scratch a folder with more room, or fewer --tokens",
                )
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=self._folder)

    def write(self, logits: Logits) -> None:
        """Keep logits behind those that are there."""
        with machine_errors(self._folder, "keeping logits"):
            self._file.write(bytes_of(logits))

    def rewind(self) -> None:
        """Read from the first again."""
        with machine_errors(self._folder, "keeping logits"):
            self._file.flush()
            os.fsync(self._file.fileno())  # what is not on disk cannot leave the page cache
            forget(self._file.fileno(), 0, self._file.tell())
            self._file.seek(0)

    def read(self, nbytes: int) -> bytearray:
        """The next bytes."""
        data = bytearray(nbytes)
        with machine_errors(self._folder, "reading logits again"):
            got = self._file.readinto(data)  # type: ignore[attr-defined]
            forget(self._file.fileno(), 0, self._file.tell())
        if got != nbytes:
            raise ValueError(f"{nbytes} bytes of logits expected, found {got}")
        return data

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


class Heard:
    """What a model said, to be said again in its place: `forward` gives its logits window by window, in order."""

    def __init__(self, scratch: Scratch, vocabulary: int) -> None:
        self._scratch, self._vocabulary = scratch, vocabulary
        self._dtype: Any = None
        self.answers: list[str] = []
        """What it answered to the questions, in order."""
        self.scores: list[list[Score]] = []
        """What it made of the endings of choices, in order."""

    def listen(self, model: Model, pieces: Sequence[Sequence[int]]) -> None:
        """Run a model over windows of ids, and keep what it says."""
        for piece in pieces:
            logits = model.forward(piece, every=True)[0]
            self._dtype = logits.dtype
            self._scratch.write(logits)
        self._scratch.rewind()

    def forward(self, ids: Sequence[int], state: Any = None, *, every: bool = True) -> tuple[Logits, None]:
        """The next window's logits, [len(ids), vocabulary] in the model's type."""
        shape = (len(ids), self._vocabulary)
        if isinstance(self._dtype, np.dtype):
            data = self._scratch.read(shape[0] * shape[1] * self._dtype.itemsize)
            return np.frombuffer(data, self._dtype).reshape(shape), None
        import torch

        data = self._scratch.read(shape[0] * shape[1] * self._dtype.itemsize)
        return torch.frombuffer(data, dtype=self._dtype).view(shape), None

    def close(self) -> None:
        """Let go of what was kept."""
        self._scratch.close()


def planned(session: Session, rows: int) -> MemoryPlan:
    """The plan for `options.memory`, with room for `rows` of logits and their comparison. Raises as `plan_for`."""
    vocabulary = session.vocabulary
    compared = rows * vocabulary * LOGIT_BYTES + COMPARED * WIDE * vocabulary * 8
    return session.plan_for(prompt=session.options.context, logits=rows, extra=[Line("logits compared", compared)])


def planned_model(session: Session, rows: int) -> Model:
    """The session's model under the plan that `planned` makes."""
    plan = planned(session, rows)
    session.note(plan.text())
    store, notes = session.open_store(session.options.io, plan.cache_bytes if session.options.io == "direct" else None)
    model = session.model_over(store)
    for text in (*notes, *model.notes):
        session.note(text)
    return model


def let_go() -> None:
    """Give back what the first model took before the second is planned."""
    gc.collect()
    trim()
