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
from pagestone.convert.matrices import FEWEST_ROWS, MATRICES_FILE
from pagestone.convert.plan import DENSE_SHARD
from pagestone.formats import encodings, layer_file, layout, manifest, safetensors_header
from pagestone.formats.config import config_with, stated_config
from pagestone.formats.dense_matrices import BAND, ENCODED, DenseEncoding, DenseMatrix, matrices_metadata
from pagestone.formats.digests import canonical_json, digest, layer_digest
from pagestone.formats.dtypes import ITEM_BITS, VIEWS
from pagestone.formats.encodings import ConfigFacts
from pagestone.formats.encodings.fp8 import PARTIAL_BLOCKS, VALUES
from pagestone.formats.errors import NonFiniteError
from pagestone.formats.layer_file import LayerHeader
from pagestone.formats.layout import ExpertShape
from pagestone.formats.stats import sum_of_squares

ROOT = Path(__file__).resolve().parents[2]
SPECS = ROOT / "specs"
VECTORS = ROOT / "tests" / "vectors" / "accept"
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


@pytest.mark.parametrize("codec", sorted(encodings.registry()))
@pytest.mark.parametrize("bias", [None, "BF16"])
def test_metadata_keys(codec, bias):
    rows = table(page("container.md"), "### Metadata")
    here = LayerHeader(encodings.get(codec), "layers", 3, "p", ExpertShape(256, 128, bias), 2)
    conditional = {"pagestone.bias_dtype"} if bias is None else set()
    stated = {row[0].strip("`"): row[1] for row in rows}
    in_layer = {k for k, where in stated.items() if where in ("yes", "no")} - conditional
    in_sidecar = {k for k, where in stated.items() if where in ("yes", "only there")} - conditional
    assert set(here.metadata()) == in_layer
    assert set(here.sidecar_metadata()) == in_sidecar
    assert set(stated.values()) == {"yes", "no", "only there"}


def test_record_examples():
    found = marked(page("container.md"), "record")
    assert {words[0] for words, _ in found} >= {"int8", "fp8", "bf16", "q4"}
    assert any(len(words) == 5 for words, _ in found), "one with biases of experts"
    for words, rows in found:
        name, parameters, hidden, inter, *bias = words
        shape = ExpertShape(int(hidden), int(inter), bias[0] if bias else None)
        record = layout.record_layout(encodings.get(name, json.loads(parameters)), shape)
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
        before = page("container.md").split(f"<!-- record: {' '.join(words)} -->")[0].rstrip().split("\n\n")[-1]
        assert f"stride {record.stride}" in before
        vector = re.search(r"tests/vectors/accept/([a-z0-9-]+)", before)
        if vector:
            twin = json.loads((VECTORS / f"{vector[1]}.json").read_text(encoding="utf-8"))
            layer = twin["layers"][0]
            assert (twin["codec"], twin["parameters"]) == (name, json.loads(parameters))
            found = (layer["hidden"], layer["intermediate"], layer["bias_dtype"], layer["stride"])
            assert found == (shape.hidden, shape.intermediate, shape.bias_dtype, record.stride)


def test_order_of_a_record():
    rows = table(page("container.md"), "### The record")
    order = [re.sub(r"<part>\.|[<>`]", "", row[2]) for row in rows]

    class Full:
        def roles(self, rows: int, columns: int) -> tuple[layout.Role, ...]:
            return tuple(layout.Role(role, role, "U8", (1,)) for role in ("codes", "scales", "biases"))

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
    here = LayerHeader(encodings.get("int8"), "layers", 0, "p", ExpertShape(24, 40), 5)
    value = {"E": 5, "2I": 80, "H": 24}
    stated = [
        (name.strip("`"), dtype, tuple(value[d.strip()] for d in dims.strip("[]").split(",")))
        for name, dtype, dims, _ in rows
    ]
    assert stated == [(t.name, t.dtype, t.shape) for t in here.sidecar_tensors()]


def test_file_names():
    stated = set(names(table(page("container.md"), "## The directory")))
    assert {manifest.MANIFEST, manifest.EXPERTS_TABLE, manifest.RECORDS, CONFIG, INDEX} <= stated
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
    assert sorted(names(table(text, "## manifest.json"))) == sorted([*example, "dense"])  # which may be absent
    assert sorted(names(table(text, "### An entry of `layers`"))) == sorted(example["layers"][0])
    assert sorted(names(table(text, "### An entry of `files`"))) == sorted(example["files"]["x"])
    assert sorted(names(table(text, "### `request`"))) == sorted(example["request"])
    assert sorted(names(table(text, "### `source`"))) == sorted(example["source"])


def test_parquet_columns():
    text = page("manifest.md")
    rows = table(text, "## experts.parquet")
    assert tuple((row[0].strip("`"), row[1]) for row in rows) == manifest.COLUMNS
    roles = ("codes", "scales", "biases")
    of_roles = [name for name, _ in manifest.columns_for(roles)][len(manifest.COLUMNS) - 2 : -2]
    assert re.findall(r"`([a-z]+_(?:offset|bytes))`", text.partition("Before the two sums")[2]) == of_roles


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


