"""Sizes that are stated more than once must agree: config.json, the routers' columns, and the experts of every layer.

Shapes alone cannot tell hidden from intermediate: a checkpoint whose matrices are all transposed has them exchanged and
is as consistent as any other. What a config states decides; where it is silent, the routers and the other layers do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pagestone.convert.checkpoint import CONFIG, Checkpoint, SourceTensor
from pagestone.convert.family import Family
from pagestone.convert.sources import LayerSource
from pagestone.formats.errors import DataError


@dataclass(frozen=True, slots=True)
class _Claim:
    """What the hidden or intermediate size of a layer must be, who says so, and the tensor to blame if not."""

    hidden: bool
    size: int
    source: str
    tensor: SourceTensor


def check_sizes(checkpoint: Checkpoint, family: Family, layers: Sequence[LayerSource], depth: int) -> list[str]:
    """Compare hidden and intermediate sizes of `layers` with config.json, the routers, and each other; a warning where
    only the family's orientation says which of two sizes is which.

    `depth` is the number of decoder layers. Raises `DataError` (E0517) naming who says what, and the tensor, for sizes
    that differ.
    """
    confirmed = []
    for layer in layers:
        stated = list(_stated(checkpoint, family, layer, depth))
        for claim in [*stated, *_as_others(layers[0], layer, stated)]:
            if claim.size != (layer.shape.hidden if claim.hidden else layer.shape.intermediate):
                raise _differs(checkpoint, layer, claim, stated)
        # where both sizes are the same number, only both statements tell that they are meant to be
        needed = {True, False} if layer.shape.hidden == layer.shape.intermediate else {True}
        confirmed.append(needed <= {claim.hidden for claim in stated})
    # a layer as wide as a confirmed one is confirmed, unless it is square
    if all(confirmed) or (any(confirmed) and layers[0].shape.hidden != layers[0].shape.intermediate):
        return []
    fields = f"{family.hidden_field} or {' or '.join(family.size_fields)}"
    sizes = f"hidden {layers[0].shape.hidden}, intermediate {layers[0].shape.intermediate}"
    return [
        f"{CONFIG} states no {fields}: experts are taken as {sizes}, as the family orients them; nothing confirms it"
    ]


def _stated(checkpoint: Checkpoint, family: Family, layer: LayerSource, depth: int) -> Iterator[_Claim]:
    """What config.json says of a layer, and its router."""
    config, down = checkpoint.text_config, _down(layer)
    hidden = family.hidden_of(config)
    if hidden is not None:
        yield _Claim(True, hidden, f"{CONFIG} ({family.hidden_field})", down)
    size = family.size_of(config, layer.layer + (depth if layer.block == "mtp" else 0), depth)
    if size is not None:
        yield _Claim(False, size[1], f"{CONFIG} ({size[0]})", down)
    router = checkpoint.tensors.get(f"{layer.prefix.removesuffix(family.experts)}{family.router}")
    if router is None:
        return
    if len(router.shape) != 2:
        raise DataError(
            f"a router [{layer.count}, {layer.shape.hidden}] expected, found {list(router.shape)}", code="E0517",
            file=checkpoint.path / router.file, tensor=router.name, remedy="download the checkpoint again",
        )  # fmt: skip
    yield _Claim(True, router.shape[1], f"the columns of {router.name}", router)


def _as_others(first: LayerSource, layer: LayerSource, stated: Sequence[_Claim]) -> Iterator[_Claim]:
    """Layers are as wide as the first; their experts as large, unless config.json says how large."""
    yield _Claim(True, first.shape.hidden, first.prefix, _down(layer))
    if all(claim.hidden for claim in stated):
        yield _Claim(False, first.shape.intermediate, first.prefix, _down(layer))


def _differs(checkpoint: Checkpoint, layer: LayerSource, claim: _Claim, stated: Sequence[_Claim]) -> DataError:
    hidden, intermediate = layer.shape.hidden, layer.shape.intermediate
    wanted = {c.hidden: c.size for c in reversed(stated)}
    turned = wanted == {True: intermediate, False: hidden} and hidden != intermediate
    hint = "; its matrices are transposed: gate and up are [intermediate, hidden]" if turned else ""
    what = "hidden" if claim.hidden else "intermediate"
    return DataError(
        f"{what} size {claim.size} expected from {claim.source}, found experts of hidden {hidden}, intermediate "
        f"{intermediate} in {layer.prefix}{hint}",
        code="E0517", file=checkpoint.path / claim.tensor.file, tensor=claim.tensor.name,
        remedy="correct config.json, or download the checkpoint again: they do not belong together",
    )  # fmt: skip


def _down(layer: LayerSource) -> SourceTensor:
    """A tensor of the layer that has both sizes."""
    return layer.matrix(0, "down").tensor
