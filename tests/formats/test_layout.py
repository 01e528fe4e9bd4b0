"""Layout against numbers worked out by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagestone.formats import encodings
from pagestone.formats.layout import (
    PAGE,
    PARTS,
    ExpertShape,
    LayerLayout,
    align_up,
    layer_entries,
    matrix_record,
    record_layout,
    tensor_name,
)

NAMES = ("gate_proj", "up_proj", "down_proj")
TINY = ExpertShape(hidden=256, intermediate=128)
TRUE = ExpertShape(hidden=2048, intermediate=512)
BLOCK = ExpertShape(hidden=192, intermediate=160)


def table(codec: str, shape: ExpertShape) -> list[tuple]:
    return [(s.part, s.role, s.offset, s.nbytes, s.shape) for s in record_layout(encodings.get(codec), shape).slots]


def test_tiny_int8():
    """tiny-moe, int8: 3 x 32768 bytes of codes, no pad_a, 512 + 512 + 1024 of scales, padded to 100 KiB."""
    assert table("int8", TINY) == [
        ("gate", "codes", 0, 32768, (128, 256)),
        ("up", "codes", 32768, 32768, (128, 256)),
        ("down", "codes", 65536, 32768, (256, 128)),
        ("gate", "scales", 98304, 512, (128, 1)),
        ("up", "scales", 98816, 512, (128, 1)),
        ("down", "scales", 99328, 1024, (256, 1)),
        (None, "pad", 100352, 2048, (2048,)),
    ]
    assert record_layout(encodings.get("int8"), TINY).stride == 102400 == 25 * PAGE


def test_tiny_fp8():
    """tiny-moe, fp8: one BF16 scale a block of 128 x 128, two blocks a matrix."""
    assert table("fp8", TINY) == [
        ("gate", "codes", 0, 32768, (128, 256)),
        ("up", "codes", 32768, 32768, (128, 256)),
        ("down", "codes", 65536, 32768, (256, 128)),
        ("gate", "scales", 98304, 4, (1, 2)),
        ("up", "scales", 98308, 4, (1, 2)),
        ("down", "scales", 98312, 4, (2, 1)),
        (None, "pad", 98316, 4084, (4084,)),
    ]
    assert record_layout(encodings.get("fp8"), TINY).stride == 102400


def test_true_shape_int8():
    """Qwen3.6's shapes, int8: codes and scales fill 771 pages exactly, so no pad is there at all."""
    assert table("int8", TRUE) == [
        ("gate", "codes", 0, 1048576, (512, 2048)),
        ("up", "codes", 1048576, 1048576, (512, 2048)),
        ("down", "codes", 2097152, 1048576, (2048, 512)),
        ("gate", "scales", 3145728, 2048, (512, 1)),
        ("up", "scales", 3147776, 2048, (512, 1)),
        ("down", "scales", 3149824, 8192, (2048, 1)),
    ]
    assert record_layout(encodings.get("int8"), TRUE).stride == 3158016 == 771 * PAGE


def test_true_shape_fp8():
    """Qwen3.6's shapes, fp8: 3 x 64 scales of two bytes, and a pad."""
    assert table("fp8", TRUE)[3:] == [
        ("gate", "scales", 3145728, 128, (4, 16)),
        ("up", "scales", 3145856, 128, (4, 16)),
        ("down", "scales", 3145984, 128, (16, 4)),
        (None, "pad", 3146112, 3712, (3712,)),
    ]
    assert record_layout(encodings.get("fp8"), TRUE).stride == 3149824 == 769 * PAGE


def test_partial_blocks_fp8():
    """Edge blocks that 128 does not fill have scales of their own: ceil(160/128) x ceil(192/128)."""
    assert table("fp8", BLOCK)[3:] == [
        ("gate", "scales", 92160, 8, (2, 2)),
        ("up", "scales", 92168, 8, (2, 2)),
        ("down", "scales", 92176, 8, (2, 2)),
        (None, "pad", 92184, 2024, (2024,)),
    ]


def test_pad_a_where_codes_end_off_64():
    """3 x 5 x 7 bytes of codes end at 105; the first scale is at 128."""
    slots = table("int8", ExpertShape(hidden=5, intermediate=7))
    assert slots[3] == (None, "pad_a", 105, 23, (23,))
    assert slots[4] == ("gate", "scales", 128, 28, (7, 1))


