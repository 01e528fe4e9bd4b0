"""A model that says what it is told to: conversations without weights."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any


class Parrot:
    """What a conversation asks of a `TransformersModel`: every turn it says the next of `answers`, token by token.

    `heard` are the prompts it was given, whole.
    """

    def __init__(self, answers: Sequence[Sequence[int]], vocabulary: int, positions: int | None = None) -> None:
        self.vocabulary, self.positions = vocabulary, positions
        self.heard: list[list[int]] = []
        self.context = SimpleNamespace(store=SimpleNamespace(counters={}), checkpoint=lambda: None, tokens=None)
        self._answers = [list(a) for a in answers]
        self._left: list[int] = []
        self._end = 0

    def forward(self, ids: Sequence[int], state: Any = None) -> tuple[Any, Any]:
        """Logits that leave one token to choose; the state is all that was fed."""
        import torch

        fed = [*(state or []), *ids]
        if len(ids) > 1 or state is None:
            self.heard.append(fed)
            self._left = self._answers.pop(0)
        self.context.checkpoint()
        return torch.nn.functional.one_hot(torch.tensor([self._left.pop(0)]), self.vocabulary).float(), fed

    def close(self) -> None:
        """Nothing is held."""
