"""`--dense`: which matrices are encoded, and that their bytes are the definition's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kits.checkpoints import Spec, Tensor, write_checkpoint
from kits.containers import Source, contents, read_table
from kits.conversions import planned, run, stop_after
from kits.inference import TINY, command
from kits.quantised import DENSE, Fp8Spec, Int8Spec

from pagestone.convert import matrices, report
from pagestone.formats import encodings
from pagestone.formats.dense_matrices import BAND, ENCODED, read_matrices
from pagestone.formats.digests import digest
from pagestone.formats.dtypes import VIEWS, bf16_to_f32
from pagestone.formats.errors import DataError, RequestError
from pagestone.formats.layout import CODES
from pagestone.formats.manifest import read_manifest
from pagestone.formats.text import natural
from pagestone.validate.verify import verify

STAYS = ("embed_tokens", "norm", "mlp.gate.", "shared_expert_gate", "in_proj_a", "in_proj_b", "conv1d", "A_log",
         "dt_bias", "mtp.", "visual.")  # fmt: skip


def stored(container: Path, name: str) -> dict[str, np.ndarray]:
    """The arrays of an encoded matrix by role, as they lie in its file."""
    dense = read_manifest(container / "manifest.json").dense
    file = next(m.file for m in dense.matrices if m.name == name)
    raw = (container / file).read_bytes()
    placed = next(p for p in read_matrices(container / file, dense, file) if p.matrix.name == name)
    assert not any(any(raw[placed.offset + s.offset :][: s.nbytes]) for s in placed.record.slots if s.part is None)
    return {
        s.role: np.frombuffer(raw[placed.offset + s.offset :][: s.nbytes], VIEWS[s.dtype]).reshape(s.shape)
        for s in placed.record.stored
    }


def assert_defined(container: Path, source: Path) -> int:
    """Every encoded matrix is what the definition makes of the source's, and so are its sums; how many there are."""
    dense = read_manifest(container / "manifest.json").dense
    tensors = Source(source)
    for m in dense.matrices:
        weight = tensors.weight(f"{m.name}.weight")
        assert weight.shape == (m.rows, m.columns)
        want = dense.encoding.allocate(m.rows, m.columns)
        dense.encoding.encode_definition(np.ascontiguousarray(weight), want)
        have = stored(container, m.name)
        assert have.keys() == want.keys()
        for role in want:
            assert np.array_equal(have[role], want[role]), (m.name, role)
        error = norm = 0.0
        for first in range(0, m.rows, BAND):
            band = np.ascontiguousarray(weight[first : first + BAND])
            stats = dense.encoding.encode_definition(band, dense.encoding.allocate(*band.shape))
            error, norm = error + stats.squared_error, norm + stats.squared_norm
        assert (m.squared_error, m.squared_norm) == (error, norm)
    return len(dense.matrices)


@pytest.mark.parametrize("dense", ["int8", "fp8", "q8", "q4"])
def test_tiny_moe(tmp_path, dense):
    """Every matrix that is encoded is the definition's; every other tensor is as with `keep`."""
    run(TINY, tmp_path / "keep", "int8")
    run(TINY, tmp_path / "out", "int8", dense=dense)
    assert assert_defined(tmp_path / "out", TINY) == 26
    manifest = read_manifest(tmp_path / "out" / "manifest.json")
    encoded = {m.name for m in manifest.dense.matrices}
    assert not [name for name in encoded for word in STAYS if word in f"{name}."]
    kept, _ = read_table(tmp_path / "keep" / "dense-00001-of-00001.safetensors")
    left, _ = read_table(tmp_path / "out" / "dense-00001-of-00001.safetensors")
    assert kept.keys() - left.keys() == {f"{name}.weight" for name in encoded}
    old, new = Source(tmp_path / "keep"), Source(tmp_path / "out")
    assert all(old.bytes(name) == new.bytes(name) for name in left if name != "__metadata__")
    same = [n for n in contents(tmp_path / "keep") if n.startswith(("layers-", "mtp-", "records", "experts"))]
    assert same and all(contents(tmp_path / "keep")[n] == contents(tmp_path / "out")[n] for n in same)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_bytes())["weight_map"]
    assert index["lm_head.weight"] == "matrices-00001-of-00001.safetensors"
    assert not [name for name in index if name.endswith((".pad", ".pad_a"))]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_change_no_byte(tmp_path, workers):
    """Nothing depends on how many workers there are."""
    run(TINY, tmp_path / "one", "q4", dense="int8", workers=1)
    run(TINY, tmp_path / "more", "q4", dense="int8", workers=workers)
    assert contents(tmp_path / "one") == contents(tmp_path / "more")


