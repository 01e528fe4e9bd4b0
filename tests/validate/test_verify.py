"""verify: every finding provoked, named by file, expert and offset; nothing found where nothing is wrong."""

from __future__ import annotations

import gc
import hashlib
import json
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from kits.checkpoints import Spec
from kits.conversions import prepare
from kits.conversions import run as run_conversion
from kits.sectors import bad_disks
from kits.vectors import generator

from pagestone.formats import encodings
from pagestone.formats.errors import PagestoneError
from pagestone.formats.manifest import read_manifest
from pagestone.formats.storage import Place
from pagestone.reader.container import Layer, open_container
from pagestone.validate import checks
from pagestone.validate import verify as verifying
from pagestone.validate.checks import Check, Context, OpenLayer
from pagestone.validate.findings import Finding
from pagestone.validate.verify import verify

ROOT = Path(__file__).resolve().parents[2]
ACCEPT = ROOT / "tests" / "vectors" / "accept"


make = generator()
LAYER, SIDE, MTP = "layers-00.safetensors", "layers-00.rowsum.safetensors", "mtp-00.safetensors"
DENSE = "dense-00001-of-00001.safetensors"


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("verify") / "source"
    make.int8_odd(root)
    return root


@pytest.fixture
def container(tmp_path) -> Path:
    """int8 of `source`: one decoder layer and an MTP block of three experts, H = 37, I = 21."""
    return Path(shutil.copytree(ACCEPT / "int8-odd", tmp_path / "container"))


def errors(root: Path, **how) -> list[Finding]:
    report = verify(root, **how)
    found = [f for f in report.findings if f.severity == "error"]
    assert report.exit_code == (1 if found else 0)
    return found


def codes_of(findings: list[Finding]) -> set[str]:
    return {f.code for f in findings}


def open_layer(root: Path, name: str) -> Layer:
    """The layer in a file, opened while the container is still whole enough."""
    manifest = read_manifest(root / "manifest.json")
    entry = next(e for e in manifest.layers if e.file == name)
    return Layer(root, entry, manifest)


def slot_offset(root: Path, expert: int, part: str, role: str) -> int:
    layer = open_container(root).layers[0]
    slot = next(s for s in layer.layout.record.slots if (s.part or "", s.role) == (part, role))
    return layer.layout.record_offset(expert) + slot.offset


# -- nothing found where nothing is wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", sorted(encodings.registry()))
def test_no_false_alarm(tiny, tmp_path, codec):
    workers = 3 if codec == "int8" else 1
    prepare(tiny, tmp_path / "out", encodings.get(codec), workers=2)
    report = verify(tmp_path / "out", source=tiny, workers=workers)
    assert report.findings == []
    assert report.counts["experts"] == report.counts["experts compared with the source"] == 80


@pytest.mark.parametrize("codec", sorted(encodings.registry()))
def test_no_false_alarm_on_a_part(tiny, tmp_path, codec):
    prepare(tiny, tmp_path / "out", encodings.get(codec), workers=2, layers=(1, 3))
    report = verify(tmp_path / "out", source=tiny)
    assert report.findings == [] and report.counts["layers"] == 2


@pytest.mark.parametrize("name", [n for n in make.ACCEPT if n != "fp8-scales"])  # its records were made by hand
def test_no_false_alarm_on_vectors(tmp_path, name):
    """Quantised sources, biases, odd shapes: what the source encodes to is what is committed, bit for bit."""
    accepted = make.ACCEPT[name]
    accepted.source(tmp_path / "source")
    assert verify(ACCEPT / name, source=tmp_path / "source").findings == []


def test_progress_counts_every_byte_once(container):
    done: list[int] = []
    verify(container, progress=done.append)
    data = sum(p.stat().st_size for p in container.iterdir() if p.name != "manifest.json")
    heads = sum(open_container(container).layers[0].layout.data_start for _ in range(2))
    assert sum(done) == data - heads


# -- a byte flipped in each kind of region -----------------------------------------------------------------------------


