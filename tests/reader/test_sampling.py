"""How tokens are chosen: the definition by known probabilities, the ranges of numbers, the publisher's advice."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagestone.formats.errors import DataError, RequestError
from pagestone.reader.sampling import Sampler, Sampling, candidates, choose_sampling

LIKELY = [0.125, 0.5, 0.0625, 0.25, 0.0625]
ORDER = [1, 3, 0, 2, 4]


def logits(chances: list[float]) -> Any:
    """Logits of these probabilities, off by a constant."""
    return np.log(np.array(chances)) + 7


def kept(**how: Any) -> list[int]:
    ids, chances = candidates(logits(LIKELY), Sampling(**{"temperature": 1.0, **how}))
    assert math.isclose(chances.sum(), 1) and (np.diff(chances) <= 1e-12).all()
    assert np.allclose(chances / chances[0], np.array(LIKELY)[ids] / LIKELY[ids[0]])
    return [int(i) for i in ids]


@pytest.mark.parametrize(
    ("how", "count"),
    [
        ({}, 5),
        ({"top_k": 1}, 1), ({"top_k": 3}, 3), ({"top_k": 5}, 5), ({"top_k": 10**30}, 5),
        ({"top_p": 0.01}, 1), ({"top_p": 0.49}, 1), ({"top_p": 0.51}, 2), ({"top_p": 0.74}, 2), ({"top_p": 0.76}, 3),
        ({"top_p": 0.87}, 3), ({"top_p": 0.88}, 4), ({"top_p": 0.95}, 5), ({"top_p": 1.0}, 5),
        ({"min_p": 0.0}, 5), ({"min_p": 0.12}, 5), ({"min_p": 0.13}, 3), ({"min_p": 0.24}, 3), ({"min_p": 0.26}, 2),
        ({"min_p": 1.0}, 1),
        ({"top_k": 3, "top_p": 0.8}, 2),  # of what top-k left, the two likeliest have 6/7
        ({"top_p": 0.8, "min_p": 0.3}, 2), ({"top_p": 0.7, "min_p": 0.01}, 2),
    ],
)  # fmt: skip
def test_what_is_kept(how: dict[str, Any], count: int) -> None:
    """The fewest of the likeliest that reach top-p: not one more, not one less; top-k before it, min-p after it."""
    assert kept(**how) == ORDER[:count]


def test_temperature_comes_before_the_cuts() -> None:
    """At 0.5 probabilities are squared: .735, .184, .046, .011, .011 (times 1.36); top-p sees those."""
    squared = np.array(LIKELY) ** 2
    _, chances = candidates(logits(LIKELY), Sampling(temperature=0.5))
    assert np.allclose(chances, np.sort(squared / squared.sum())[::-1])
    assert len(candidates(logits(LIKELY), Sampling(temperature=0.5, top_p=0.7))[0]) == 1


def test_repetition_penalty() -> None:
    """Tokens that were there: positive logits are divided, negative multiplied; also where the choice is greedy."""
    values = np.array([2.0, -1.0, 3.0, 0.5])
    for how in (Sampling(1.0, repetition_penalty=2.0), Sampling(0.0, repetition_penalty=2.0)):
        ids, chances = candidates(values, how, {1, 2})
        after = [2.0, -2.0, 1.5, 0.5]
        assert int(ids[0]) == 0
        if how.temperature:
            assert np.allclose(chances, np.sort(np.exp(after) / np.exp(after).sum())[::-1])
    assert int(candidates(values, Sampling())[0][0]) == 2 and values.tolist() == [2.0, -1.0, 3.0, 0.5]


def test_as_in_transformers(oracle: Any) -> None:
    """transformers' processors, in the order in which its `generate` takes them, keep the same tokens."""
    torch, transformers = oracle("torch"), oracle("transformers")
    seen = [3, 5, 7, 11]
    for seed in range(30):
        source = np.random.default_rng(seed)
        values = source.normal(0, 3, 64).astype(np.float32)
        how = Sampling(
            temperature=float(source.choice([0.3, 1.0, 2.0])), top_p=float(source.choice([0.5, 0.9, 1.0])),
            top_k=int(source.choice([0, 5, 20])), min_p=float(source.choice([0.0, 0.1])),
            repetition_penalty=float(source.choice([1.0, 1.3])),
        )  # fmt: skip
        made = [transformers.RepetitionPenaltyLogitsProcessor(how.repetition_penalty)]
        made.append(transformers.TemperatureLogitsWarper(how.temperature))
        made += [transformers.TopKLogitsWarper(how.top_k)] if how.top_k else []
        made += [transformers.TopPLogitsWarper(how.top_p)] if how.top_p < 1 else []
        made += [transformers.MinPLogitsWarper(how.min_p)] if how.min_p else []
        theirs = torch.tensor(values, dtype=torch.float64)[None]
        for step in made:
            theirs = step(torch.tensor([seen]), theirs)
        theirs = theirs.softmax(-1)[0].numpy()
        ids, chances = candidates(values, how, seen)
        assert sorted(ids) == np.flatnonzero(theirs).tolist(), (seed, how)
        assert np.allclose(theirs[ids], chances)


