"""`verify` judges dense tensors by themselves: what nobody could read rightly is found although every digest agrees."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kits.conversions import prepare
from kits.families import Raw, read_tensors, write_tensors
from kits.quantised import Fp8Spec
from kits.vectors import generator

from pagestone.formats import encodings
from pagestone.formats.config import config_facts, config_with, stated_config
from pagestone.formats.layer_file import read_layer_file
from pagestone.formats.layout import PAGE
from pagestone.formats.safetensors_header import build_header
from pagestone.validate.verify import verify

ROOT = Path(__file__).resolve().parents[2]
DENSE = "dense-00001-of-00001.safetensors"
SPEC = Fp8Spec(192, 128)
Q, GATE = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate"
Change = Callable[[dict[str, Raw]], dict[str, Raw]]


make = generator()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of `source`, and of it a container in `fp8` and in `int8`."""
    root = tmp_path_factory.mktemp("dense")
    SPEC.write(root / "source")
    for codec in ("fp8", "int8"):
        prepare(root / "source", root / codec, encodings.get(codec), workers=1)
    return root


def rewritten(made: Path, root: Path, change: Change, codec: str = "fp8") -> Path:
    """The container with other dense tensors, and a config, an index and digests that are right for them."""
    shutil.copytree(made / codec, root)
    tensors = change(read_tensors(root, DENSE))
    entries, position = [], 0
    for name, (dtype, shape, data) in tensors.items():
        entries.append((name, dtype, shape, position, position + len(data)))
        position += len(data)
    head = build_header(entries, {"format": "pt"}, PAGE)
    (root / DENSE).write_bytes(head + b"".join(t[2] for t in tensors.values()))
    index = json.loads((root / "model.safetensors.index.json").read_bytes())
    experts = {n: f for n, f in index["weight_map"].items() if f != DENSE}
    before = sum(len(t[2]) for t in read_tensors(made / codec, DENSE).values())
    index["weight_map"] = dict(sorted((experts | dict.fromkeys(tensors, DENSE)).items()))
    index["metadata"]["total_size"] += position - before
    (root / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    layer, _ = read_layer_file(root / "layers-00.safetensors")
    facts = config_facts(((n, t[0], t[1]) for n, t in tensors.items()), [layer.shape], layer.part_names)
    config = json.loads((root / "config.json").read_bytes())
    config = config_with(config, stated_config(layer.codec, facts, True), layer.codec.config_keys)
    (root / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    make.seal(root)
    return root


def without(*names: str) -> Change:
    return lambda tensors: {n: t for n, t in tensors.items() if n not in names}


def having(added: Mapping[str, Raw]) -> Change:
    return lambda tensors: tensors | dict(added)


def edited(name: str, place: Any, value: Any, dtype: str) -> Change:
    def change(tensors: dict[str, Raw]) -> dict[str, Raw]:
        kind, shape, data = tensors[name]
        array = np.frombuffer(data, dtype).reshape(shape).copy()
        array[place] = value
        return tensors | {name: (kind, shape, array.tobytes())}

    return change


SCALE = f"{Q}.weight_scale_inv"
ROUTER = SPEC.codes(77, 2, 192)
CODES: dict[str, Raw] = {f"{GATE}.weight": ("F8_E4M3", (2, 192), ROUTER.bits.tobytes()),
                         f"{GATE}.weight_scale_inv": ("F32", (1, 2), ROUTER.grid.astype("<f4").tobytes())}  # fmt: skip
BAD: dict[str, tuple[Change, str, str, str]] = {
    "a scale of -1": (edited(SCALE, (2, 1), 0xBF80, "<u2"), "E1005", f"{Q}.weight", "a scale of -1.0 at row 256"),
    "a scale of NaN": (edited(SCALE, (4, 1), 0x7FC0, "<u2"), "E1005", f"{Q}.weight", "a scale of nan at row 512"),
    "code 0x7F": (edited(f"{Q}.weight", (570, 190), 0x7F, "u1"), "E1005", f"{Q}.weight", "row 570, column 190"),
    "a zero scale over codes": (edited(SCALE, (1, 1), 0, "<u2"), "E1005", f"{Q}.weight", "a zero scale over a code"),
    "a product beyond float32": (edited(SCALE, (1, 1), 0x7F7F, "<u2"), "E1005", f"{Q}.weight", "that is Inf"),
    "an orphan scale": (without(f"{Q}.weight"), "E0513", SCALE, "codes"),
    "codes that lost their scale": (without(SCALE), "E0513", f"{Q}.weight", "found none"),
    "a scale of another shape": (having({SCALE: ("BF16", (5, 1), b"\x80\x3f" * 5)}), "E0515", SCALE, "[5, 1]"),
    "a scale of another type": (having({SCALE: ("U8", (5, 2), b"\x7f" * 10)}), "E0516", f"{Q}.weight", "F8_E4M3"),
    "a scale for the whole matrix": (
        having({SCALE: ("F32", (1,), b"\0\0\x80\x3f")}), "E0516", f"{Q}.weight", "F8_E4M3"),
    "a scale of another name": (
        lambda t: having({f"{Q}.weight_scale": t[SCALE]})(without(SCALE)(t)), "E0516", f"{Q}.weight", "F8_E4M3"),
    "codes of a router": (having(CODES), "E0516", f"{GATE}.weight", "F8_E4M3"),
    "I8 without a scale": (having({f"{GATE}.weight": ("I8", (2, 192), bytes(384))}), "E0513", f"{GATE}.weight", "I8"),
    "I8 with a scale": (
        lambda t: having({f"{Q}.weight": ("I8", (576, 192), bytes(576 * 192)),
                          f"{Q}.weight_scale": ("F32", (576, 1), np.ones(576, "<f4").tobytes())})(without(SCALE)(t)),
        "E0516", f"{Q}.weight", "I8"),
    "U8": (having({f"{GATE}.weight": ("U8", (2, 192), bytes(384))}), "E0514", f"{GATE}.weight", "U8"),
    "codes of rank 3": (having({"a.weight": ("F8_E4M3", (1, 2, 2), bytes(4)), "a.scale": ("F32", (), bytes(4))}),
                        "E0514", "a.weight", "[1, 2, 2]"),
    "a scale of activations": (having({f"{Q}.input_scale": ("F32", (), bytes(4))}), "E0516", f"{Q}.input_scale", "F32"),
    "E5M2": (having({"a.weight": ("F8_E5M2", (2, 2), bytes(4))}), "E0514", "a.weight", "F8_E5M2"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_dense_tensors_that_nobody_reads_rightly(made: Path, tmp_path: Path, what: str) -> None:
    """One finding and no other, naming tensor and file, with the source and without; the config is what the codec
    writes for such tensors, so that nothing else can tell."""
    change, code, name, words = BAD[what]
    root = rewritten(made, tmp_path / "c", change)
    report = verify(root)
    (found,) = [f for f in report.findings if f.severity == "error"]
    assert (found.code, found.file) == (code, DENSE), found.text()
    assert name in found.message and words in found.message, found.text()
    assert (code, DENSE) in {(f.code, f.file) for f in verify(root, source=made / "source").findings}


@pytest.mark.parametrize("what", [w for w in BAD if BAD[w][1] == "E1005"])
def test_a_source_with_the_same_fault_hides_nothing(made: Path, tmp_path: Path, what: str) -> None:
    """Where the source has the same bytes, the comparison finds the fault as well."""
    change, _, name, words = BAD[what]
    root = rewritten(made, tmp_path / "c", change)
    source = shutil.copytree(made / "source", tmp_path / "s")
    write_tensors(source / "model.safetensors", change(read_tensors(source)))
    found = [f for f in verify(root, source=source).findings if f.severity == "error"]
    assert {f.code for f in found} == {"E1005", "E0702"}
    assert all(name in f.message and words in f.message for f in found)


def test_codes_in_a_container_of_other_codes(made: Path, tmp_path: Path) -> None:
    """FP8 codes with the best of scales in an int8 container: nothing there says what they are."""
    originals = read_tensors(made / "source")
    change = having({n: originals[n] for n in (f"{Q}.weight", SCALE)})
    assert {f.code for f in verify(rewritten(made, tmp_path / "c", change, "int8")).findings} == {"E0515"}


@pytest.mark.parametrize("codec", ["fp8", "int8"])
def test_a_rewritten_container_is_sound(made: Path, tmp_path: Path, codec: str) -> None:
    """The kit changes nothing by itself, and an unknown tensor of integers is no fault."""
    root = rewritten(made, tmp_path / "c", having({"a.position_ids": ("I64", (2,), bytes(16))}), codec)
    assert not verify(root).findings


def test_an_unknown_family_keeps_no_codes(made: Path, tmp_path: Path) -> None:
    """Nobody can say what a module of an unknown family is."""
    root = shutil.copytree(made / "fp8", tmp_path / "c")
    make.edit_manifest(root, lambda t: t["source"].update(family="other"))
    make.seal(root)
    assert {f.code for f in verify(root).findings} == {"E0516"}


def test_every_bad_tensor_is_named(made: Path, tmp_path: Path) -> None:
    """One fault does not hide another."""

    def change(tensors: dict[str, Raw]) -> dict[str, Raw]:
        for what in ("a scale of -1", "codes of a router"):
            tensors = BAD[what][0](tensors)
        k = "model.layers.0.self_attn.k_proj"
        tensors = edited(f"{k}.weight", (0, 0), 0xFF, "u1")(tensors)
        return without("model.layers.0.self_attn.v_proj.weight")(tensors)

    found = sorted((f.code, f.message.split(":")[0]) for f in verify(rewritten(made, tmp_path / "c", change)).findings)
    assert found == [
        ("E0513", "model.layers.0.self_attn.v_proj.weight_scale_inv"),
        ("E0516", f"{GATE}.weight"),
        ("E1005", "model.layers.0.self_attn.k_proj.weight"),
        ("E1005", f"{Q}.weight"),
    ]