@pytest.mark.parametrize(("part", "role"), [("gate", "codes"), ("up", "codes"), ("down", "codes")])
@pytest.mark.parametrize("expert", [0, 2])
def test_a_flipped_code(container, expert, part, role):
    at = slot_offset(container, expert, part, role)
    make.flip(LAYER, at + 3)(container)
    found = errors(container)
    assert codes_of(found) == {"E1001", "E1005"}
    record = next(f for f in found if f.code == "E1001" and f.offset is not None)
    start = open_container(container).layers[0].layout.record_offset(expert)
    assert (record.file, record.offset) == (LAYER, start) and f"expert {expert}:" in record.message
    sums = next(f for f in found if f.code == "E1005")
    assert sums.offset == at and f"expert {expert} {part}_proj" in sums.message and SIDE in sums.message


@pytest.mark.parametrize(
    ("part", "role", "codes"),
    [("gate", "scales", {"E1001"}), ("down", "scales", {"E1001"}), ("", "pad_a", {"E1001", "E1006"}),
     ("", "pad", {"E1001", "E1006"})],
)  # fmt: skip
def test_a_flipped_byte_elsewhere_in_a_record(container, part, role, codes):
    at = slot_offset(container, 1, part, role)
    make.flip(LAYER, at)(container)
    found = errors(container)
    assert codes_of(found) == codes
    start = open_container(container).layers[0].layout.record_offset(1)
    assert any(f.file == LAYER and f.offset == start and "expert 1" in f.message for f in found)
    if role.startswith("pad"):
        assert [f.offset for f in found if f.code == "E1006"] == [at]


