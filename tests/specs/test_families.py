"""specs/families.md says of every family what convert/families/ says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pagestone.convert import families
from pagestone.convert.family import (
    DECODERS,
    Family,
    first_k_dense_layers,
    no_dense_layers,
    sparse_step_dense_layers,
)
from pagestone.formats.encodings.unread import ELEMENTS, TAILS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "specs" / "families.md").read_text()
FAMILIES = {f.name: f for f in families.registry().values()}
DENSE = {
    no_dense_layers: "none",
    sparse_step_dense_layers: "`mlp_only_layers`, `decoder_sparse_step`",
    first_k_dense_layers: "`first_k_dense_replace`, `moe_layer_freq`",
}


def ticked(words: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"`{w}`" for w in words)


def rows(f: Family) -> dict[str, str]:
    """Every row of a family's table, rendered from its file."""
    fused = f.fused
    mtp = "layers from `num_hidden_layers` on" if f.mtp_as_extra_layer else ticked(f.mtp)
    found = {
        "model types": ticked(f.model_types),
        "experts module": f"`{f.experts}`",
        "gate, up, down of an expert": ticked(f.parts),
        "transformers knows these names": "yes" if f.loads_parts else "no: they are ours",
        "fused tensors": "none" if fused is None else ticked([fused.gate_up, fused.down]),
        "router": f"`{f.router}`",
        "number of experts": ticked(f.count_fields),
        "hidden and intermediate size": ticked([f.hidden_field, *f.size_fields]),
        "dense layers": DENSE[f.dense_layers],
        "multi-token prediction": f"{mtp}; how many: `{f.mtp_field}`",
        "path parts of the expert block": ticked(sorted(f.markers)),
        "dense modules that keep FP8 codes": ticked(f.linears),
        "dense modules that `--dense` encodes": ticked(f.encoded),
    }
    if fused is not None:
        turned, plain = "[E, H, 2I] and [E, I, H]", "[E, 2I, H] and [E, H, I]"
        shapes = turned if fused.transposed else plain
        found["shapes of the fused tensors"] = f"{turned}, or {plain}" if fused.either_way else shapes
        found["gate and up in the fused tensor"] = "rows alternate" if fused.interleaved else "gate's rows, then up's"
        if fused.gate_up_bias is not None and fused.down_bias is not None:
            found["biases"] = ticked([fused.gate_up_bias, fused.down_bias])
    return found


def written(name: str) -> dict[str, str]:
    """The table of a family as the page has it."""
    section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", PAGE, re.S | re.M)
    assert section is not None, f"specs/families.md has no section {name}"
    return dict(re.findall(r"^\| ([^|]+?) \| (.+?) \|$", section[1], re.M))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_is_written_down(name: str) -> None:
    """A section for each file, with a row for each thing it states."""
    assert (ROOT / "convert" / "families" / f"{name}.py").is_file()
    assert written(name) == rows(FAMILIES[name])


def test_no_other_family_is_written_down() -> None:
    """Sections in order of names, between the rules and what is refused."""
    sections = re.findall(r"^## (.+)$", PAGE, re.M)
    assert sections == ["What a family states", *sorted(FAMILIES), "What is refused"]


def test_what_is_refused_is_written_down() -> None:
    """Every format that is refused by its name, and every nesting that is read."""
    refused = PAGE.partition("## What is refused\n")[2]
    for name in [*TAILS, *ELEMENTS.values()]:
        assert name in refused, name
    for decoder in DECODERS:
        assert f"`{decoder}.N.`" in PAGE


def page() -> str:
    """The sections of all families, as they must be; for whoever adds one: `python -c` this and paste."""
    return "\n".join(
        f"## {name}\n\n| | |\n|---|---|\n" + "".join(f"| {k} | {v} |\n" for k, v in rows(FAMILIES[name]).items())
        for name in sorted(FAMILIES)
    )