def test_keep_is_the_default():
    """Nothing is encoded unless it is asked for."""
    plan = planned(TINY)
    assert plan.matrices == () and plan.dense_codec is None and plan.files == planned(TINY, dense="keep").files


def test_unknown_words():
    """A word that is no encoding of dense matrices."""
    for word in ("q3", "bf16", "", "INT8"):
        with pytest.raises(RequestError) as caught:
            planned(TINY, dense=word)
        assert caught.value.code == "E0621" and caught.value.exit_code == 2


def test_codes_lie_on_pages(tmp_path):
    """Every record begins on a page, what follows the codes at a multiple of 64."""
    run(TINY, tmp_path / "out", "bf16", dense="fp8")
    dense = read_manifest(tmp_path / "out" / "manifest.json").dense
    for placed in read_matrices(tmp_path / "out" / dense.files[0], dense, dense.files[0]):
        assert placed.offset % 4096 == 0 and placed.record.slot(CODES).offset == 0
        assert placed.record.slot("scales").offset % 64 == 0


# -- small models ------------------------------------------------------------------------------------------------------


def small(root: Path, *, tie: Any = None, head: bool = False, root_name: str = "model", **more: Tensor) -> Path:
    """A qwen3_moe checkpoint of one layer with a vocabulary of 300 and matrices of many sizes."""
    rng = np.random.default_rng(3)

    def matrix(rows: int, columns: int, dtype: str = "BF16") -> Tensor:
        return Tensor.of(rng.standard_normal((rows, columns)).astype(np.float32), dtype)

    layer = f"{root_name}.layers.0"
    tensors = {
        f"{root_name}.embed_tokens.weight": matrix(300, 64),
        f"{layer}.self_attn.q_proj.weight": matrix(256, 64),
        f"{layer}.self_attn.k_proj.weight": matrix(127, 64),
        f"{layer}.self_attn.v_proj.weight": matrix(128, 64, "F32"),
        f"{layer}.self_attn.o_proj.weight": matrix(128, 96, "F16"),
        f"{layer}.self_attn.q_norm.weight": Tensor.of(rng.standard_normal(8192), "BF16"),
        f"{layer}.mlp.gate.weight": matrix(2, 64),
        f"{root_name}.norm.weight": Tensor.of(np.ones(64), "BF16"),
    }
    for expert in range(2):
        for part, shape in (("gate", (32, 64)), ("up", (32, 64)), ("down", (64, 32))):
            tensors[f"{layer}.mlp.experts.{expert}.{part}_proj.weight"] = matrix(*shape)
    if head:
        tensors["lm_head.weight"] = matrix(300, 64)
    tensors |= more
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": 2, "hidden_size": 64,
              "moe_intermediate_size": 32, "num_experts_per_tok": 1}  # fmt: skip
    config |= {} if tie is None else {"tie_word_embeddings": tie}
    return write_checkpoint(root, tensors, config)


def encoded(source: Path, dense: str) -> dict[str, tuple[int, int]]:
    return {m.name: (m.rows, m.columns) for t in planned(source, "bf16", dense=dense).matrices for m in t.matrices}


