"""experts.parquet is foreign: no table takes more than its rows can, no null and no thread slips in."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pagestone.formats import manifest, parquet_pages
from pagestone.formats.errors import DataError, MachineError, PagestoneError
from pagestone.formats.manifest import EXPERTS_TABLE, RECORDS, columns_for, read_experts, write_experts
from pagestone.reader.commands import describe
from pagestone.reader.container import open_container
from pagestone.reader.store import RecordDigests
from pagestone.validate.verify import verify

VECTORS = Path(__file__).resolve().parents[1] / "vectors" / "accept"
MIB = 1 << 20
ROLES = ("codes", "scales", "biases")
COLUMNS = columns_for(ROLES)


def columns(rows: int = 2) -> dict[str, list[Any]]:
    kinds = {"string": ["a", "é"], "int32": [1, -2], "int64": [1 << 40, 0], "float64": [0.1, 1e-300]}
    return {name: (kinds[kind] * rows)[:rows] for name, kind in COLUMNS}


def table(values: dict[str, list[Any]]) -> Any:
    types = {name: getattr(pa, kind)() for name, kind in COLUMNS}
    return pa.table({n: pa.array(v, types[n]) for n, v in values.items()})


def refused(path: Path, rows: int | None = None) -> str:
    with pytest.raises(DataError) as caught:
        read_experts(path, rows)
    assert caught.value.file == str(path) and caught.value.remedy
    return caught.value.code


# -- what is right ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(p.parent.name for p in VECTORS.glob("*/experts.parquet")))
def test_every_value_is_the_librarys(name):
    """As `to_pydict` has it, in each vector, with and without the number of rows."""
    path = VECTORS / name / "experts.parquet"
    wanted = pq.ParquetFile(path).read(use_threads=False).to_pydict()
    assert read_experts(path, len(wanted["file"])) == read_experts(path) == wanted


@pytest.mark.parametrize("how", [{}, {"use_dictionary": False}, {"data_page_version": "2.0"}, {"compression": "none"},
                                 {"row_group_size": 7}, {"data_page_size": 64}], ids=str)  # fmt: skip
def test_other_writers(tmp_path, how):
    """Pages, groups and encodings as others choose them: the table is what counts."""
    pq.write_table(table(columns(200)), tmp_path / "t", **how)
    assert read_experts(tmp_path / "t", 200) == columns(200)


def test_tables_without_rows(tmp_path):
    """Their columns are there."""
    write_experts(tmp_path / "t", [], ROLES)
    assert read_experts(tmp_path / "t", 0) == {name: [] for name, _ in columns_for(ROLES)}


def test_long_tables(tmp_path):
    """A table as large as the largest models have, with long names: within the bounds."""
    rows = 40_000
    wanted = columns(rows) | {"tensor": [f"model.{'x' * 100}.{n}.gate_proj.weight" for n in range(rows)]}
    write_experts(tmp_path / "t", [wanted], ROLES)
    assert read_experts(tmp_path / "t", rows) == wanted
    assert refused(tmp_path / "t") == "E0313", "with nobody to say how many rows there are, fewer are read"


# -- what is not ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_another_number_of_rows(tmp_path, rows):
    write_experts(tmp_path / "t", [columns(2)], ROLES)
    assert refused(tmp_path / "t", rows) == "E0313"


def test_whoever_reads_says_how_many_rows(tmp_path):
    """The manifest knows it, and all who read a container's table ask it."""
    container = open_container(shutil.copytree(VECTORS / "int8-odd", tmp_path / "c"))
    assert container.manifest.matrices == 18
    found = read_experts(container.path / EXPERTS_TABLE, 18)
    write_experts(
        container.path / EXPERTS_TABLE, [found, {name: values[:3] for name, values in found.items()}], ROLES[:2]
    )
    with pytest.raises(DataError, match=r"18 rows expected, found 21 \(E0313\)"):
        describe(container)
    assert [f.code for f in verify(container.path).findings if "rows" in f.message] == ["E1014"]


@pytest.mark.parametrize("name", [name for name, _ in COLUMNS])
def test_nulls(tmp_path, name):
    """Nothing may be null."""
    pq.write_table(table(columns() | {name: [columns()[name][0], None]}), tmp_path / "t")
    assert refused(tmp_path / "t", 2) == "E0314"