# -- encoded dense matrices --------------------------------------------------------------------------------------------


def test_matrix_record_examples():
    found = marked(page("container.md"), "matrix")
    assert {words[0] for words, _ in found} >= {"int8", "q8", "q4"}
    for words, rows in found:
        name, parameters, height, width = words
        record = layout.matrix_record(encodings.get(name, json.loads(parameters)), int(height), int(width))
        cells = [(s.offset, s.nbytes, f"`{s.suffix}`", s.dtype, list(s.shape)) for s in record.slots]
        assert rows == [[str(cell) for cell in row] for row in cells]
        before = page("container.md").split(f"<!-- matrix: {' '.join(words)} -->")[0].rstrip().split("\n\n")[-1]
        assert f"{record.nbytes} bytes" in before


def test_what_is_said_of_encoded_dense_matrices():
    text = page("container.md").split("## Matrices files")[1].split("## Partial containers")[0]
    keys = names(table(text, "### The header"))
    assert keys == list(matrices_metadata(encodings.get("int8"), 1))
    words = section(page("manifest.md"), "### `dense`")
    (row,) = (r for r in tables(words)[0] if r[0] == "`codec`")
    assert re.findall(r"`(\w+)`", row[2]) == list(ENCODED)
    assert re.findall(r"`(\w+)`", text.split("with the")[0]) == list(ENCODED)
    fields = {r[0].strip("`") for r in tables(words)[1]}
    entry = DenseMatrix("lm_head", "matrices-00001-of-00001.safetensors", 130, 64, 0.25, 1.0)
    stated = DenseEncoding("int8", {}, (entry,)).table()
    assert {r[0].strip("`") for r in tables(words)[0]} == set(stated) and fields == set(stated["matrices"][0])
    assert f"0.25 is `{stated['matrices'][0]['squared_error']}`" in words
    assert (BAND, MATRICES_FILE, FEWEST_ROWS) == (128, 512 << 20, 128)
    assert "band* of 128 rows" in text and "up to 512 MiB" in text and "at least 128\nrows" in text


# -- codecs/ -----------------------------------------------------------------------------------------------------------


def test_every_codec_has_a_page():
    described = [words[0] for path in codec_pages() for words, _ in marked(path.read_text("utf-8"), "tensors")]
    assert sorted(described) == sorted(encodings.registry())
    for path in codec_pages():
        text = path.read_text(encoding="utf-8")
        mine = {words[0] for words, _ in marked(text, "tensors")}
        assert {words[0] for words, _ in marked(text, "encode")} == mine
        assert all(f"`{name}`" in text.splitlines()[0] for name in mine), "the title names what the page describes"


def on_pages(word: str) -> list[tuple[str, dict, list[str], list[list[str]]]]:
    """Codec, parameters, headings and rows of every table of the codecs' pages that `<!-- word: ... -->` marks."""
    found = []
    for path in codec_pages():
        text = path.read_text(encoding="utf-8")
        headings = re.findall(rf"<!-- {word}: .*? -->\n\|(.*)\|\n", text)
        for (words, rows), heading in zip(marked(text, word), headings, strict=True):
            found.append((words[0], json.loads(words[1]), [c.strip() for c in heading.split("|")], rows))
    return found


