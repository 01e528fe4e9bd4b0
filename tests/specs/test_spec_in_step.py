"""The tables of specs/ say what the code does: parsed from the Markdown and compared, both ways."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from pagestone.convert.checkpoint import CONFIG, INDEX
from pagestone.convert.plan import DENSE_SHARD
from pagestone.formats import codecs, layer_file, layout, manifest, safetensors_header
from pagestone.formats.codecs import ConfigFacts
from pagestone.formats.codecs.fp8 import PARTIAL_BLOCKS, VALUES
from pagestone.formats.digests import canonical_json, digest, layer_digest
from pagestone.formats.dtypes import ITEM_BITS, VIEWS
from pagestone.formats.errors import NonFiniteError
from pagestone.formats.layer_file import LayerFile
from pagestone.formats.layout import ExpertShape
from pagestone.formats.stats import sum_of_squares

ROOT = Path(__file__).resolve().parents[2]
SPECS = ROOT / "specs"
CODE = ("convert", "formats", "reader", "validate", "scripts/pagestone")


def page(name: str) -> str:
    return (SPECS / name).read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """What stands below a heading, up to the next heading."""
    begin = text.index(f"{heading}\n")
    rest = text[begin + len(heading) :]
    end = re.search(r"^#", rest, re.M)
    return rest if end is None else rest[: end.start()]


def tables(text: str) -> list[list[list[str]]]:
    """Every table of a text: rows of cells without the heading row."""
    found: list[list[list[str]]] = []
    rows: list[list[str]] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([c.strip().replace("\\|", "|") for c in re.split(r"(?<!\\)\|", line.strip())[1:-1]])
        elif rows:
            found.append(rows[2:])
            rows = []
    return found


def table(text: str, heading: str) -> list[list[str]]:
    return tables(section(text, heading))[0]


def names(rows: list[list[str]]) -> list[str]:
    return [row[0].strip("`") for row in rows]


def marked(text: str, word: str) -> list[tuple[list[str], list[list[str]]]]:
    """Tables that follow a comment `<!-- word arguments -->`: the arguments and the rows."""
    parts = re.split(rf"<!-- {word}: (.*?) -->\n", text)
    return [(parts[n].split(" "), tables(parts[n + 1])[0]) for n in range(1, len(parts), 2)]


def codec_pages() -> list[Path]:
    return sorted((SPECS / "codecs").glob("*.md"))


# -- container.md ------------------------------------------------------------------------------------------------------


def test_constants():
    stated = {row[0]: int(row[1]) for row in table(page("container.md"), "## Constants")}
    assert stated == {
        "spec version": int(layer_file.SPEC_VERSION),
        "PAGE": layout.PAGE,
        "CODES_END": layout.CODES_END,
        "MAX_HEADER": safetensors_header.MAX_HEADER,
    }
    assert "shards of up to 4 GiB" in page("container.md") and DENSE_SHARD == 4 << 30


def test_element_types():
    rows = tables(section(page("container.md"), "## Reading a safetensors file"))[1]
    stated = {row[n]: int(row[n + 1]) for row in rows for n in (0, 2, 4) if row[n]}
    assert stated == ITEM_BITS


@pytest.mark.parametrize("codec", sorted(codecs.registry()))
@pytest.mark.parametrize("bias", [None, "BF16"])
def test_metadata_keys(codec, bias):
    rows = table(page("container.md"), "### Metadata")
    here = LayerFile(codecs.get(codec), "layers", 3, "p", ExpertShape(256, 128, bias), 2)
    conditional = {"pagestone.bias_dtype"} if bias is None else set()
    stated = {row[0].strip("`"): row[1] for row in rows}
    in_layer = {k for k, where in stated.items() if where in ("yes", "no")} - conditional
    in_sidecar = {k for k, where in stated.items() if where in ("yes", "only there")} - conditional
    assert set(here.metadata()) == in_layer
    assert set(here.sidecar_metadata()) == in_sidecar
    assert set(stated.values()) == {"yes", "no", "only there"}


def test_record_examples():
    found = marked(page("container.md"), "record")
    assert len(found) >= 3
    for (name, parameters, hidden, inter), rows in found:
        record = layout.record_layout(codecs.get(name, json.loads(parameters)), ExpertShape(int(hidden), int(inter)))
        part_of = dict(zip(layout.PARTS, layout.PART_NAMES, strict=True))
        assert rows == [
            [
                str(s.offset),
                str(s.nbytes),
                f"`{part_of[s.part]}.{s.suffix}`" if s.part else f"`{s.suffix}`",
                s.dtype,
                str(list(s.shape)),
            ]
            for s in record.slots
        ]
        before = page("container.md").split(f"<!-- record: {name} {parameters} {hidden} {inter} -->")[0]
        assert f"stride {record.stride}" in before.rstrip().splitlines()[-1]


def test_order_of_a_record():
    rows = table(page("container.md"), "### The record")
    order = [re.sub(r"<part>\.|[<>`]", "", row[2]) for row in rows]

    class Full:
        def tensors(self, rows: int, columns: int) -> tuple[layout.MatrixTensor, ...]:
            return tuple(layout.MatrixTensor(role, role, "U8", (1,)) for role in layout.ROLES)

    record = layout.record_layout(Full(), ExpertShape(3, 1, "U8"))
    found = list(dict.fromkeys(s.role for s in record.slots))
    assert found == order == ["codes", "pad_a", "scales", "biases", "bias", "pad"]


def test_hex_map():
    ((path,), rows) = marked(page("container.md"), "hex")[0]
    raw = (ROOT / "tests" / "vectors" / "accept" / path).read_bytes()
    for offset, shown, meaning in rows:
        wanted = bytes.fromhex(shown.strip("`"))
        assert raw[int(offset) : int(offset) + len(wanted)] == wanted, meaning
        quoted = re.match(r"`([^`]+)`", meaning)
        if quoted:
            assert wanted.decode() == quoted[1]
    length = int.from_bytes(raw[:8], "little")
    spaces = length + 8 - len(raw[: length + 8].rstrip(b" "))
    assert f"N = 0x{length:04x} = {length}" in rows[0][2] and f"{spaces:,} spaces" in page("container.md")
    assert f"{len(raw):,} bytes" in page("container.md")


def test_sidecar_tensors():
    rows = table(page("container.md"), "## The row-sum sidecar")
    here = LayerFile(codecs.get("int8"), "layers", 0, "p", ExpertShape(24, 40), 5)
    value = {"E": 5, "2I": 80, "H": 24}
    stated = [
        (name.strip("`"), dtype, tuple(value[d.strip()] for d in dims.strip("[]").split(",")))
        for name, dtype, dims, _ in rows
    ]
    assert tuple(stated) == here.sidecar_tensors()


def test_file_names():
    stated = set(names(table(page("container.md"), "## The directory")))
    assert {manifest.MANIFEST, manifest.EXPERTS, CONFIG, INDEX} <= stated
    for block in layer_file.BLOCKS:
        name = layer_file.layer_file_name(block, 7)
        assert name == f"{block}-07.safetensors" and f"{block}-NN.safetensors" in stated
        assert layer_file.sidecar_name(name) == f"{block}-07.rowsum.safetensors"
        assert f"{block}-NN.rowsum.safetensors" in stated
    assert "dense-NNNNN-of-NNNNN.safetensors" in stated


# -- manifest.md -------------------------------------------------------------------------------------------------------


def an_example() -> dict:
    root = ROOT / "tests" / "vectors" / "accept" / "int8-small"
    known = manifest.read_manifest(root / manifest.MANIFEST)
    file = manifest.FileDigest(5, bytes(16), bytes(32))
    return json.loads(
        manifest.Manifest(
            known.codec, known.parameters, True, (0, 1), known.source, known.layers, {"x": file}
        ).to_bytes()
    )


def test_manifest_fields():
    text, example = page("manifest.md"), an_example()
    assert sorted(names(table(text, "## manifest.json"))) == sorted(example)
    assert sorted(names(table(text, "### An entry of `layers`"))) == sorted(example["layers"][0])
    assert sorted(names(table(text, "### An entry of `files`"))) == sorted(example["files"]["x"])
    assert sorted(names(table(text, "### `source`"))) == sorted(example["source"])


def test_parquet_columns():
    rows = table(page("manifest.md"), "## experts.parquet")
    assert tuple((row[0].strip("`"), row[1]) for row in rows) == manifest.COLUMNS


def test_canonical_json():
    value = {"b": [1, -2, True, None], "a": {'é\n"\\': "\x01\x7f€"}}
    assert canonical_json(value) == '{"a":{"é\\n\\"\\\\":"\\u0001\x7f€"},"b":[1,-2,true,null]}'.encode()
    with pytest.raises(TypeError):
        canonical_json({"a": 0.5})


def test_layer_digest_is_the_formula():
    head, records = b"h" * 100, [b"a" * 10, b"b" * 10]
    inner = digest(head) + b"".join(digest(r) for r in records)
    assert layer_digest(head, [digest(r) for r in records]) == digest(inner)


def test_the_two_sums_follow_the_text():
    values = np.arange(3 * 37, dtype=np.float64).reshape(3, 37) ** 3.5 * 1e-3 - 11
    total = 0.0
    for row in values.tolist():
        lanes = [0.0] * 16
        for c, x in enumerate(row):
            lanes[c % 16] += x * x
        for h in (8, 4, 2, 1):
            lanes = [lanes[n] + lanes[n + h] for n in range(h)]
        total += lanes[0]
    assert sum_of_squares(values) == total


# -- codecs/ -----------------------------------------------------------------------------------------------------------


def test_every_codec_has_a_page():
    assert [p.stem for p in codec_pages()] == sorted(codecs.registry())


@pytest.mark.parametrize("path", codec_pages(), ids=lambda p: p.stem)
def test_stored_tensors(path):
    text = path.read_text(encoding="utf-8")
    ((name, parameters), rows) = marked(text, "tensors")[0]
    codec = codecs.get(name, json.loads(parameters))
    assert codec.parameters == json.loads(parameters) and name == path.stem
    for r, c in ((1, 1), (128, 256), (160, 192), (37, 21)):
        value = {"R": r, "C": c, "1": 1, "ceil(R/128)": -(-r // 128), "ceil(C/128)": -(-c // 128)}
        stated = [
            (role, suffix.strip("`"), dtype, tuple(value[d.strip()] for d in shape.strip("[]").split(",")), where)
            for role, suffix, dtype, shape, where in rows
        ]
        found = [(t.role, t.suffix, t.dtype, t.shape, "record") for t in codec.tensors(r, c)]
        found += [(t.role, t.suffix, t.dtype, t.shape, "sidecar") for t in codec.sidecar(r)]
        assert stated == found


def floats(cell: str) -> np.ndarray:
    return np.array([[int(word, 16) for word in cell.split()]], np.uint32).view(np.float32)


@pytest.mark.parametrize("path", codec_pages(), ids=lambda p: p.stem)
def test_worked_examples(path):
    ((name, parameters), rows) = marked(path.read_text(encoding="utf-8"), "encode")[0]
    codec = codecs.get(name, json.loads(parameters))
    assert len(rows) >= 5
    for row in rows:
        weight = floats(row[0])
        out = codec.allocate(*weight.shape)
        if row[-1] == "refused":
            with pytest.raises(NonFiniteError):
                codec.encode(weight, "F32", out)
            continue
        codec.encode(weight, "F32", out)
        bits = out["scales"].view({2: "<u2", 4: "<u4"}[out["scales"].itemsize]).reshape(-1).tolist()
        assert bits == [int(row[1], 16)]
        codes = out["codes"].reshape(-1).tolist()
        assert codes == [int(w, 16 if name == "fp8" else 10) for w in row[2].split()]
        if "row_sums" in out:
            assert out["row_sums"].tolist() == [int(row[3])]
        assert np.array_equal(codec.decode(out, *weight.shape).view("<u4"), floats(row[-1]).view("<u4"))


def test_e4m3_table():
    for code, value in enumerate(VALUES.tolist()):
        e, m = code >> 3 & 15, code & 7
        wanted = m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10)
        if e == 15 and m == 7:
            assert np.isnan(value)
        else:
            assert abs(value) == wanted and np.signbit(value) == bool(code & 128)


@pytest.mark.parametrize("path", codec_pages(), ids=lambda p: p.stem)
def test_quantization_config(path):
    text = path.read_text(encoding="utf-8")
    stated = json.loads(re.search(r"```json\n(.*?)```", text, re.S)[1])
    facts = ConfigFacts(("...",), ((128, 256), (256, 128)))
    assert codecs.get(path.stem).quantization_config(facts) == stated
    if path.stem == "fp8":
        partial = codecs.get("fp8").quantization_config(ConfigFacts((), ((160, 192),)))
        assert partial["activation_scheme"] == PARTIAL_BLOCKS and f"`{PARTIAL_BLOCKS}`" in text


def test_views_hold_every_stored_type():
    for name in codecs.registry():
        assert all(t.dtype in VIEWS for t in codecs.get(name).tensors(128, 128))


# -- errors.md ---------------------------------------------------------------------------------------------------------


@cache
def sources() -> dict[Path, str]:
    return {p: p.read_text(encoding="utf-8") for folder in CODE for p in sorted((ROOT / folder).rglob("*.py"))}


def stated_errors() -> dict[str, list[str]]:
    rows = [row for found in tables(page("errors.md")) for row in found]
    assert len(rows) == len({row[0] for row in rows}), "a code stands twice"
    return {row[0]: row for row in rows}


def test_every_error_code_is_in_the_table_and_in_the_code():
    used = {code for text in sources().values() for code in re.findall(r"\b[EW]\d{4}\b", text)}
    assert used == set(stated_errors())


def test_error_tables_are_complete_and_in_order():
    rows = stated_errors()
    assert all(all(cell for cell in row) for row in rows.values())
    assert [c[1:] for c in rows] == sorted(c[1:] for c in rows)


def test_exit_codes_are_those_of_the_classes():
    exits = {"DataError": "1", "RequestError": "2", "LayoutError": "2", "MachineError": "3", "Interrupted": "130"}
    stated = stated_errors()
    seen = 0
    for path, text in sources().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in exits:
                for keyword in node.keywords:
                    if keyword.arg == "code" and isinstance(keyword.value, ast.Constant):
                        seen += 1
                        assert stated[keyword.value.value][1] == exits[node.func.id], (path, keyword.value.value)
    assert seen > 40
    assert all(row[1] == "0" for code, row in stated.items() if code.startswith("W"))


def test_codes_named_in_the_specification_exist():
    known = set(stated_errors())
    for path in SPECS.rglob("*.md"):
        assert set(re.findall(r"\b[EW]\d{4}\b", path.read_text(encoding="utf-8"))) <= known, path


def test_changelog_names_the_version():
    assert f'## "{layer_file.SPEC_VERSION}"' in page("CHANGELOG.md")