def test_columns_of_roles(tmp_path):
    """Two for every role of the encoding in a record; whoever knows the roles is given these, and asks for them all."""
    write_experts(tmp_path / "t", [columns()], ROLES)
    assert [*read_experts(tmp_path / "t")] == [name for name, _ in COLUMNS]
    less = read_experts(tmp_path / "t", 2, ("codes", "biases"))
    assert [*less] == [name for name, _ in columns_for(("codes", "biases"))] and less["biases_bytes"] == [1 << 40, 0]
    with pytest.raises(DataError, match=r"column mins_offset of int64 expected, found none \(E0312\)"):
        read_experts(tmp_path / "t", 2, (*ROLES, "mins"))


@pytest.mark.parametrize("codec", ["bf16", "fp8", "int8", "q3", "q4", "q8"])
def test_every_stored_tensor_has_its_place(codec):
    """In the vectors: the bytes at each place are those that the reader gives out, affine biases too."""
    name = {
        "bf16": "bf16-small",
        "fp8": "fp8-edge",
        "int8": "int8-odd",
        "q3": "q3-small",
        "q4": "q4-groups",
        "q8": "q8-small",
    }[codec]
    container = open_container(VECTORS / name)
    found, roles = read_experts(container.path / EXPERTS_TABLE), set()
    layers = {layer.entry.file: layer for layer in (*container.layers.values(), *container.mtp.values())}
    for row, file in enumerate(found["file"]):
        layer = layers[file]
        matrix = getattr(layer.expert(found["expert"][row]), found["part"][row])
        for role in layer.layout.record.roles:
            roles.add(role)
            start, nbytes = (found[f"{role}_{what}"][row] for what in ("offset", "bytes"))
            stored = layer.path.read_bytes()[start : start + nbytes]
            assert stored == getattr(matrix, role).array.tobytes(), (row, role)
    assert roles == {"bf16": {"codes"}, "fp8": {"codes", "scales"}, "int8": {"codes", "scales"}}.get(codec, set(ROLES))
    assert [*found] == [name for name, _ in columns_for([r for r in ROLES if r in roles])]


def test_two_columns_of_one_name(tmp_path):
    twice = table(columns()).append_column("rows", pa.array([1, 2], pa.int32()))
    pq.write_table(twice, tmp_path / "t")
    assert refused(tmp_path / "t", 2) == "E0311"


def test_a_text_that_is_none(tmp_path):
    """Bytes that are not UTF-8 in a column of text."""
    path = tmp_path / "t"
    pq.write_table(table(columns()), path, compression="none")
    raw = path.read_bytes()
    assert raw.count("é".encode()) >= 1
    path.write_bytes(raw.replace("é".encode(), b"\xff\xfe"))
    assert refused(path, 2) == "E0311"


def test_a_sector_that_cannot_be_read(tmp_path):
    """The machine's fault, not the table's: exit 3, and not "convert again"."""
    container = open_container(shutil.copytree(VECTORS / "int8-odd", tmp_path / "c"))
    for name in (EXPERTS_TABLE, RECORDS):
        (container.path / name).unlink()
        (container.path / name).symlink_to("/proc/self/mem")  # reads of its first page fail with EIO
    with pytest.raises(OSError, match="Input/output"):
        read_experts(container.path / EXPERTS_TABLE, 18)
    for reading, name in ((RecordDigests, r"records\.xxh3"), (describe, r"experts\.parquet")):
        with pytest.raises(MachineError, match=name + r": .*Input/output error \(E1203\)") as caught:
            reading(container)
        assert caught.value.exit_code == 3 and "disk" in str(caught.value.remedy)