@pytest.mark.parametrize("name", [n for n in make.ACCEPT if not n.startswith("int8")])
def test_a_flipped_byte_anywhere_in_a_record_of_any_codec(tmp_path, name):
    root = Path(shutil.copytree(ACCEPT / name, tmp_path / "container"))
    layer = open_container(root).layers[0]
    file, expert = layer.entry.file, len(layer) - 1
    start, before = layer.layout.record_offset(expert), (root / file).read_bytes()
    for slot in layer.layout.record.slots:
        make.flip(file, start + slot.offset + slot.nbytes // 2)(root)
        found = errors(root)
        record = next(f for f in found if f.code == "E1001" and f.offset is not None)
        assert (record.file, record.offset) == (file, start) and f"expert {expert}:" in record.message
        assert codes_of(found) - {"E1001", "E1005"} == ({"E1006"} if slot.part is None else set()), slot
        (root / file).write_bytes(before)
    assert errors(root) == []


@pytest.mark.parametrize("offset", [0, 9, 100, 700, 2000])
def test_a_flipped_byte_in_a_layer_header(container, offset):
    make.flip(LAYER, offset)(container)
    found = errors(container)
    assert found and {f.file for f in found} == {LAYER}
    assert all(f.code.startswith(("E02", "E1001")) for f in found)


@pytest.mark.parametrize(
    ("file", "offset", "codes"),
    [
        (SIDE, 4096, {"E1001", "E1005"}),
        (SIDE, 20, {"E0206", "E1001"}),
        (DENSE, -1, {"E1001"}),
        (DENSE, 40, {"E0204", "E1001"}),
        ("README.md", 0, {"E1001"}),
        ("tokenizer_config.json", 5, {"E1001"}),
        ("config.json", 6, {"E1001"}),
        ("config.json", 0, {"E1001", "E1012"}),
        ("model.safetensors.index.json", -3, {"E1001", "E1007"}),
        ("experts.parquet", 300, {"E1001", "E0311", "E0312", "E1015"}),
        ("manifest.json", 30, {"E0303"}),
    ],
)
def test_a_flipped_byte_in_another_file(container, file, offset, codes):
    make.flip(file, offset)(container)
    found = errors(container)
    assert found and codes_of(found) <= codes
    assert file in {f.file for f in found}


@pytest.mark.parametrize("name", sorted(p.name for p in (ACCEPT / "int8-odd").iterdir()))
def test_a_truncated_file(container, name):
    make.cut(name, -1)(container)
    found = errors(container)
    assert name in {f.file for f in found}
    assert name == "manifest.json" or "E0333" in codes_of(found)


@pytest.mark.parametrize("name", sorted(p.name for p in (ACCEPT / "int8-odd").iterdir()))
def test_a_missing_file(container, name):
    (container / name).unlink()
    if name == "manifest.json":
        with pytest.raises(PagestoneError, match="E0331") as caught:
            verify(container)
        assert caught.value.exit_code == 2
        return
    found = errors(container)
    assert any(f.file == name and f.code == "E0332" for f in found)


def test_an_extra_file_is_a_warning(container):
    (container / "layers-07.safetensors").write_bytes(b"x")
    report = verify(container)
    assert [(f.code, f.file, f.severity) for f in report.findings] == [("W1004", "layers-07.safetensors", "warning")]
    assert report.exit_code == 0


def test_two_faults_are_both_found(container):
    make.flip(LAYER, slot_offset(container, 0, "gate", "scales"))(container)
    make.flip(MTP, -4000)(container)
    make.flip("README.md", 0)(container)
    assert {f.file for f in errors(container)} == {LAYER, MTP, "README.md"}


def test_sha256_is_checked_where_stated(container):
    digests = {n: hashlib.sha256((container / n).read_bytes()).hexdigest() for n in (LAYER, "README.md")}

    def state(table: dict) -> None:
        for name, value in digests.items():
            table["files"][name]["sha256"] = value

    make.manifest(state)(container)
    assert errors(container) == []
    digests[LAYER] = "0" * 64
    make.manifest(state)(container)
    assert [(f.code, f.file) for f in errors(container)] == [("E1001", LAYER)]


# -- changes whose digests are all right -------------------------------------------------------------------------------

Change = Callable[[Path], None]


def add_file(root: Path) -> None:
    (root / "extra.txt").write_bytes(b"extra")
    make.edit_manifest(root, lambda t: t["files"].update({"extra.txt": {}}))


def drop_file(name: str) -> Change:
    def change(root: Path) -> None:
        (root / name).unlink()
        make.edit_manifest(root, lambda t: t["files"].pop(name))

    return change


def append(name: str, data: bytes) -> Change:
    def change(root: Path) -> None:
        with (root / name).open("ab") as file:
            file.write(data)

    return change


def another_page(name: str) -> Change:
    """A header with a page of spaces more: every rule holds, and it is not what the source gives."""

    def change(root: Path) -> None:
        raw = (root / name).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        longer = (length + 4096).to_bytes(8, "little") + raw[8 : 8 + length] + b" " * 4096 + raw[8 + length :]
        (root / name).write_bytes(longer)

    return change


def another_page_of_the_layer(root: Path) -> None:
    another_page(LAYER)(root)

    def edit(columns: dict) -> None:
        for name in ("record_offset", "codes_offset", "scales_offset"):
            columns[name] = [v + 4096 * (f == LAYER) for v, f in zip(columns[name], columns["file"], strict=True)]

    make.columns(edit)(root)


def code_plus_one(root: Path) -> None:
    """A code and its row sum changed together."""
    layer = open_container(root).layers[0]
    code = int(layer.expert(1).down.codes.array[0, 0])
    make.stored(LAYER, 1, "down", "codes", 0, code + 1)(root)
    side = root / SIDE
    at = 4096 + 4 * (3 * 42 + 37)
    raw = bytearray(side.read_bytes())
    raw[at : at + 4] = (int.from_bytes(raw[at : at + 4], "little", signed=True) + 1).to_bytes(4, "little", signed=True)
    side.write_bytes(raw)


def twice(root: Path) -> None:
    """A dense tensor under the name of an expert's."""
    names = open_container(root).layers[0].header.prefix
    make.header(DENSE, lambda t: t.update({f"{names}.0.gate_proj.weight": t.pop("mtp.norm.weight")}))(root)


def garbage(name: str) -> Change:
    def change(root: Path) -> None:
        (root / name).write_bytes(b"[" * 100_000)

    return change


def statistics(columns: dict) -> None:
    columns["squared_error"][4] *= 2


JUDGED: dict[str, tuple[Change, set[str]]] = {
    "index is garbage": (garbage("model.safetensors.index.json"), {"E1007"}),
    "config is garbage": (garbage("config.json"), {"E1012"}),
    "config is no object": (lambda root: (root / "config.json").write_bytes(b"[]"), {"E1012"}),
    "no index": (drop_file("model.safetensors.index.json"), {"E1002", "E1003"}),
    "no table of experts": (drop_file("experts.parquet"), {"E1003"}),
    "a name in two files": (twice, {"E1009", "E1010", "E1016"}),
}
"""Found without the source: change, codes found, exactly."""

COMPARED: dict[str, tuple[Change, set[str]]] = {
    "a code and its row sum": (code_plus_one, {"E1022", "E1023"}),
    "a scale": (make.stored(MTP, 2, "up", "scales", 20, 0.5), {"E1022"}),
    "a row sum": (make.flip(SIDE, 4096), {"E1005", "E1023"}),
    "a dense tensor": (make.flip(DENSE, -1), {"E1028"}),
    "a name of a dense tensor": (make.text(DENSE, "mtp.norm.weight", "mtp.nrom.weight"), {"E1008", "E1009", "E1027"}),
    "a side file": (make.flip("README.md", 2), {"E1028"}),
    "a longer side file": (append("README.md", b"more"), {"E1027"}),
    "a shorter side file": (make.cut("README.md", -4), {"E1027"}),
    "a file too many": (add_file, {"E1026"}),
    "a file too few": (drop_file("README.md"), {"E1025"}),
    "the config": (make.text("config.json", '"num_experts": 3', '"num_experts": 4'), {"E1027"}),
    "the index's spelling": (append("model.safetensors.index.json", b"\n"), {"E1027"}),
    "the layer's header": (another_page_of_the_layer, {"E1027"}),
    "the sidecar's header": (another_page(SIDE), {"E1027"}),
    "statistics": (make.columns(statistics), {"E1024"}),
    "the family": (lambda root: make.edit_manifest(root, lambda t: t["source"].update(family="other")), {"E1029"}),
    "lossless": (lambda root: make.edit_manifest(root, lambda t: t.update(lossless=True)), {"E1029"}),
    "the fingerprint": (
        lambda root: make.edit_manifest(root, lambda t: t["source"].update(fingerprint="0" * 32)),
        {"W1030"},
    ),
}
"""Found by comparing with the source: change, codes found, exactly."""

ELSEWHERE = {"W1004", "E1002", "E1021", "E1031"}
"""Provoked by single tests of this file."""
VECTORS = {
    code
    for path in (ACCEPT.parent / "reject").glob("*.json")
    for code in json.loads(path.read_text(encoding="utf-8"))["refused_by"]["verify"]
}
"""Provoked by the vectors (tests/specs/test_vectors.py)."""


def sealed(root: Path, change: Change) -> Path:
    """Apply a change and make every digest right again."""
    change(root)
    if (root / "experts.parquet").is_file():
        make.seal(root)
    else:
        make.sign(root, json.loads((root / "manifest.json").read_bytes()))
    return root


@pytest.mark.parametrize("what", JUDGED)
def test_what_is_wrong_in_itself(container, what):
    change, codes = JUDGED[what]
    assert codes_of(errors(sealed(container, change))) == codes


@pytest.mark.parametrize("what", COMPARED)
def test_what_only_the_source_can_tell(container, source, what):
    change, codes = COMPARED[what]
    sealed(container, change)
    report = verify(container, source=source)
    assert {f.code for f in report.findings} == codes, [f.text() for f in report.findings]
    assert report.exit_code == int(codes != {"W1030"})
    if not codes & {"E1005", "E1008"}:
        assert errors(container) == [], "without the source nothing is wrong"


def test_the_damaged_expert_is_named(container):
    """By its digest in records.xxh3; experts.parquet, which people read, need not be whole."""
    (container / "experts.parquet").write_bytes(b"PAR1")
    layer, raw = open_layer(container, MTP), bytearray((container / MTP).read_bytes())
    raw[layer.layout.record_offset(1) + 5] ^= 1
    (container / MTP).write_bytes(raw)
    found = [f for f in errors(container) if f.code == "E1001" and f.file == MTP]
    assert ["expert 1: xxh3 of its record" in f.message for f in found] == [True, False]
    assert found[0].offset == layer.layout.record_offset(1)


@pytest.mark.parametrize("cut", [False, True])
def test_digests_that_are_damaged_blame_no_expert(container, cut):
    """The layers are whole, and the manifest vouches for them: what is wrong is records.xxh3."""
    raw = bytearray((container / "records.xxh3").read_bytes())
    raw[3] ^= 1
    (container / "records.xxh3").write_bytes(raw[:-1] if cut else raw)
    found = errors(container)
    assert {f.file for f in found} == {"records.xxh3"}
    assert [f.code for f in found] == (["E0333", "E1001"] if cut else ["E1001", "E1040"])


def test_a_changed_code_is_named_to_the_byte(container, source):
    at = slot_offset(container, 1, "down", "codes")
    sealed(container, code_plus_one)
    found = next(f for f in errors(container, source=source) if f.code == "E1022")
    assert (found.file, found.offset) == (LAYER, at) and "expert 1 down_proj.weight" in found.message


def test_every_finding_is_provoked():
    table = (ROOT / "specs" / "errors.md").read_text(encoding="utf-8")
    stated = set(re.findall(r"^\| ([EW]10\d\d) ", table, re.M))
    provoked = ELSEWHERE.union(VECTORS, *(codes for _, codes in [*JUDGED.values(), *COMPARED.values()]))
    assert stated == {c for c in provoked if c[1:3] == "10"}


def test_an_unreadable_layer(container):
    (container / LAYER).unlink()
    found = errors(container)
    assert {"E0332", "E1002"} == codes_of(found) and {f.file for f in found} == {LAYER}


# -- what cannot be read -----------------------------------------------------------------------------------------------

BAD = """
import json, sys
from pathlib import Path
from pagestone.formats.errors import PagestoneError
from pagestone.validate.verify import verify
root, source, found = Path(sys.argv[1]), Path(sys.argv[2]), []
for file, byte in json.loads(sys.argv[3]):
    bad_sector(file, byte)
    try:
        report = verify(root, source=source)
        found.append([report.exit_code, [[f.code, f.file, f.message, f.offset] for f in report.findings]])
    except PagestoneError as error:
        found.append([error.exit_code, str(error)])
bad_sector("", 0)
print(json.dumps(found))
"""


@pytest.fixture(scope="session")
def bad_sectors(source, tmp_path_factory) -> dict[tuple[str, int], tuple[int, list[list]]]:
    """Exit code and findings for a bad sector in every file, at its beginning, middle and end (-1: no permission).

    Layer, dense tensors and README of the container are damaged too, so that something else is to be found each time.
    """
    root = tmp_path_factory.mktemp("bad")
    container = Path(shutil.copytree(ACCEPT / "int8-odd", root / "container"))
    make.flip("README.md", 0)(container)
    make.flip(MTP, slot_offset(container, 1, "up", "scales"))(container)
    make.flip(DENSE, -1)(container)
    make.edit_manifest(container, lambda t: [e.update(sha256=hashlib.sha256((container / n).read_bytes()).hexdigest())
                                             for n, e in t["files"].items()])  # fmt: skip
    make.sign(container, json.loads((container / "manifest.json").read_bytes()))
    size = {p: p.stat().st_size for folder in (container, source) for p in sorted(folder.iterdir())}
    cases = [(str(p), at) for p, n in size.items() if p.parent == container for at in (-1, 0, n // 2, n - 1)]
    cases += [(str(source / "model.safetensors"), at) for at in (0, size[source / "model.safetensors"] - 1)]
    cases += [(str(source / "config.json"), 1), (str(container / DENSE), 4096)]
    out = bad_disks(BAD, container, source, json.dumps(cases), root=root)
    return {(Path(f).name, at): (code, found) for (f, at), (code, found) in zip(cases, json.loads(out), strict=True)}


def test_what_cannot_be_read_is_named_and_the_rest_is_checked(bad_sectors):
    """Each finding names the file; what else is wrong is found all the same, and decides the exit code."""
    assert len(bad_sectors) > 40
    for (name, at), (exit_code, found) in bad_sectors.items():
        if isinstance(found, str):
            continue
        assert len({tuple(f) for f in found}) == len(found), "nothing is said twice"
        unread = [f for f in found if f[0] == "E1031"]
        word = "Permission denied" if at < 0 else "Input/output error"
        assert unread and all(f[1] == name and word in f[2] for f in unread), (name, at, found)
        others = {(f[0], f[1]) for f in found} - {("E1031", name)}
        if name == "manifest.json":
            assert exit_code == 3 and not others
            continue
        assert exit_code == 1
        readme = {("E1001", "README.md"), ("E1028", "README.md")} if name != "README.md" else set()
        layer = {("E1001", MTP), ("E1022", MTP)}
        dense = {("E1001", DENSE), ("E1028", DENSE)}
        for file, faults in (("README.md", readme), (MTP, layer), (DENSE, dense)):
            assert faults <= others or name in (file, "model.safetensors"), (name, at, others)
        assert others <= readme | layer | dense | {("E1005", MTP)}, (name, at, others)


def test_an_expert_that_cannot_be_read_is_one_of_many(bad_sectors):
    """The record is named; every other one is checked."""
    at = max(at for name, at in bad_sectors if name == MTP)
    found = bad_sectors[MTP, at][1]
    (record,) = [f for f in found if f[0] == "E1031" and f[2].startswith("expert 2: reading failed")]
    assert record[3] <= at
    assert any(f[0] == "E1001" and f[1] == MTP and "expert 1:" in f[2] for f in found)


def test_a_dense_tensor_that_cannot_be_read_is_one_of_many(bad_sectors):
    """The first one is not read; the last one, which is damaged, is compared all the same."""
    assert {("E1031", DENSE), ("E1028", DENSE)} <= {(f[0], f[1]) for f in bad_sectors[DENSE, 4096][1]}


@pytest.mark.parametrize("case", [("model.safetensors", 0), ("config.json", 1)])
def test_a_source_that_cannot_be_opened(bad_sectors, case):
    """Nothing was looked at yet, so nothing is lost: an error of the machine that names the source's file."""
    exit_code, text = bad_sectors[case]
    assert exit_code == 3 and f"source/{case[0]}: Input/output error" in text and "what to do" in text


def test_row_sums_that_cannot_be_read_hide_no_layer(bad_sectors):
    for at in (at for n, at in bad_sectors if n == SIDE.replace("layers", "mtp")):
        assert ("E1022", MTP) in {(f[0], f[1]) for f in bad_sectors[SIDE.replace("layers", "mtp"), at][1]}


def test_nothing_but_the_machine_failed(container):
    """Exit 3: nobody should convert again for a permission."""
    path = container / "tokenizer_config.json"
    path.unlink()
    path.symlink_to("/proc/self/mem")  # of length 0, and reads fail with EIO
    make.edit_manifest(container, lambda t: t["files"]["tokenizer_config.json"].update(bytes=0))
    make.sign(container, json.loads((container / "manifest.json").read_bytes()))
    report = verify(container)
    assert [(f.code, f.file) for f in report.findings] == [("E1031", "tokenizer_config.json")]
    assert report.exit_code == 3 and not report.table()["ok"]


# -- the source --------------------------------------------------------------------------------------------------------


def other_source(root: Path, seed: int = 1000, inter: int = 21, prefix: str = "model.language_model") -> Path:
    text = {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 1, "num_experts": 3, "mtp_num_hidden_layers": 1}
    tensors = {f"{prefix}.embed_tokens.weight": make.numbers(1, 4, 37), "mtp.norm.weight": make.numbers(2, 37)}
    for n, layer in enumerate((f"{prefix}.layers.0", "mtp.layers.0")):
        tensors[f"{layer}.mlp.gate.weight"] = make.numbers(3 + n, 3, 37)
        tensors[f"{layer}.mlp.experts.gate_up_proj"] = make.numbers(seed + n, 3, 2 * inter, 37)
        tensors[f"{layer}.mlp.experts.down_proj"] = make.numbers(seed + n + 5, 3, 37, inter)
    make.write_source(root, {"model_type": "qwen3_5_moe", "text_config": text}, tensors, "BF16")
    return root


def test_another_checkpoint_of_the_same_shape(container, tmp_path):
    found = errors(container, source=other_source(tmp_path / "other"))
    assert "E1022" in codes_of(found) and len([f for f in found if f.code == "E1022"]) == 6


@pytest.mark.parametrize("sample", [None, 1, 2, 3])
def test_another_checkpoint_of_another_shape(container, tmp_path, sample):
    found = errors(container, source=other_source(tmp_path / "other", inter=20), sample=sample)
    assert {f.file for f in found if f.code == "E1021"} == {LAYER, MTP}


@pytest.mark.parametrize("sample", [None, 1])
def test_another_checkpoint_with_other_names(container, tmp_path, sample):
    found = errors(container, source=other_source(tmp_path / "other", prefix="model"), sample=sample)
    assert LAYER in {f.file for f in found if f.code == "E1021"}


def test_no_checkpoint(container, tmp_path):
    with pytest.raises(PagestoneError, match="E0401") as caught:
        verify(container, source=tmp_path / "nowhere")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("sample", [1, 2, 5, 6, 100])
def test_a_sample_compares_so_many(container, source, sample):
    report = verify(container, source=source, sample=sample)
    assert report.findings == [] and report.counts["experts compared with the source"] == min(sample, 6)


def test_a_sample_is_the_same_every_time_and_finds_what_it_covers(container, source):
    sealed(container, code_plus_one)
    found = [bool(errors(container, source=source, sample=n)) for n in range(1, 7)]
    assert found == [bool(errors(container, source=source, sample=n)) for n in range(1, 7)]
    assert found[-1], "a sample of all is a comparison with all"


def test_the_same_weights_in_other_shards_are_no_error(container, source, tmp_path):
    """The fingerprint differs, the bytes do not."""
    other = Path(shutil.copytree(source, tmp_path / "again"))
    raw = (other / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    padded = (length + 8).to_bytes(8, "little") + raw[8 : 8 + length] + b" " * 8 + raw[8 + length :]
    (other / "model.safetensors").write_bytes(padded)
    report = verify(container, source=other)
    assert [f.code for f in report.findings] == ["W1030"] and report.exit_code == 0


# -- checks as data ----------------------------------------------------------------------------------------------------


def test_a_check_is_shown_every_record_once(container, source, monkeypatch):
    """A check that asks for layers and records gets each once, and no record is read again for it."""
    seen, reads = [], []
    real = checks.fill

    def fill(file: Place, offset: int, target: memoryview) -> None:
        reads.append((str(file), offset))
        real(file, offset, target)

    def layer(context: Context, shown: OpenLayer) -> Iterator[Finding]:
        seen.append((shown.entry.file, None, len(context.layers)))
        yield Finding("warning", "W0", shown.entry.file, "seen")

    def record(context: Context, shown: OpenLayer, expert: int, record: np.ndarray) -> Iterator[Finding]:
        seen.append((shown.entry.file, expert, record.nbytes))
        yield Finding("warning", "W1", shown.entry.file, f"expert {expert}")

    def last(context: Context) -> Iterator[Finding]:
        yield Finding("warning", "W2", "", "last")

    own = Check(last, layer, record)
    monkeypatch.setattr(verifying, "CHECKS", (*verifying.CHECKS, own))
    monkeypatch.setattr(checks, "fill", fill)
    report = verify(container, source=source)
    stride = open_container(container).layers[0].stride
    assert sorted(seen, key=str) == sorted(
        [(f, None, 2) for f in (LAYER, MTP)] + [(f, e, stride) for f in (LAYER, MTP) for e in range(3)], key=str
    )
    assert [f.code for f in report.findings] == ["W0", "W1", "W1", "W1"] * 2 + ["W2"]
    starts = [at for file, at in reads if file.endswith((LAYER, MTP)) and at > 0]
    assert len(starts) == 6
    assert list(report.counts) == ["files", "layers", "experts", "experts compared with the source"]
    assert report.counts["experts compared with the source"] == 6


def test_one_sidecar_is_held_at_a_time(tmp_path, monkeypatch):
    """A layer's sidecar is read when the layer's turn comes and let go before the next one's, with a source too."""
    source = Spec(8, 6, 3, layers=3, mtp=False).write(tmp_path / "s")
    run_conversion(source, tmp_path / "o")
    held, alive, real = [], [], checks.sidecar_arrays

    def read(root: Path, layer: OpenLayer) -> dict:
        gc.collect()
        alive.append(sum(ref() is not None for ref in held))
        arrays = real(root, layer)
        held.extend(weakref.ref(array) for array in arrays.values())
        return arrays

    monkeypatch.setattr(checks, "sidecar_arrays", read)
    assert not errors(tmp_path / "o", source=source)
    assert len(held) == 6 and alive == [0, 0, 0]


@pytest.mark.parametrize("row", [0, 3, 6])
def test_zeros_are_looked_for_in_every_row(monkeypatch, row):
    """A few rows at a time: one that is not zero is seen wherever it lies, and its scale is its own."""
    monkeypatch.setattr(checks, "WINDOW", 3 * 5)
    codec = encodings.get("int8")
    stored = codec.allocate(7, 5)
    for array in stored.values():
        array[...] = 0
    assert checks._is_zero(codec, stored, 7, 5)
    weight = np.zeros((7, 5), np.float32)
    weight[row] = 1
    codec.encode(weight, "F32", stored)
    assert not checks._is_zero(codec, stored, 7, 5)


def test_the_comparison_is_one_check(container, source):
    """None of the list knows of a source: without one nothing is compared, and nothing counted as compared."""
    assert "experts compared with the source" not in verify(container).counts
    assert verify(container, source=source, sample=2).counts["experts compared with the source"] == 2


# -- the command -------------------------------------------------------------------------------------------------------


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagestone", "verify", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_says_ok(container, source):
    done = run(str(container), "--source", str(source))
    assert done.returncode == 0 and done.stderr == ""
    assert ": ok: " in done.stdout and "6 experts compared with the source" in done.stdout


def test_the_command_names_file_expert_and_offset(container):
    make.flip(LAYER, slot_offset(container, 2, "up", "scales"))(container)
    done = run(str(container))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    start = open_container(container).layers[0].layout.record_offset(2)
    assert f"error: {LAYER} at byte {start}: expert 2: " in done.stdout and "(E1001)" in done.stdout


def test_the_command_prints_json(container):
    make.flip(LAYER, slot_offset(container, 2, "up", "scales"))(container)
    done = run(str(container), "--json")
    table = json.loads(done.stdout)
    assert done.returncode == 1 and table["ok"] is False and table["errors"] == len(table["findings"]) == 2
    assert set(table["findings"][0]) == {"severity", "code", "file", "message", "offset"}
    assert table["checked"]["experts"] == 6


def test_a_sample_needs_a_source(container):
    done = run(str(container), "--sample", "3")
    assert done.returncode == 2 and "E0003" in done.stderr and "--source" in done.stderr


def test_no_container(tmp_path):
    done = run(str(tmp_path))
    assert done.returncode == 2 and "E0331" in done.stderr and "Traceback" not in done.stderr


def test_one_file_may_have_many_faults(container):
    raw = bytearray((container / LAYER).read_bytes())
    start = open_container(container).layers[0].layout.data_start
    raw[start:] = bytes(np.frombuffer(raw[start:], np.uint8) ^ 0x55)
    (container / LAYER).write_bytes(raw)
    found = errors(container)
    assert len(found) > 10 and {f.file for f in found} == {LAYER}
