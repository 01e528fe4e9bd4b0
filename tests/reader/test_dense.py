"""Dense tensors, encoded matrices and tables by rows: read or mapped, checked, and what they cost, without torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kits.inference import Workshop, flip
from kits.maps import mapping_of

from pagestone.formats.errors import DataError
from pagestone.reader import dense as dense_module
from pagestone.reader.container import Container, open_container
from pagestone.reader.dense import DenseTensors, encoded_matrices, load_dense
from pagestone.reader.dense_costs import DenseUse, dense_costs, likely_use
from pagestone.reader.rows import memory_of

TABLE = "model.language_model.embed_tokens.weight"


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("dense"))


def loaded(container: Container, mode: str = "direct", **how: bool) -> DenseTensors:
    use = likely_use(container)
    return load_dense(container, use.names, mode, matrices=use.matrices, tables=use.tables, **how)


@pytest.mark.parametrize("dense", ["int8", "fp8", "q4"])
def test_matrices_are_what_lies_in_the_files(workshop: Workshop, dense: str) -> None:
    """Read and mapped, by role; the memory of a record begins on a page, and nobody may write to it."""
    container = open_container(workshop.container("int8", dense=dense))
    read, mapped = loaded(container), loaded(container, "mmap")
    placed = encoded_matrices(container)
    assert list(read.matrices) == list(mapped.matrices) == list(placed) and "lm_head" in placed
    for name, place in placed.items():
        raw = (container.path / place.matrix.file).read_bytes()
        one, two = read.matrices[name], mapped.matrices[name]
        assert (one.rows, one.columns) == (place.matrix.rows, place.matrix.columns)
        assert [*one.stored] == [r.name for r in one.codec.roles(one.rows, one.columns)] == [*two.stored]
        assert one.codec == container.manifest.dense.encoding  # type: ignore[union-attr]
        assert one.codes.array.ctypes.data % 4096 == 0 == two.codes.array.ctypes.data % 4096
        for slot in place.record.stored:
            want = raw[place.offset + slot.offset :][: slot.nbytes]
            assert one.stored[slot.role].array.tobytes() == want == two.stored[slot.role].array.tobytes()
            assert not one.stored[slot.role].array.flags.writeable


def test_only_what_is_wanted_is_kept(workshop: Workshop) -> None:
    """Of a file of many matrices; the file is read whole all the same, for its digest."""
    container = open_container(workshop.container("int8", dense="int8"))
    names = [*encoded_matrices(container)]
    few = load_dense(container, [], "direct", matrices=names[3:5])
    assert [*few.matrices] == names[3:5] and not few.arrays
    file = encoded_matrices(container)[names[3]].matrix.file
    assert few.bytes_read == (container.path / file).stat().st_size
    assert np.array_equal(few.matrices[names[3]].codes.array, loaded(container).matrices[names[3]].codes.array)


@pytest.mark.parametrize("what", ["header", "pad", "codes", "last"])
def test_a_flipped_bit_in_a_file_of_matrices(workshop: Workshop, tmp_path: Path, what: str) -> None:
    """E1205 wherever it is; without digests only the header is checked."""
    container = open_container(workshop.copy("int8", tmp_path / "c", dense="int8"))
    place = [*encoded_matrices(container).values()][-1]
    path = container.path / place.matrix.file
    at = {"header": 9, "pad": place.offset + place.record.nbytes - 1, "codes": place.offset + 5,
          "last": place.offset + place.record.stored[-1].offset}[what]  # fmt: skip
    flip(path, at)
    with pytest.raises(DataError) as error:
        loaded(container)
    assert path.name in str(error.value) and (what == "header" or "E1205" in str(error.value))
    if what != "header":
        loaded(container, verify=False)
    short = place.offset + 4096
    with path.open("r+b") as handle:
        handle.truncate(short)
    with pytest.raises(DataError):
        loaded(container, verify=False)


def test_a_file_that_becomes_shorter_meanwhile(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E1205 also where digests are not compared: what was not read is not taken for zeros."""
    container = open_container(workshop.copy("int8", tmp_path / "c", dense="int8"))
    placed = encoded_matrices(container)
    last = [*placed.values()][-1]
    with (container.path / last.matrix.file).open("r+b") as handle:
        handle.truncate(last.offset + 4096)
    monkeypatch.setattr(dense_module, "encoded_matrices", lambda _: placed)
    with pytest.raises(DataError, match=rf"the file ended at byte {last.offset + 4096}.*E1205"):
        load_dense(container, [], "direct", verify=False, matrices=[last.matrix.name])


def test_records_are_in_private_memory_of_huge_pages(workshop: Workshop) -> None:
    """Anonymous memory that is marked for huge pages, where the kernel says how memory is marked."""
    container = open_container(workshop.container("int8", dense="int8"))
    matrix = loaded(container).matrices["lm_head"]
    found = mapping_of(matrix.codes.array)
    assert found.private and found.file == "0" and "hg" in found.flags


