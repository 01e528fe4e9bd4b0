"""Headers that no reader would take, and tensors that no file has room for: split or refused before work starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from kits.checkpoints import T_ORDER, Tensor, Tensors, write_checkpoint
from kits.conversions import planned, prepare
from kits.families import read_tensors

from pagestone.convert import prepare as preparing
from pagestone.convert.plan import Plan, make_plan, plan_checkpoint
from pagestone.formats import encodings, safetensors_header
from pagestone.formats.encodings.bf16 import Bf16
from pagestone.formats.encodings.int8 import Int8
from pagestone.formats.errors import LayoutError
from pagestone.formats.layer_file import LayerHeader
from pagestone.formats.layout import BESIDE, PAGE, RECORD, ExpertShape, Role
from pagestone.formats.safetensors_header import build_header
from pagestone.validate import source as comparing
from pagestone.validate.verify import verify

SPEC = T_ORDER.having(mtp=False)
LIMIT = 5 * PAGE - 8


def many_names() -> Tensors:
    """The model, and 300 tensors whose names alone take four headers of `LIMIT`."""
    return SPEC.tensors() | {f"extra.{'n' * (100 + n % 120)}.{n}": Tensor.of([n + 0.5], "F32") for n in range(300)}


def plan_of(root: Path, **how: int) -> Plan:
    return planned(root, encodings.get("int8"), **how)


def test_dense_shards_are_split_by_their_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where readers take headers of 20 KiB, the dense tensors of one small shard fill several; every one is there,
    bytes as in the source, and all readers open the container."""
    source = write_checkpoint(tmp_path / "s", many_names(), SPEC.config(), shards=40)
    assert len(plan_of(source).dense) == 1
    monkeypatch.setattr(safetensors_header, "MAX_HEADER", LIMIT)  # what reading refuses
    monkeypatch.setattr(preparing, "plan_checkpoint", partial(plan_checkpoint, header_limit=LIMIT))
    monkeypatch.setattr(comparing, "make_plan", partial(make_plan, header_limit=LIMIT))
    prepare(source, tmp_path / "o", encodings.get("int8"), workers=1)
    shards = sorted((tmp_path / "o").glob("dense-*.safetensors"))
    heads = [shard.read_bytes().index(b"}}  ") for shard in shards]
    assert len(shards) > 3 and max(heads) < LIMIT and min(heads[:-1]) > LIMIT * 3 // 5  # full, but for the last
    want = {n: t for n, t in read_tensors(source).items() if ".experts." not in n}
    assert read_tensors(tmp_path / "o", "dense-*.safetensors") == want
    assert not verify(tmp_path / "o", source=source).findings


def test_how_a_source_is_sharded_does_not_matter(tmp_path: Path) -> None:
    """Splitting by headers is a function of the tensors alone."""
    roots = [
        write_checkpoint(tmp_path / str(n), many_names(), SPEC.config(), shards=n, alphabetical=n > 1) for n in (1, 7)
    ]
    plans = [[(s.name, s.head()) for s in plan_of(root, header_limit=LIMIT).dense] for root in roots]
    assert plans[0] == plans[1] and len(plans[0]) > 3


def test_a_layer_whose_header_is_too_long(tmp_path: Path) -> None:
    """A layer file cannot be split: one byte more than readers take is refused at the plan, naming the layer."""
    root = SPEC.write(tmp_path / "s")
    (length,) = {len(t.header.head()) - 8 for t in plan_of(root).layers}
    assert plan_of(root, header_limit=length).layers
    with pytest.raises(LayoutError, match="E0610") as caught:
        plan_of(root, header_limit=length - 1)
    error = caught.value
    assert error.tensor == f"{SPEC.root}.layers.0.mlp.experts" and str(length) in error.message and error.remedy
    assert error.file == str(root)