def test_the_guard_by_numbers(tmp_path):
    """At least 128 rows, a page of codes, and columns that the encoding can hold; the plan says why others stay."""
    source = small(tmp_path / "source", head=True)
    q, v, o = (f"model.layers.0.self_attn.{n}_proj" for n in "qvo")
    assert encoded(source, "int8") == {"lm_head": (300, 64), q: (256, 64), v: (128, 64), o: (128, 96)}
    assert encoded(source, "q8") == {"lm_head": (300, 64), q: (256, 64), v: (128, 64)}
    assert encoded(source, "q4") == encoded(source, "q8")  # 128 rows of 32 bytes are a page, exactly
    rules = {d.tensor.name: (d.fate, d.rule) for d in planned(source, "bf16", dense="q8").dispositions}
    layer = "model.layers.0.self_attn"
    assert rules[f"{layer}.k_proj.weight"] == ("copied", "qwen3_moe: dense; not encoded: fewer than 128 rows")
    assert (
        rules[f"{layer}.o_proj.weight"][0] == "copied"
        and "multiple of the group size" in rules[f"{layer}.o_proj.weight"][1]
    )
    assert rules[f"{layer}.q_proj.weight"] == ("converted", "qwen3_moe: dense matrix, encoded in q8")
    assert rules["model.embed_tokens.weight"] == ("copied", "qwen3_moe: dense")
    assert rules[f"{layer}.q_norm.weight"] == ("copied", "qwen3_moe: dense")


def test_less_than_a_page(tmp_path):
    """127 columns of 4 bits in 128 rows are less than a page."""
    narrow = Tensor.of(np.ones((255, 32)), "BF16")
    source = small(tmp_path / "source", **{"model.layers.0.self_attn.v_proj.weight": narrow})
    assert "model.layers.0.self_attn.v_proj" in encoded(source, "fp8")  # 255 x 32 bytes
    small_one = Tensor.of(np.ones((128, 31)), "BF16")
    source = small(tmp_path / "other", **{"model.layers.0.self_attn.v_proj.weight": small_one})
    assert "model.layers.0.self_attn.v_proj" not in encoded(source, "int8")  # 3968 bytes


def test_every_float_type_is_encoded_from_its_values(tmp_path):
    """BF16, F16 and F32 dense matrices."""
    source = small(tmp_path / "source", head=True)
    run(source, tmp_path / "out", "bf16", dense="int8")
    assert assert_defined(tmp_path / "out", source) == 4
    assert not verify(tmp_path / "out", source=source).findings


@pytest.mark.parametrize(
    ("tie", "head", "tied"),
    [
        (True, False, True),
        (False, False, False),
        (None, False, False),
        (True, True, False),
        (1, False, False),
        ([], False, False),
    ],
)
def test_tied_heads(tmp_path, tie, head, tied):
    """Only a head that the config ties and that has no tensor of its own is made from the table; the table stays."""
    source = small(tmp_path / "source", tie=tie, head=head)
    outcome = run(source, tmp_path / "out", "bf16", dense="q8")
    names = {m.name for m in outcome.manifest.dense.matrices}
    assert ("lm_head" in names) == (tied or head)
    left = Source(tmp_path / "out")
    assert left.bytes("model.embed_tokens.weight") == Source(source).bytes("model.embed_tokens.weight")
    rules = {d.tensor.name: d.rule for d in planned(source, "bf16", dense="q8").dispositions}
    assert rules["model.embed_tokens.weight"] == "qwen3_moe: dense" + ("; also encoded as lm_head" if tied else "")
    config = json.loads((tmp_path / "out" / "config.json").read_bytes())
    assert config.get("tie_word_embeddings") == tie
    if tied:
        table = Source(source).weight("model.embed_tokens.weight")
        want = encodings.get("q8").allocate(300, 64)
        encodings.get("q8").encode_definition(np.ascontiguousarray(table), want)
        have = stored(tmp_path / "out", "lm_head")
        assert all(np.array_equal(have[role], want[role]) for role in want)
    plan = planned(source, "bf16", dense="q8")
    assert plan.bytes_in == planned(source, "bf16").bytes_in + (300 * 64 * 2 if tied else 0)
    assert not verify(tmp_path / "out", source=source).findings


