"""What a running model is, whoever computes it: all that conversations and judges know of one.

No library is behind these names. A host (`reader/hosts`) makes such models of containers; its experts come from a
store, through the context that the model and whoever watches it share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from pagestone.formats.dtypes import Array
from pagestone.formats.errors import RequestError
from pagestone.reader.container import Container
from pagestone.reader.store import ExpertStore

if TYPE_CHECKING:
    import torch

NATIVE, REFERENCE = PRODUCTS = ("native", "reference")
"""How experts are multiplied: from their codes, or decoded first (`reader/experts.py`)."""
AUTO = "auto"
TORCH_IS_FASTER = frozenset({"bf16"})
"""Codecs whose native product loses to torch's in the whole token (BENCHMARKS.md): there the default is reference."""
CPU = "cpu"
DEVICES = (CPU,)
"""Where models run and were tested."""
KEYS_AND_VALUES, RECURRENT, BOTH = "keys and values", "recurrent", "both"
"""Kinds of state: it grows with every token and its end can be cut off; it is of one size and cannot go back; or some
layers have one and some the other."""

GRID = 64
"""Tokens that linear attention computes as one chunk: pieces of a prompt are multiples."""
PIECE = 512
"""Tokens of a longer prompt that a layer works on at once, unless another number is asked for."""

Logits: TypeAlias = "torch.Tensor | Array"
"""[n, vocabulary], of torch or of NumPy, in the type the model computed them in."""


def values_of(logits: Logits) -> Array:
    """Logits as a NumPy array of floats: every value exactly what the model gave, float32 for the shorter types."""
    if isinstance(logits, np.ndarray):
        return logits
    wide = logits if logits.element_size() > np.dtype(np.float32).itemsize else logits.float()
    values: Array = wide.detach().cpu().numpy()
    return values


def bytes_of(logits: Logits) -> memoryview:
    """The bytes of logits in row-major order, in the model's own type."""
    if isinstance(logits, np.ndarray):
        bits: Any = np.ascontiguousarray(logits).view(np.uint8).reshape(-1)
    else:
        import torch

        bits = logits.detach().cpu().contiguous().view(torch.uint8).reshape(-1).numpy()
    return memoryview(bits)


def greedy(logits: Logits) -> int:
    """The id of the largest logit of the last row, the first of equal ones."""
    return int(logits[-1].argmax())


class Observer(Protocol):
    """Told what a layer's experts did, for audits. Digests are XXH3-128 of raw bytes."""

    def layer(self, layer: int, what: str, digest: bytes) -> None:
        """`what` is "input", "routing" (ids and weights, a digest of each) or "output"."""

    def expert(self, layer: int, expert: int, digest: bytes) -> None:
        """The rows an expert adds."""


class Context:
    """What the layers of one model share: store, products, device, observer, and a way to stop between layers.

    `experts` is one of `PRODUCTS`, and so is `linears`, for dense matrices in an encoding (by default as experts);
    `device` is one of `DEVICES`.
    """

    def __init__(
        self, store: ExpertStore, experts: str = NATIVE, device: str = CPU, linears: str | None = None
    ) -> None:
        self.store, self.experts, self.device = store, experts, device
        self.linears = experts if linears is None else linears
        self.threads: int | None = None
        """Threads of a native product; None: as many as torch uses. They change no bit."""
        self.tokens: int | None = None
        """Tokens that the state has room for, prompts and answers together; None: as many as memory has."""
        self.observer: Observer | None = None
        self.checkpoint: Callable[[], None] = lambda: None
        """Called before every layer's experts; may raise to stop the forward pass where nothing is leased."""