def test_a_tensor_whose_name_is_too_long(tmp_path: Path) -> None:
    """A name that fills a header by itself is refused naming its file; the name is not printed whole."""
    name = "x" * (LIMIT - PAGE)
    tensors = SPEC.tensors() | {name: Tensor.of([1.0])}
    root = write_checkpoint(tmp_path / "s", tensors, SPEC.config())
    assert len(plan_of(root, header_limit=2 * LIMIT).dense) == 1
    assert len(plan_of(root, header_limit=LIMIT).dense) == 2  # alone in its shard
    with pytest.raises(LayoutError, match="E0610") as caught:
        plan_of(root, header_limit=LIMIT - PAGE)
    assert caught.value.tensor == name[:200] and str(caught.value.file).endswith("model.safetensors")


def test_the_limit_is_that_of_readers() -> None:
    """The last length that is written is the last that is read; the sidecar is held to it too."""
    entries = [("a", "U8", (1,), 0, 1)]
    (length,) = {len(build_header(entries, {}, 8)) - 8}
    assert len(build_header(entries, {}, 8, length)) == 8 + length
    with pytest.raises(LayoutError, match="E0610"):
        build_header(entries, {}, 8, length - 1)
    file = LayerHeader(encodings.get("int8"), "layers", 0, "p", ExpertShape(8, 8), 1)
    with pytest.raises(LayoutError, match="E0610"):
        file.sidecar_head(len(file.sidecar_head()) - 9)


# -- codecs whose tensors have no room -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Odd(Bf16):
    """bf16 whose matrices are stored as tensors of these roles."""

    named: tuple[str, ...] = ("codes",)
    place: str = RECORD

    def roles(self, rows: int, columns: int) -> tuple[Role, ...]:
        (codes,) = super().roles(rows, columns)
        return tuple(replace(codes, name=r, suffix=f"t{n}", place=self.place) for n, r in enumerate(self.named))


@dataclass(frozen=True)
class OddBeside(Int8):
    """int8 with other tensors beside: two of one role, of some matrices only, in another place or shape."""

    named: tuple[str, ...] = ("row_sums",)
    rows_with: int | None = None
    place: str = BESIDE
    shape: tuple[int, ...] | None = None
    suffix: str = "row_sum"

    def roles(self, rows: int, columns: int) -> tuple[Role, ...]:
        *others, sums = super().roles(rows, columns)
        odd = replace(
            sums, place=self.place, shape=sums.shape if self.shape is None else self.shape, suffix=self.suffix
        )
        found = tuple(replace(odd, name=r) for r in self.named) if self.rows_with in (None, rows) else ()
        return (*others, *found)


@pytest.mark.parametrize(
    "codec",
    [Odd(named=("codes", "codes")), Odd(named=("scales",)), Odd(named=("scales", "codes")), Odd(named=()),
     Odd(named=("codes", "bias")), Odd(named=("codes", "pad")), Odd(place=BESIDE), Odd(place="elsewhere"),
     OddBeside(named=("row_sums", "row_sums")), OddBeside(place="elsewhere"), OddBeside(place=""),
     OddBeside(rows_with=SPEC.hidden), OddBeside(shape=(1,)), OddBeside(shape=()),
     OddBeside(suffix="weight"), OddBeside(suffix="bias")],
    ids=str,
)  # fmt: skip
def test_a_codec_whose_tensors_have_no_room(tmp_path: Path, codec: encodings.Codec) -> None:
    """A role without a place, two tensors of one role or suffix, or none of codes: refused at the plan."""
    source = SPEC.write(tmp_path / "s")
    with pytest.raises(LayoutError, match="E0611") as caught:
        planned(source, codec)
    assert caught.value.file == str(source) and caught.value.exit_code == 2 and caught.value.remedy


def test_the_kit_of_odd_codecs(tmp_path: Path) -> None:
    """Without what is odd they are codecs: the test above cannot pass for another reason."""
    source = SPEC.write(tmp_path / "s")
    for codec in (
        Odd(),
        Odd(named=("codes", "zeros")),
        OddBeside(),
        OddBeside(named=("zeros",)),
        OddBeside(place=RECORD),
    ):
        plan = planned(source, codec)
        assert len(plan.layers) == 2
    x = np.ones((4, 4), np.float32)
    out = Odd().allocate(4, 4)
    Odd().encode_definition(x, out)
    assert out["codes"].any()