def test_a_tied_head_of_a_nested_model(tmp_path):
    """The table of a nested language model; two statements that contradict each other are none."""
    for number, (top, text, tied) in enumerate([(True, None, True), (None, True, True), (True, False, False)]):
        source = small(tmp_path / f"source{number}", tie=top, root_name="model.language_model")
        config = json.loads((source / "config.json").read_bytes())
        inner = {k: v for k, v in config.items() if k != "tie_word_embeddings"}
        inner |= {} if text is None else {"tie_word_embeddings": text}
        (source / "config.json").write_text(json.dumps(config | {"text_config": inner}))
        assert ("lm_head" in encoded(source, "int8")) == tied


def test_a_model_with_nothing_to_encode(tmp_path):
    """Then it is the container that `keep` makes, and the user is told."""
    source = Spec(hidden=32, intermediate=48, experts=2, layers=1, family="qwen3_moe", mtp=False).write(tmp_path / "s")
    outcome = run(source, tmp_path / "out", "int8", dense="int8")
    assert outcome.manifest.dense is None and [w for w in outcome.warnings if "--dense int8 encodes nothing" in w]
    assert outcome.manifest.container_id == run(source, tmp_path / "keep", "int8").manifest.container_id


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_no_code_stands_for(tmp_path, value):
    """It is refused with its row and column in the whole matrix; with `keep` it is copied."""
    weight = np.ones((256, 64))
    weight[200, 7] = value
    source = small(tmp_path / "source", **{"model.layers.0.self_attn.q_proj.weight": Tensor.of(weight, "BF16")})
    with pytest.raises(DataError) as caught:
        run(source, tmp_path / "out", "bf16", dense="int8")
    assert caught.value.code == "E0702" and "row 200, column 7" in str(caught.value)
    assert "q_proj" in str(caught.value) and "--dense keep" in str(caught.value)
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert [w for w in run(source, tmp_path / "keep", "bf16").warnings if "copied as it is" in w]


def test_a_matrix_of_zeros_is_told(tmp_path):
    """As of dense tensors that are copied."""
    zeros = Tensor.of(np.zeros((256, 64)), "BF16")
    source = small(tmp_path / "source", **{"model.layers.0.self_attn.q_proj.weight": zeros})
    warnings = run(source, tmp_path / "out", "bf16", dense="int8").warnings
    assert [w for w in warnings if "1 dense matrices are all zero" in w and "q_proj" in w]


# -- quantised sources -------------------------------------------------------------------------------------------------

Q, K, OUT, V = DENSE


@pytest.mark.parametrize("scale_dtype", ["BF16", "F32"])
@pytest.mark.parametrize("codec", ["fp8", "bf16"])
def test_codes_of_an_fp8_source_are_passed_through(tmp_path, codec, scale_dtype):
    """In blocks of 128 x 128 they stay as they are, whatever the experts are in."""
    spec = Fp8Spec(scale_dtype=scale_dtype)
    source = spec.write(tmp_path / "source")
    manifest = run(source, tmp_path / "out", codec, dense="fp8").manifest
    assert manifest.dense.parameters == {"block": 128, "scale_dtype": scale_dtype}
    assert {m.name for m in manifest.dense.matrices} == {Q, K, OUT, V}
    for m in manifest.dense.matrices:
        have, codes = stored(tmp_path / "out", m.name), spec.dense_codes(m.name)
        assert np.array_equal(have["codes"], codes.bits) and m.squared_error == 0
        scales = bf16_to_f32(have["scales"]) if scale_dtype == "BF16" else have["scales"]
        assert np.array_equal(scales, codes.grid)
        assert np.isclose(m.squared_norm, (codes.values.astype(np.float64) ** 2).sum(), rtol=1e-9)
    rules = {d.tensor.name: (d.fate, d.rule) for d in planned(source, codec, dense="fp8").dispositions}
    for suffix in ("weight", "weight_scale_inv"):
        assert rules[f"{Q}.{suffix}"] == ("converted", "qwen3_moe: dense matrix, passed through")
    report = verify(tmp_path / "out", source=source)
    assert not report.findings and report.counts["dense matrices"] == 4