def test_equal_logits_are_ordered_by_id() -> None:
    """So that top-k keeps the same ones everywhere; greedy takes the first of the largest."""
    assert candidates(np.zeros(9), Sampling(1.0, top_k=4))[0].tolist() == [0, 1, 2, 3]
    assert candidates(np.array([0.0, 3.0, 1.0, 3.0]), Sampling())[0].tolist() == [1]


@pytest.mark.parametrize("temperature", [1e-320, 5e-324, 1e-30, 1e300])
def test_extreme_temperatures(temperature: float) -> None:
    """No NaN at any: tiny is greedy, huge is even; infinitely unlikely tokens stay so."""
    values = np.array([0.0, 3e38, 1.0, 3e38, -np.inf, -3e38])
    with np.errstate(all="raise"):
        ids, chances = candidates(values, Sampling(temperature))
    assert np.isfinite(chances).all() and math.isclose(chances.sum(), 1)
    assert chances[list(ids).index(4)] == 0
    if temperature < 1:
        assert chances.tolist() == [0.5, 0.5, 0, 0, 0, 0] and ids[:2].tolist() == [1, 3]


def test_logits_that_are_no_numbers(oracle: Any) -> None:
    """NaN would be chosen in silence: it is refused (E1250), greedy or not; -inf is a token never to be chosen."""
    torch = oracle("torch")
    for bad in (math.nan, math.inf):
        for temperature in (0.0, 1.0):
            with pytest.raises(DataError, match=r"finite logits.*E1250"):
                Sampler(Sampling(temperature))(torch.tensor([0.0, bad, 1.0]))
    assert Sampler(Sampling())(torch.tensor([-math.inf, -1.0], dtype=torch.bfloat16)) == 1
    with pytest.raises(DataError, match="E1250"):
        candidates(np.full(3, -np.inf), Sampling())


def test_draws(oracle: Any) -> None:
    """Frequencies are the probabilities; a seed gives the same draws for ever, also the largest."""
    torch = oracle("torch")
    values = torch.tensor(logits(LIKELY))
    draw = Sampler(Sampling(1.0, seed=4))
    counted = Counter(draw(values) for _ in range(4000))
    assert all(abs(counted[i] / 4000 - p) < 0.03 for i, p in enumerate(LIKELY)), counted
    flat = torch.zeros(1000)
    taken = {seed: [Sampler(Sampling(1.0, seed=seed))(flat)] for seed in (0, 1, 2**64 - 1)}
    again = Sampler(Sampling(1.0, seed=1))
    assert again(flat) == taken[1][0]
    assert taken == {0: [636], 1: [511], 2**64 - 1: [680]}