def test_bias_follows_scales():
    """An expert's own biases come after all scales, in the same order of parts."""
    layout = record_layout(encodings.get("int8"), ExpertShape(256, 128, "BF16"))
    assert [(s.part, s.offset, s.nbytes) for s in layout.slots if s.role == "bias"] == [
        ("gate", 100352, 256),
        ("up", 100608, 256),
        ("down", 100864, 512),
    ]
    assert layout.slots[-1].role == "pad" and layout.stride == 102400


def test_layer_of_tiny():
    """Records stand one after the other from the first page boundary after the header."""
    layer = LayerLayout(record_layout(encodings.get("int8"), TINY), 16, 16384)
    assert (layer.stride, layer.file_size) == (102400, 16384 + 16 * 102400)
    assert [layer.record_offset(e) for e in (0, 1, 15)] == [16384, 118784, 1552384]
    for outside in (-1, 16):
        with pytest.raises(IndexError):
            layer.record_offset(outside)


def test_names():
    """Tensors are named as the family names them; pads have no part."""
    layout = record_layout(encodings.get("fp8"), TINY)
    prefix = "model.layers.3.mlp.experts"
    assert tensor_name(prefix, 17, NAMES, layout.slot("up", "scales")) == f"{prefix}.17.up_proj.weight_scale_inv"
    assert tensor_name(prefix, 17, NAMES, layout.slots[-1]) == f"{prefix}.17.pad"
    with pytest.raises(KeyError):
        layout.slot("gate", "biases")


@given(
    codec=st.sampled_from(sorted(encodings.registry())),
    hidden=st.integers(1, 700),
    intermediate=st.integers(1, 700),
    bias=st.sampled_from([None, "BF16", "F32"]),
    count=st.integers(1, 4),
)
def test_no_hole_anywhere(codec, hidden, intermediate, bias, count):
    """For every shape the slots cover the record exactly, scales begin at 64, and the stride is whole pages."""
    if codec not in ("int8", "fp8"):
        return  # other codecs refuse some shapes
    layout = record_layout(encodings.get(codec), ExpertShape(hidden, intermediate, bias))
    position = 0
    for slot in layout.slots:
        assert slot.offset == position and slot.nbytes > 0
        position += slot.nbytes
    assert position == layout.stride and layout.stride % PAGE == 0
    assert layout.slot("gate", "scales").offset % 64 == 0
    codes = [layout.slot(part, "codes") for part in PARTS]
    assert codes[0].offset + codes[0].nbytes == codes[1].offset, "gate and up are never separated"
    entries = list(layer_entries(layout, count, "p", NAMES))
    assert entries[0][3] == 0 and entries[-1][4] == count * layout.stride
    assert all(a[4] == b[3] for a, b in pairwise(entries))
    assert len({e[0] for e in entries}) == len(entries)


@given(value=st.integers(0, 1 << 50), alignment=st.sampled_from([1, 64, 4096]))
def test_align_up(value, alignment):
    """The smallest multiple that is not below."""
    up = align_up(value, alignment)
    assert up % alignment == 0 and 0 <= up - value < alignment


@pytest.mark.parametrize(
    ("codec", "rows", "columns", "slots", "nbytes"),
    [
        ("int8", 130, 70,
         [("codes", 0, 9100), ("pad_a", 9100, 52), ("scales", 9152, 520), ("row_sums", 9672, 520),
          ("pad", 10192, 2096)],
         12288),
        ("fp8", 130, 70, [("codes", 0, 9100), ("pad_a", 9100, 52), ("scales", 9152, 4), ("pad", 9156, 3132)], 12288),
        ("q4", 128, 64, [("codes", 0, 4096), ("scales", 4096, 256), ("biases", 4352, 256), ("pad", 4608, 3584)], 8192),
        ("bf16", 64, 32, [("codes", 0, 4096)], 4096),
    ],
)  # fmt: skip
def test_a_dense_matrix(codec, rows, columns, slots, nbytes):
    """A dense matrix's record: all roles lie in it, those that lie beside an expert's record too."""
    record = matrix_record(encodings.get(codec), rows, columns)
    assert [(s.role, s.offset, s.nbytes) for s in record.slots] == slots
    assert (record.rows, record.columns, record.nbytes) == (rows, columns, nbytes)
    assert all(s.part is None for s in record.slots if s.role.startswith("pad"))
    assert record.slot("codes") == record.slots[0] == record.stored[0]
    assert [s.role for s in record.stored] == [role.name for role in encodings.get(codec).roles(rows, columns)]
    with pytest.raises(KeyError):
        record.slot("pad")