def test_tables_are_not_loaded(workshop: Workshop, tmp_path: Path) -> None:
    """Rows are those of the table loaded whole; a bit that flips later is noticed; files are compared all the same."""
    container = open_container(workshop.copy("int8", tmp_path / "c"))
    dense = loaded(container)
    assert [*dense.tables] == [TABLE] and TABLE not in dense.arrays and TABLE in dense.entries
    whole = load_dense(container, [TABLE], "direct").arrays[TABLE].reshape(1024, -1)
    ids = np.array([5, 3, 1023, 5, 0])
    assert np.array_equal(dense.tables[TABLE].read(ids), whole[ids])
    mapped = loaded(container, "mmap")
    assert not mapped.tables and np.array_equal(mapped.arrays[TABLE].reshape(1024, -1), whole)
    entry = dense.entries[TABLE]
    file = next(f for f in container.manifest.files if f.startswith("dense-00001"))
    flip(container.path / file, entry.offset + 700 * entry.nbytes // 1024 + 3)
    with pytest.raises(DataError, match=r"row 700: .*E1258"):
        dense.tables[TABLE].read(np.array([699, 700]))
    with pytest.raises(DataError, match="E1205"):
        loaded(container)
    unchecked = loaded(container, verify=False)
    assert not np.array_equal(unchecked.tables[TABLE].read(np.array([700])), whole[[700]])


# -- costs ------------------------------------------------------------------------------------------------------------


def held(dense: DenseTensors) -> tuple[int, int]:
    """(bytes of plain tensors, of records) by what was made, each begun piece of 64 bytes counted."""
    tensors = sum(-(-array.nbytes // 64) * 64 for array in dense.arrays.values())
    records = sum(-(-max(v.array.ctypes.data + v.nbytes for v in m.stored.values()) // 4096) * 4096
                  - m.codes.array.ctypes.data for m in dense.matrices.values())  # fmt: skip
    return tensors, records


@pytest.mark.parametrize("dense", ["keep", "int8", "q4"])
def test_costs_are_what_loading_takes(workshop: Workshop, dense: str) -> None:
    """To the byte, and nothing is loaded for it."""
    container = open_container(workshop.container("int8", dense=dense))
    made, costs = loaded(container), dense_costs(container)
    assert held(made) == (costs.tensor_bytes, costs.matrix_bytes)
    assert costs.row_bytes == memory_of(made.entries[TABLE]) and costs.table_bytes == 1024 * 256 * 2
    assert costs.resident == costs.tensor_bytes + costs.matrix_bytes + costs.row_bytes
    assert costs.decoded_bytes == (0 if dense == "keep" else 2 * 1024 * 256) and costs.mapped_bytes == 0
    mapped = dense_costs(container, mode="mmap")
    assert mapped.resident == mapped.loading_bytes == 0
    plain = sum(e.nbytes for e in made.entries.values())
    assert mapped.mapped_bytes == plain + costs.matrix_bytes


def test_costs_of_what_is_made_anew(workshop: Workshop) -> None:
    """What is cast is held in its new type; its stored bytes are there while it is made."""
    container = open_container(workshop.container("int8"))
    use, plain = likely_use(container), dense_costs(container)
    norm = "model.language_model.norm.weight"
    cast = dense_costs(container, DenseUse(use.names, use.tables, use.matrices, {norm: 1024}))
    assert cast.tensor_bytes == plain.tensor_bytes - 512 + 1024
    assert cast.loading_bytes == plain.loading_bytes + 512
    for whole in (dense_costs(container, DenseUse(use.names)), dense_costs(container, mode="resident")):
        assert (whole.row_bytes, whole.table_bytes) == (0, 0)
        assert whole.tensor_bytes == plain.tensor_bytes + 1024 * 256 * 2
    assert dense_costs(container, mode="anew") == dense_costs(container, mode="buffered") == plain
    assert not any(n.startswith(("mtp.", "model.visual.")) for n in use.names)


def test_what_others_are_made_of_can_be_let_go(workshop: Workshop) -> None:
    """A tensor that is cast has memory of its own: letting it go frees it, whatever is kept of its file."""
    container = open_container(workshop.container("int8"))
    names = sorted(likely_use(container).names)
    dense = load_dense(container, names, "direct", passing=names[3:5])

    def memory(name: str) -> int:
        array = dense.arrays[name]
        while isinstance(array.base, np.ndarray):
            array = array.base
        return array.ctypes.data

    shared = {memory(n) for n in names[:3] + names[5:]}
    assert len({memory(n) for n in names[3:5]} - shared) == 2
    plain = load_dense(container, names, "direct")
    assert all(np.array_equal(plain.arrays[n], dense.arrays[n]) for n in names)