@pytest.mark.parametrize("scales", ["block", "tensor", "channel [N]"])
@pytest.mark.parametrize("dense", ["int8", "q8", "fp8"])
def test_codes_of_an_fp8_source_are_encoded_again(tmp_path, scales, dense):
    """From the values they stand for, in float32; one scale a matrix is passed through in fp8."""
    spec = Fp8Spec(hidden=384, scales=scales, block=(64, 64), change=_without_o)
    source = spec.write(tmp_path / "source")
    run(source, tmp_path / "out", "bf16", dense=dense)
    encoding = read_manifest(tmp_path / "out" / "manifest.json").dense.encoding
    for module in (Q, K, V):
        codes = spec.dense_codes(module)
        have = stored(tmp_path / "out", module)
        if dense == "fp8" and scales == "tensor":
            assert np.array_equal(have["codes"], codes.bits)
            continue
        want = encoding.allocate(*codes.bits.shape)
        encoding.encode_definition(np.ascontiguousarray(codes.values), want)
        assert all(np.array_equal(have[role], want[role]) for role in want), module
    assert not verify(tmp_path / "out", source=source).findings


def test_scales_that_are_not_taken_decide_no_type(tmp_path):
    """Of blocks of another size nothing is passed through: the encoding's own scales stay BF16."""
    source = Fp8Spec(hidden=384, block=(64, 64), scale_dtype="F32").write(tmp_path / "source")
    dense = run(source, tmp_path / "out", "bf16", dense="fp8").manifest.dense
    assert dense.parameters == {"block": 128, "scale_dtype": "BF16"}


def _without_o(tensors):
    return {name: t for name, t in tensors.items() if not name.startswith(OUT)}


@pytest.mark.parametrize("dense", ["int8", "q8"])
def test_an_int8_source(tmp_path, dense):
    """Codes of compressed-tensors: passed through in int8, where no code is -128."""
    spec = Int8Spec(hidden=192, scale_dtype="F32")
    source = spec.write(tmp_path / "source")
    manifest = run(source, tmp_path / "out", "bf16", dense=dense).manifest
    for m in manifest.dense.matrices:
        codes = spec.dense_codes(m.name)
        have = stored(tmp_path / "out", m.name)
        if dense == "int8":
            assert np.array_equal(have["codes"], codes.bits) and np.array_equal(have["scales"], codes.grid)
            assert np.array_equal(have["row_sums"], codes.bits.sum(axis=1, dtype=np.int32))
    assert {Q, K, V} <= {m.name for m in manifest.dense.matrices}
    assert not verify(tmp_path / "out", source=source).findings


def test_a_forbidden_scale_in_the_source(tmp_path):
    """Codes and scales that no container may hold are refused as with `keep`."""

    def nan(tensors):
        kind, shape, raw = tensors[f"{Q}.weight"]
        changed = bytearray(raw)
        changed[300 * 320 + 5] = 0x7F
        return tensors | {f"{Q}.weight": (kind, shape, bytes(changed))}

    source = Fp8Spec(change=nan).write(tmp_path / "source")
    with pytest.raises(DataError) as caught:
        run(source, tmp_path / "out", "bf16", dense="fp8")
    assert caught.value.code == "E0702" and "row 300, column 5" in str(caught.value)