def test_mutated_tables(tmp_path):
    """Whatever bytes change, a table of its columns and rows is read or an error of ours is raised."""
    raw = (VECTORS / "int8-odd" / "experts.parquet").read_bytes()
    footer, path, outcomes = len(raw) - 8 - parquet_pages.footer_bytes(raw), tmp_path / "t", set()
    for seed in range(1000):
        draw, changed = random.Random(seed), bytearray(raw)
        for _ in range(draw.choice((1, 1, 2, 4))):
            at = draw.randrange(footer if draw.random() < 0.5 else 0, len(changed))
            if draw.random() < 0.8:
                changed[at] ^= 1 << draw.randrange(8)
            else:
                changed[at : at + draw.randrange(9)] = draw.randbytes(draw.randrange(9))
        path.write_bytes(changed)
        try:
            found = read_experts(path, 18)
            assert {len(values) for values in found.values()} == {18}
            outcomes.add("read")
        except PagestoneError as error:
            outcomes.add(error.code)
    assert outcomes >= {"read", "E0311", "E0312"}, outcomes


# -- what is large ----------------------------------------------------------------------------------------------------


def varint(n: int) -> bytes:
    return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)


def with_footer(footer: bytes) -> bytes:
    return b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def wide_footer(chunks: int) -> bytes:
    """A footer of one row group of `chunks` empty columns, three bytes each."""
    schema = b"\x2c\x48\x01r\x15\x02\0" + b"\x15\x02\x25\0\x18\x01a\0"
    group = b"\x19\xfc" + varint(chunks) + b"\x26\0\0" * chunks + b"\x16\x02\x16\x02\0"
    return b"\x15\x04\x19" + schema + b"\x16\x02\x19\x1c" + group + b"\0"


def constant(rows: int, **changed: Any) -> Any:
    types = {name: getattr(pa, kind)() for name, kind in COLUMNS}
    values = {"string": "a", "int32": 1, "int64": 1, "float64": 0.0}
    same = {name: pa.repeat(pa.scalar(values[kind], types[name]), rows) for name, kind in COLUMNS}
    return pa.table(same | changed)


def bombs(root: Path) -> dict[str, int | None]:
    """Files below `root` that unfold to gigabytes or nearly, and the number of rows their manifest would state."""
    pq.write_table(constant(3_000_000), root / "rows", compression="zstd")
    pq.write_table(constant(3_000_000), root / "rows of nobody", compression="zstd")
    text = pa.array(["x" * (150 * MIB)] * 3)
    pq.write_table(constant(3, tensor=text), root / "dictionary", compression="zstd", write_statistics=False)
    pq.write_table(constant(3, tensor=text), root / "plain", use_dictionary=False, compression="zstd",
                   write_statistics=False)  # fmt: skip
    other = constant(3).append_column("more", text)
    pq.write_table(other, root / "another column", compression="zstd", write_statistics=False)
    (root / "footer").write_bytes(with_footer(wide_footer(1_500_000)))
    with (root / "long").open("wb") as file:
        file.truncate(1 << 32)
    return {"rows": 3000, "rows of nobody": None, "dictionary": 3, "plain": 3, "another column": 3, "footer": 3000,
            "long": 3}  # fmt: skip


MEASURE = """
import json, resource, sys
from pathlib import Path
import pyarrow.parquet
from pagestone.formats.errors import DataError
from pagestone.formats.manifest import read_experts
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
root, found, before = Path(sys.argv[1]), {}, peak()
for name, rows in json.loads(sys.argv[2]).items():
    try:
        read_experts(root / name, rows)
        found[name] = "read"
    except DataError as error:
        found[name] = error.code
print(json.dumps([found, peak() - before]))
"""


def test_bombs(tmp_path):
    """Small files that unfold to gigabytes are refused before they do: below 64 MiB for all of them."""
    made = bombs(tmp_path)
    assert all(name == "long" or (tmp_path / name).stat().st_size < 5_000_000 for name in made)
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path), json.dumps(made)], capture_output=True,
                          text=True, check=True)  # fmt: skip
    found, mib = json.loads(done.stdout)
    assert found == {"rows": "E0313", "rows of nobody": "E0313", "dictionary": "E0315", "plain": "E0315",
                     "another column": "E0315", "footer": "E0315", "long": "E0315"}  # fmt: skip
    assert mib < 64


def header(unfolded: int, stored: int, values: int, kind: int = 5) -> bytes:
    """A page header: type, sizes, and the header of its kind with a number of values."""
    size = [b"\x15" + varint(n << 1) for n in (0, unfolded, stored)]
    return b"".join(size) + bytes([(kind - 3) << 4 | 12]) + b"\x15" + varint(values << 1) + b"\0\0"