@pytest.mark.parametrize(("name", "parameters", "_", "rows"), on_pages("tensors"))
def test_stored_tensors(name, parameters, _, rows):
    codec = encodings.get(name, parameters)
    assert codec.parameters == parameters
    step = parameters.get("group_size", 1)  # what a row's length must be a multiple of
    for r, c in ((1, step), (128, 256), (160, 192), (37, 21 * step)):
        value = {"R": r, "C": c, "1": 1, "ceil(R/128)": -(-r // 128), "ceil(C/128)": -(-c // 128)}
        value |= {"C/64": c // 64, "C*3/32": c * 3 // 32, "C*4/32": c * 4 // 32, "C*8/32": c * 8 // 32}
        stated = [
            (role, suffix.strip("`"), dtype, tuple(value[d.strip()] for d in shape.strip("[]").split(",")), where)
            for role, suffix, dtype, shape, where in rows
        ]
        places = {layout.RECORD: "record", layout.BESIDE: "sidecar"}
        found = [(t.name, t.suffix, t.dtype, t.shape, places[t.place]) for t in codec.roles(r, c)]
        assert stated == found


def test_parameters():
    """Every parameter and value that a page states is taken, and the first is the default."""
    stated: dict[str, dict[str, list]] = {name: {} for name in encodings.registry()}
    for path in codec_pages():
        text = path.read_text(encoding="utf-8")
        rows = [r for t in tables(text.split("\n## ")[0]) for r in t]
        for name in {words[0] for words, _ in marked(text, "tensors")}:
            for parameter, values, _ in rows:
                words = [v.strip(" `") for v in values.split(",")]
                stated[name][parameter.strip("`")] = [int(w) if w.isdigit() else w for w in words]
    for name, parameters in stated.items():
        assert encodings.get(name).parameters == {p: values[0] for p, values in parameters.items()}
        for parameter, values in parameters.items():
            for value in values:
                assert encodings.get(name, {parameter: value}).parameters[parameter] == value
        for option in encodings.registry()[name].options:
            assert list(option.choices) == parameters[option.name]


def numbers(cell: str, base: int) -> list[int]:
    return [int(word, base) for word in cell.split()]


def bits(array: np.ndarray) -> list[int]:
    return array.reshape(-1).view(f"<u{array.itemsize}").tolist()


@pytest.mark.parametrize(("name", "parameters", "headings", "rows"), on_pages("encode"))
def test_worked_examples(name, parameters, headings, rows):
    """Weights of four digits are BF16 bits, of eight float32's; codes of int8 are decimal, all others hexadecimal."""
    codec = encodings.get(name, parameters)
    assert len(rows) >= 4 and headings[0] == "Weights"
    for row in rows:
        cells = dict(zip(headings, row, strict=True))
        dtype = "F32" if len(cells["Weights"].split()[0]) == 8 else "BF16"
        weight = np.array([numbers(cells["Weights"], 16)], "<u4" if dtype == "F32" else "<u2")
        weight = weight.view(np.float32) if dtype == "F32" else weight
        out = codec.allocate(*weight.shape)
        if cells.get("Decoded") == "refused":
            with pytest.raises(NonFiniteError):
                codec.encode(weight, dtype, out)
            continue
        codec.encode(weight, dtype, out)
        found = {"Codes": out["codes"].reshape(-1).tolist(), "Decoded": bits(codec.values(out, *weight.shape))}
        found |= {h: bits(out[r]) for h, r in (("Scale", "scales"), ("Bias", "biases")) if r in out}
        found |= {"Row sum": out["row_sums"].tolist()} if "row_sums" in out else {}
        assert set(headings) - {"Weights"} >= {"Codes", *(h for h in found if h in ("Scale", "Bias", "Row sum"))}
        for heading in headings[1:]:
            base = 10 if heading == "Row sum" or (heading, name) == ("Codes", "int8") else 16
            assert found[heading] == numbers(cells[heading], base), (heading, row)


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
    text = section(path.read_text(encoding="utf-8"), "## `quantization_config`")
    found = re.findall(r"```json\n(.*?)```", text, re.S)
    stated = json.loads(found[0]) if found else None
    facts = ConfigFacts(("...",), ((128, 256), (256, 128)))
    mine = sorted({words[0] for words, _ in marked(path.read_text(encoding="utf-8"), "tensors")})
    made = {name: encodings.get(name).quantization_config(facts) for name in mine}
    if path.stem == "affine":
        assert made["q4"] == stated
        assert made["q3"] == stated | {"bits": 3} and '`"bits": 3`' in text
        assert made["q8"] == stated | {"bits": 8} and '`"bits": 8`' in text
        assert encodings.get("q4", {"group_size": 32}).quantization_config(facts) == stated | {"group_size": 32}
        assert all(set(encodings.registry()[n].config_keys) == {"quantization_config", "quantization"} for n in mine)
    else:
        assert list(made.values()) == [stated]
        assert all(encodings.registry()[n].config_keys == ("quantization_config",) for n in mine)
    if path.stem == "fp8":
        partial = encodings.get("fp8").quantization_config(ConfigFacts((), ((160, 192),)))
        assert partial["activation_scheme"] == PARTIAL_BLOCKS and f"`{PARTIAL_BLOCKS}`" in text


@pytest.mark.parametrize("name", sorted(encodings.registry()))
def test_who_may_load_it(name):
    text = section(page("container.md"), "### Who may load it")
    stated = json.loads(re.search(r"```json\n(.*?)```", text, re.S)[1])
    codec, facts = encodings.get(name), ConfigFacts((), ((128, 128),))
    own = codec.quantization_config(facts)
    found = stated_config(codec, facts, loadable=False)
    assert found == stated | {k: v for k, v in (own or {}).items() if k != "quant_method"}
    assert stated_config(codec, facts, loadable=True) == own
    source = {"quantization": 1, "compression_config": 2, "text_config": {"quantization_config": 3}, "x": 4}
    config = config_with(source, found, codec.config_keys)
    wanted = dict.fromkeys(codec.config_keys, found)
    assert config == {"x": 4, "text_config": wanted} | wanted
    assert config_with(source, None, codec.config_keys) == {"x": 4, "text_config": {}}


def test_views_hold_every_stored_type():
    for name in encodings.registry():
        assert all(t.dtype in VIEWS for t in encodings.get(name).roles(128, 128))


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
    exits = {
        "DataError": "1",
        "LeaseError": "1",
        "RequestError": "2",
        "LayoutError": "2",
        "MachineError": "3",
        "Interrupted": "130",
    }
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