class Model(Protocol):
    """A model of a container, ready to run."""

    context: Context
    notes: list[str]
    """What the user should know of how it was loaded."""

    @property
    def vocabulary(self) -> int:
        """Number of logits."""

    @property
    def positions(self) -> int | None:
        """How many tokens the model was made for, None if nothing says so."""

    @property
    def state_kind(self) -> str:
        """What `forward` returns beside logits: `KEYS_AND_VALUES`, `RECURRENT` or `BOTH`."""

    def forward(self, ids: Sequence[int], state: Any = None, *, every: bool = False) -> tuple[Logits, Any]:
        """(logits, state) after feeding token ids to one sequence.

        `state` is what an earlier call returned, None to begin; it may be used once. Logits are [1, vocabulary] of the
        last token, or [len(ids), vocabulary] with `every`. Every layer of experts is gone through once, with all ids:
        `context.checkpoint` is called before it, and `context.observer` is told of it.
        """

    def surroundings(self) -> Mapping[str, Mapping[str, Any]]:
        """What the bytes of its logits may depend on, for audits, besides the processor and the container.

        "versions" of libraries and numbers of "threads" by name; "model": "host", "class", "dtype", "attention" and
        "prefill_piece", None where a prompt is worked on whole.
        """

    def close(self) -> None:
        """Let its store's threads and memory go; may be called twice."""


# -- what can be asked ------------------------------------------------------------------------------------------------


def experts_for(codec: str, asked: str) -> str:
    """One of `PRODUCTS`: `asked` (E1244 if it is none), or for "auto" the faster one in the whole token."""
    if asked == AUTO:
        return REFERENCE if codec in TORCH_IS_FASTER else NATIVE
    check_experts(asked)
    return asked


def linears_for(asked: str) -> str:
    """One of `PRODUCTS`, for dense matrices in an encoding: `asked`, or for "auto" native, which decodes nothing."""
    return NATIVE if asked == AUTO else asked


def check_experts(word: str) -> None:
    """Refuse (E1244) what is none of `PRODUCTS`."""
    if word not in PRODUCTS:
        raise RequestError(
            f"--experts expected to be one of {', '.join(PRODUCTS)}, found {word!r}",
            code="E1244",
            remedy="choose one, or auto for the faster of the two",
        )


def check_device(word: str) -> None:
    """Refuse (E1290) what is none of `DEVICES`."""
    if word not in DEVICES:
        raise RequestError(
            f"a device of {', '.join(DEVICES)} expected, found {word!r}: models were tested on no other",
            code="E1290",
            remedy="leave the device out",
        )


def check_piece(piece: int | None) -> None:
    """Refuse (E1282) pieces of a prompt that do not keep linear attention's grid of chunks."""
    if piece is not None and (piece < GRID or piece % GRID):
        raise RequestError(
            f"pieces of a prompt of a multiple of {GRID} tokens expected, found {piece}",
            code="E1282",
            remedy=f"leave it out, or give a multiple, such as {8 * GRID}",
        )


def check_runnable(container: Container) -> None:
    """Refuse, by name, what no model can be made of: partial containers, layers of unequal expert counts."""
    if container.manifest.partial is not None:
        first, end = container.manifest.partial
        raise RequestError(
            f"a complete container expected, found one of layers {first} to {end - 1}",
            code="E1222",
            file=container.path,
            remedy="convert again without --layers",
        )
    counts = {n: layer.entry.experts for n, layer in container.layers.items()}
    if len(set(counts.values())) > 1:
        first = next(iter(counts))
        other = next(n for n, c in counts.items() if c != counts[first])
        raise RequestError(
            f"layers of equally many experts expected, found {counts[first]} in layer {first} and {counts[other]} "
            f"in layer {other}",
            code="E1223",
            file=container.path,
            remedy="transformers has one number of experts for all layers; this container can be read, not run",
        )


@dataclass(frozen=True, slots=True)
class Loading:
    """How a model is to be made of a container and a store. Raises `RequestError` (E1244, E1282, E1290).

    `experts` is one of `PRODUCTS`; `attention` a name the host knows, None for its own choice; `verify` compares dense
    tensors with their digests; `context` is how many tokens the state has room for from the beginning, None to let it
    grow; `linears` is how dense matrices in an encoding are multiplied, None as `experts`; `prefill_piece` is how many
    tokens of a prompt a layer works on at once (`reader/pieces.py`), None for all.
    """

    experts: str = NATIVE
    device: str = CPU
    attention: str | None = None
    verify: bool = True
    context: int | None = None
    linears: str | None = None
    prefill_piece: int | None = PIECE

    def __post_init__(self) -> None:
        check_experts(self.experts)
        check_experts(self.experts if self.linears is None else self.linears)
        check_piece(self.prefill_piece)
        check_device(self.device)