@pytest.mark.parametrize(
    ("pages", "wanted"),
    [
        ([header(1000, 4, 2), b"abcd"], 1000),
        ([header(1000, 0, 2, 7), header(7, 1, 2, 8), b"x"], 1007),
        ([header(1000, 4, 3), b"abcd"], "3"),  # more values than the column
        ([header(1000, 5, 2), b"abcd"], "5 bytes"),  # the page ends beyond the column
        ([header(1000, 4, 2)[:-2], b"\0"], "bytes"),
        ([b"\x25\x02" * 3 + b"\0"], "at most 2"),  # no page header
        ([b"\x15\0\x15\x02\x15\0\x05\x04\x02" + header(0, 0, 0)[6:]], "twice"),
        ([b"\x1c" * 40], "deep"),
        ([b"\x19\x19" * 40], "deep"),
        ([b"\x15" + b"\xff" * 11], "64 bits"),
        ([b"\x1b\0\0"], "type 11"),
        ([b"\x18\xff\xff\xff\xff\x0f"], "bytes"),
    ],
)
def test_page_headers(pages, wanted):
    """What is announced is added up; what is not understood, lies outside or announces too many values is refused."""
    raw = b"PAR1" + b"".join(pages) + bytes(8)
    chunk = parquet_pages.Chunk(2, 4, len(raw) - 12)
    if isinstance(wanted, int):
        assert parquet_pages.unfolded_bytes(raw, chunk) == wanted
    else:
        with pytest.raises(ValueError, match=wanted):
            parquet_pages.unfolded_bytes(raw, chunk)


def footer_of(*groups: tuple[int, int]) -> bytes:
    """A file whose footer has row groups of (rows, values of their only column), with a page for each."""
    found, pages = b"", [header(1, 0, min(1, values)) for _, values in groups]
    for number, (rows, values) in enumerate(groups):
        at = 4 + sum(map(len, pages[:number]))
        meta = b"".join(
            bytes([delta << 4 | 6]) + varint(n << 1) for delta, n in ((5, values), (2, len(pages[number])), (2, at))
        )
        found += b"\x19\x1c\x26\0\x1c" + meta + b"\0\0" + b"\x26" + varint(rows << 1) + b"\0"
    footer = b"\x49" + bytes([len(groups) << 4 | 12]) + found + b"\0"
    return b"PAR1" + b"".join(pages) + footer + len(footer).to_bytes(4, "little") + b"PAR1"


@pytest.mark.parametrize(
    ("groups", "sound"),
    [([(2, 2), (1, 1)], True), ([(3, 3)], True), ([(2, 2)], False), ([(3, 4)], False), ([(3, 2)], False),
     ([(3, 3), (0, 0)], False)],
)  # fmt: skip
def test_rows_must_add_up(groups, sound):
    """Those of all groups to the table's, values of a column to its group's; no group is empty."""

    def fail(message: str, code: str) -> DataError:
        return DataError(message, code=code)

    with nullcontext() if sound else pytest.raises(ValueError, match="expected"):
        manifest._bounded(footer_of(*groups), 3, fail)


@pytest.mark.parametrize(("begin", "nbytes"), [(0, 4), (4, 1000), (-1, 5), (4, -1), (2000, 0)])
def test_pages_outside_the_file(begin, nbytes):
    with pytest.raises(ValueError, match="within"):
        parquet_pages.unfolded_bytes(b"PAR1" + bytes(100), parquet_pages.Chunk(2, begin, nbytes))


# -- threads ----------------------------------------------------------------------------------------------------------

COUNT = """
import os, sys
import pyarrow.parquet
from pagestone.formats.manifest import read_experts
before = len(os.listdir("/proc/self/task"))
read_experts(sys.argv[1], 18)
print(before, len(os.listdir("/proc/self/task")))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_no_thread_is_started():
    """A thread of Arrow's that still holds Python objects when the interpreter ends aborts the process."""
    path = VECTORS / "int8-odd" / "experts.parquet"
    done = subprocess.run([sys.executable, "-c", COUNT, str(path)], capture_output=True, text=True, check=True)
    before, after = done.stdout.split()
    assert before == after