def test_a_draw_on_the_border(oracle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares are half open: a draw of exactly the first one's share takes the second; the largest takes the last."""
    torch = oracle("torch")
    draw = Sampler(Sampling(1.0))
    for drawn, expected in ((0, 0), ((1 << 63) - (1 << 11), 0), (1 << 63, 1), ((1 << 64) - 1, 1)):
        monkeypatch.setattr(draw, "_random", type("Fixed", (), {"random_raw": lambda self, n=drawn: n})())
        assert draw(torch.zeros(2)) == expected


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("temperature", [math.nan, math.inf, -math.inf, -1e-320, -1, 10**400], [0, 1e-320, 5, 1e308]),
        ("top_p", [math.nan, 0, 0.0, -0.5, 1.0000001, math.inf], [1e-320, 0.5, 1]),
        ("top_k", [-1, 0.5, math.nan, 2.0], [0, 1, 10**30]),
        ("min_p", [math.nan, -0.1, 1.1, math.inf], [0, 0.5, 1]),
        ("repetition_penalty", [math.nan, 0, 1e-320, -1, math.inf, 101], [0.01, 1, 1.3, 100]),
        ("seed", [-1, 2**64, 10**400], [0, 2**63, 2**64 - 1]),
    ],
)
def test_ranges(name: str, wrong: list[Any], right: list[Any]) -> None:
    """What is out of range is E1242 with the option's name, and the values at the border are taken."""
    for value in wrong:
        with pytest.raises(RequestError, match=rf"^--{name.replace('_', '-')}: .* expected, found .*E1242") as error:
            Sampling(**{name: value})
        assert len(str(error.value)) < 300
    for value in right:
        how = Sampling(**{"temperature": 1.0, name: value})
        ids, chances = candidates(logits(LIKELY), how, {1})
        assert len(ids) and np.isfinite(chances).all()


def advice(root: Path, **table: Any) -> Path:
    (root / "generation_config.json").write_text(json.dumps(table))
    return root


def test_the_publishers_advice(tmp_path: Path) -> None:
    """generation_config.json is followed and named; options override it one by one; without do_sample it is greedy."""
    assert choose_sampling(tmp_path) == Sampling() and Sampling().text() == "sampling: greedy"
    root = advice(tmp_path, do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=0.0, repetition_penalty=1.05)
    found = choose_sampling(root, seed=7)
    assert found == Sampling(0.6, 0.95, 20, 0.0, 1.05, 7)
    assert found.text() == (
        "sampling: temperature 0.6 (generation_config.json), top-p 0.95 (generation_config.json), "
        "top-k 20 (generation_config.json), repetition-penalty 1.05 (generation_config.json), seed 7"
    )
    found = choose_sampling(root, temperature=1.5, top_k=0, min_p=0.1, top_p=None)
    assert found == Sampling(1.5, 0.95, 0, 0.1, 1.05)
    assert "temperature 1.5, top-p 0.95 (gen" in found.text(["temperature", "top_k", "min_p"])
    assert (
        choose_sampling(root, temperature=0)
        .text(["temperature"])
        .startswith("sampling: greedy, repetition-penalty 1.05")
    )
    advice(tmp_path, temperature=0.6, top_k=20, repetition_penalty=1.1)
    assert choose_sampling(root) == Sampling(repetition_penalty=1.1)
    advice(tmp_path, do_sample=False, temperature=0.6)
    assert choose_sampling(root) == Sampling() and choose_sampling(root, temperature=1.0) == Sampling(1.0)
    advice(tmp_path, do_sample=True, temperature=None)
    assert choose_sampling(root) == Sampling(1.0)


def test_advice_that_is_wrong_can_be_overridden(tmp_path: Path) -> None:
    """The error names file, field and option; the option makes it harmless."""
    root = advice(tmp_path, do_sample=True, top_k=-1)
    with pytest.raises(DataError, match=r"generation_config.json: top_k: .*E1235") as error:
        choose_sampling(root)
    assert "--top-k" in str(error.value)
    assert choose_sampling(root, top_k=0) == Sampling(1.0)
    with pytest.raises(RequestError, match=r"--top-k.*E1242"):
        choose_sampling(root, top_k=-1)
