"""How the next token is chosen from logits: what is asked, what the publisher recommends, and the definition."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from pagestone.formats.errors import DataError, RequestError
from pagestone.formats.strict_json import brief
from pagestone.reader.configs import GENERATION, read_table, wrong_field
from pagestone.reader.model import Logits, values_of

Test = Callable[[Any], bool]
LIMITS: dict[str, tuple[str, Test]] = {
    "temperature": ("a finite number of at least 0", lambda v: math.isfinite(v) and v >= 0),
    "top_p": ("a number above 0 and at most 1", lambda v: 0 < v <= 1),
    "top_k": ("a whole number of at least 0", lambda v: isinstance(v, int) and v >= 0),
    "min_p": ("a number from 0 to 1", lambda v: 0 <= v <= 1),
    "repetition_penalty": ("a number from 0.01 to 100", lambda v: 0.01 <= v <= 100),
    "seed": ("a whole number from 0 to 2^64 - 1", lambda v: isinstance(v, int) and 0 <= v < 1 << 64),
}
"""What each field may be; a comparison with NaN is false."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. A temperature of 0 is greedy: the first of the largest logits.

    Raises `RequestError` (E1242) for a value out of its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            expected, allowed = LIMITS[name]
            if not _allowed(value, allowed):
                raise RequestError(
                    f"--{name.replace('_', '-')}: {expected} expected, found {brief(value)}",
                    code="E1242",
                    remedy="correct the sampling options",
                )

    def text(self, given: Collection[str] = ()) -> str:
        """For people: what applies, and where it is from: an option (`given`) or the publisher's recommendation."""
        names = [f.name for f in fields(self) if f.name != "seed" and getattr(self, f.name) != f.default]
        if self.temperature == 0:
            names = [n for n in names if n == "repetition_penalty"]
        words = [
            f"{n.replace('_', '-')} {getattr(self, n):g}" + ("" if n in given else f" ({GENERATION})") for n in names
        ]
        how = ["greedy"] if self.temperature == 0 else []
        return "sampling: " + ", ".join(how + words + ([] if how else [f"seed {self.seed}"]))


def choose_sampling(root: Path, **options: float | None) -> Sampling:
    """What generation_config.json in `root` recommends (greedy unless it says `do_sample`), overridden by the options
    that are not None. Raises `DataError` (E1227, E1235) for the file, `RequestError` (E1242) for the options."""
    given = {name: value for name, value in options.items() if value is not None}
    asked = Sampling(**given)  # type: ignore[arg-type]
    return replace(_recommended(root, set(given)), **{name: getattr(asked, name) for name in given})


def _recommended(root: Path, overridden: set[str]) -> Sampling:
    path = root / GENERATION
    table = read_table(path)
    advice: dict[str, Any] = {}
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value = table.get(name)
        if value is None or name in overridden:
            continue
        expected, allowed = LIMITS[name]
        if not _allowed(value, allowed):
            option = "--" + name.replace("_", "-")
            raise wrong_field(path, name, expected, value, f"restore the file, or override it with {option}")
        advice[name] = value
    samples = table.get("do_sample")
    if samples is not None and not isinstance(samples, bool):
        raise wrong_field(path, "do_sample", "true or false", samples)
    if not samples:
        return Sampling(repetition_penalty=advice.get("repetition_penalty", 1.0))
    return Sampling(**{"temperature": 1.0, **advice})


def _allowed(value: Any, allowed: Test) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return allowed(value)
    except OverflowError:  # an integer beyond any float
        return False


def candidates(logits: np.ndarray[Any, Any], how: Sampling, seen: Collection[int] = ()) -> tuple[Any, Any]:
    """(ids, probabilities) of the tokens to draw from, the likeliest first, equal ones by id.

    `logits` are [vocabulary] of any float type; everything is computed in float64. In this order:

    1. repetition penalty: the logit of a token in `seen` is divided by it if positive, else multiplied by it;
    2. temperature: differences to the largest logit are divided by it; 0 leaves the first of the largest alone;
    3. top-k: the k likeliest stay, all if 0;
    4. top-p: the fewest of the likeliest stay whose probabilities together reach p;
    5. min-p: those stay whose probability is at least min-p times the largest.

    Probabilities add up to 1 over what stayed.
    """
    values = np.array(logits, np.float64)
    if how.repetition_penalty != 1 and seen:
        at = np.fromiter(seen, np.int64)
        values[at] = np.where(values[at] > 0, values[at] / how.repetition_penalty, values[at] * how.repetition_penalty)
    largest = values.max()
    if not np.isfinite(largest):
        raise DataError(
            f"finite logits expected, found {largest}",
            code="E1250",
            remedy="verify the container: its weights, or the model's, are damaged",
        )
    if how.temperature == 0:
        return np.array([values.argmax()]), np.ones(1)
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature: -inf, whose probability is 0
        values = (values - largest) / how.temperature
        ids = np.argsort(-values, kind="stable")
        ids = ids[: how.top_k] if how.top_k else ids
        weights = np.exp(values[ids])
    chances = weights / weights.sum()
    if how.top_p < 1:
        chances = chances[: 1 + int(np.searchsorted(chances.cumsum(), how.top_p))]
    if how.min_p:
        chances = chances[chances >= how.min_p * chances[0]]
    return ids[: len(chances)], chances / chances.sum()


class Sampler:
    """Chooses tokens; two with the same seed choose the same from the same logits."""

    def __init__(self, sampling: Sampling) -> None:
        self._how = sampling
        self._random = np.random.PCG64(sampling.seed)

    def __call__(self, logits: Logits, seen: Collection[int] = ()) -> int:
        """A token id for logits [vocabulary]; `seen` are the ids of prompt and answer. See `candidates`.

        A draw takes the upper 53 bits of one number of PCG64 as a fraction of 1 along the probabilities.
        """
        ids, chances = candidates(values_of(logits), self._how, seen)
        if self._how.temperature == 0:
            return int(ids[0])
        drawn = (int(self._random.random_raw()) >> 11) * 2.0**-53
        return int(ids[min(int(np.searchsorted(chances.cumsum(), drawn, side="right")), len(ids) - 1)])