# -- conversions that do not go straight -----------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
def test_resumed(tmp_path, share):
    """What was finished before an interruption is kept, sums of matrices too."""
    run(TINY, tmp_path / "straight", "int8", dense="q8")
    stop_after(TINY, tmp_path / "out", share, "int8", dense="q8")
    run(TINY, tmp_path / "out", "int8", dense="q8")
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_another_encoding_is_another_job(tmp_path):
    """Unfinished work with another `--dense` is not continued, a finished container not taken for it."""
    stop_after(TINY, tmp_path / "out", 0.5, "int8", dense="q8")
    for dense in ("int8", "keep"):
        with pytest.raises(RequestError) as caught:
            run(TINY, tmp_path / "out", "int8", dense=dense)
        assert caught.value.code == "E0803" and "--dense" in str(caught.value)
    run(TINY, tmp_path / "out", "int8", dense="q8")
    with pytest.raises(RequestError) as caught:
        run(TINY, tmp_path / "out", "int8")
    assert caught.value.code == "E0808" and "--dense" in str(caught.value)
    assert run(TINY, tmp_path / "out", "int8", dense="q8").state == "already there"
    kept = run(TINY, tmp_path / "out", "int8", force=True)
    assert kept.manifest.dense is None and not list((tmp_path / "out").glob("matrices-*"))
    assert kept.manifest.container_id == run(TINY, tmp_path / "fresh", "int8").manifest.container_id


def test_a_journal_that_lost_sums(tmp_path):
    """A file of matrices without a pair of sums for each is made again."""
    stop_after(TINY, tmp_path / "out", 0.9, "int8", dense="q8")
    journal = tmp_path / "out" / ".pagestone-partial" / ".journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    changed = []
    for line in lines:
        table = json.loads(line)
        if table.get("name", "").startswith("matrices-"):
            table["matrices"] = table["matrices"][:-1]
            table.pop("digest")
            line = json.dumps(table | {"digest": digest(json.dumps(table, sort_keys=True).encode()).hex()}).encode()
            line += b"\n"
        changed.append(line)
    assert changed != lines
    journal.write_bytes(b"".join(changed))
    run(TINY, tmp_path / "out", "int8", dense="q8")
    assert not verify(tmp_path / "out", source=TINY).findings


def test_a_partial_container_has_all_dense_matrices(tmp_path):
    """--layers leaves out experts only."""
    whole, part = planned(TINY, dense="int8"), planned(TINY, dense="int8", layers=(1, 2))
    assert [t.matrices for t in whole.matrices] == [t.matrices for t in part.matrices]
    run(TINY, tmp_path / "out", "int8", dense="int8", layers=(1, 2))
    assert not verify(tmp_path / "out", source=TINY).findings


def test_a_container_with_encoded_matrices_is_no_source(tmp_path):
    """bf16 containers are sources; not where their dense matrices are codes."""
    run(TINY, tmp_path / "bf16", "bf16", dense="int8")
    with pytest.raises(RequestError) as caught:
        planned(tmp_path / "bf16", "q4")
    assert caught.value.code == "E0411" and "dense matrices in int8" in str(caught.value)


def test_files_of_limited_size(tmp_path, monkeypatch):
    """Files are filled in natural order of names; a matrix larger than one has its own."""
    monkeypatch.setattr(matrices, "MATRICES_FILE", 200_000)
    outcome = run(TINY, tmp_path / "out", "bf16", dense="int8", workers=4)
    dense = outcome.manifest.dense
    assert len(dense.files) > 5 and dense.files[0].endswith(f"of-{len(dense.files):05d}.safetensors")
    assert [m.name for m in dense.matrices] == sorted((m.name for m in dense.matrices), key=natural)
    assert dense.of_file(dense.files[0])[0].name == "lm_head" and len(dense.of_file(dense.files[0])) == 1
    for file in dense.files[1:]:
        assert (tmp_path / "out" / file).stat().st_size < 200_000 + 8192
    assert not verify(tmp_path / "out", source=TINY).findings


def test_header_limit(tmp_path):
    """No file has a header of more bytes than the limit."""
    plan = planned(TINY, "bf16", dense="int8", header_limit=24_576)
    assert len(plan.matrices) > 1
    assert all(len(t.head()) <= 24_576 + 8 for t in plan.matrices)


# -- what is told ------------------------------------------------------------------------------------------------------


def test_the_plan_says_what_encoding_would_save(tmp_path):
    """With `keep`: bytes by word; they are what the files are smaller by, but for headers."""
    kept = planned(TINY, "int8")
    table = report.plan_table(kept, tmp_path)["dense"]
    assert table["encoding"] is None and table["matrices"] == [] and set(table["would_save"]) == set(ENCODED)
    for word in ENCODED:
        plan = planned(TINY, "int8", dense=word)
        sizes = [sum(n for f, n in p.files.items() if f.startswith(("dense-", "matrices-"))) for p in (kept, plan)]
        heads = sum(len(t.head()) for p in (kept, plan) for t in p.dense) + sum(len(t.head()) for t in plan.matrices)
        assert abs(sizes[0] - sizes[1] - table["would_save"][word]) <= heads
    line = next(x for x in report.plan_text(kept, tmp_path).splitlines() if x.startswith("dense matrices"))
    assert line.startswith("dense matrices: kept; --dense would save: int8 ") and "q4 " in line and "MiB" in line


def test_the_plan_says_what_is_encoded(tmp_path):
    """How many, in what, from and to how many bytes; a tied head is named."""
    source = small(tmp_path / "source", tie=True)
    plan = planned(source, "int8", dense="int8")
    table = report.plan_table(plan, tmp_path)["dense"]
    assert table["encoding"] == {"codec": "int8", "parameters": {}} and table["would_save"] == {}
    head = table["matrices"][0]
    assert (head["name"], head["rows"], head["columns"], head["tied"]) == ("lm_head", 300, 64, True)
    assert head["bytes_in"] == 300 * 64 * 2 and head["bytes_out"] == 24576
    line = next(x for x in report.plan_text(plan, tmp_path).splitlines() if x.startswith("dense matrices"))
    assert line.startswith("dense matrices: 4 in int8, ") and line.endswith("; lm_head beside its table")
    small_one = Spec(hidden=32, intermediate=48, experts=2, layers=1, family="qwen3_moe", mtp=False)
    text = report.plan_text(planned(small_one.write(tmp_path / "s")), tmp_path)
    assert "dense matrices: kept; --dense would save: nothing, none is large enough" in text


def test_the_command_line(tmp_path, capsys):
    """`--dense` of every prepare command, and a word that is none."""
    assert command("prepare-q4", TINY, "-o", tmp_path / "out", "--dense", "int8", "--json") == 0
    assert read_manifest(tmp_path / "out" / "manifest.json").dense.codec == "int8"
    capsys.readouterr()
    assert command("prepare-q4", TINY, "-o", tmp_path / "out", "--dense", "int4") == 2
    assert "E0621" in capsys.readouterr().err


@pytest.mark.parametrize("dense", ["int8", "fp8"])
def test_progress_counts_what_is_read(tmp_path, dense):
    """To the byte: scales of codes once, a table that is also encoded twice."""
    sources = [Fp8Spec(scale_dtype="F32").write(tmp_path / "fp8"), small(tmp_path / "tied", tie=True)]
    for number, source in enumerate(sources):
        done: list[int] = []
        run(source, tmp_path / f"out{number}", "bf16", dense=dense, progress=done.append)
        assert sum(done) == planned(source, "bf16", dense=dense).bytes_in


def test_a_table_is_copied_whatever_else_becomes_of_it(tmp_path):
    """The rules of what is encoded are not those of a table from which a head is made."""
    plan = planned(small(tmp_path / "source", tie=True), "bf16")
    tensors = [t for shard in plan.dense for t in shard.tensors]
    division = matrices.divide(plan.checkpoint, plan.family, encodings.get("q8"), tensors)
    assert [m.name for m in division.matrices if m.tied] == ["lm_head"]
    assert "model.embed_tokens.weight" not in division.rules
    assert "model.embed_tokens.weight" in {t.name for t in division.rest}
