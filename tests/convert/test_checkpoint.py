"""The catalogue of a checkpoint: whatever its layout on disk, and refused before work if something is wrong."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from kits.checkpoints import CONFIG, INDEX, SIDE_FILES, SINGLE, T_ORDER, Tensor, write_checkpoint, write_safetensors

from pagestone.convert.checkpoint import open_checkpoint
from pagestone.convert.side_files import SIDE_FILE_LIMIT
from pagestone.formats.errors import DataError, PagestoneError, RequestError

TENSORS = {
    "a": Tensor.of([1, 2, 3]),
    "b": Tensor.of([[4.0]], "F32"),
    "c": Tensor.of([5], "F16"),
    "d": Tensor("F32", (0, 3), b""),
}


def bytes_of(root: Path) -> dict[str, bytes]:
    """Every tensor's bytes as the catalogue finds them."""
    found = {}
    for name, t in open_checkpoint(root).tensors.items():
        with (root / t.file).open("rb") as handle:
            handle.seek(t.offset)
            found[name] = handle.read(t.nbytes)
    return found


def edit_index(root: Path, **changes) -> None:
    index = json.loads((root / INDEX).read_bytes())
    for name, file in changes.items():
        if file is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = file
    (root / INDEX).write_text(json.dumps(index))


LAYOUTS = {
    "one file": {},
    "three shards": {"shards": 3},
    "alphabetical": {"shards": 2, "alphabetical": True},
    "odd offsets": {"shards": 2, "shift": 1},
    "cache links": {"shards": 2, "links": True},
    "one file behind a link": {"links": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_tensors(tmp_path, layout):
    """One file, shards with an index and cache directories of links all lead to the same bytes."""
    root = write_checkpoint(tmp_path / "snapshot", TENSORS, {}, **LAYOUTS[layout])
    assert bytes_of(root) == {n: t.data for n, t in TENSORS.items()}
    assert open_checkpoint(root).warnings == ()


@pytest.mark.parametrize("name", ["with space", "100%", "a#b", "中文", "é", "a:b;c", "-dash", "new\nline"])
def test_any_directory_name(tmp_path, name):
    """Nothing in a path is special."""
    root = write_checkpoint(tmp_path / name, TENSORS, {}, shards=2)
    assert bytes_of(root) == {n: t.data for n, t in TENSORS.items()}


def test_side_files_by_rule(tmp_path):
    """Side files are copied, or listed with the rule by which they are not."""
    root = write_checkpoint(tmp_path / "s", TENSORS, {}, shards=2)
    (root / ".hidden").write_text("x")
    (root / "model.py").write_text("x")
    (root / "pytorch_model.bin").write_text("x")
    (root / "sub").mkdir()
    (root / "dangling.txt").symlink_to("nowhere")
    (root / "large.bin.txt").write_bytes(b"x" * (SIDE_FILE_LIMIT + 1))
    (root / "just.txt").write_bytes(b"x" * SIDE_FILE_LIMIT)
    write_safetensors(root / "adapter.safetensors", TENSORS)
    checkpoint = open_checkpoint(root)
    rules = {f.name: f.rule for f in checkpoint.side_files}
    assert {n for n, rule in rules.items() if rule is None} == {*SIDE_FILES, "just.txt"}
    assert rules["model.py"].startswith("code") and rules["sub"] == "a subfolder" and rules[".hidden"]
    assert rules["large.bin.txt"] == "larger than 64 MiB" and "another format" in rules["pytorch_model.bin"]
    assert any("adapter.safetensors" in w for w in checkpoint.warnings)
    assert any("dangling.txt" in w for w in checkpoint.warnings)


@pytest.mark.parametrize("name", [b"caf\xe9.txt", b"two\nlines.txt"])
def test_names_no_manifest_can_hold(tmp_path, name):
    """A side file whose name is not UTF-8, or has control characters, is listed and left behind."""
    root = write_checkpoint(tmp_path / "s", TENSORS, {})
    Path(os.fsdecode(os.fsencode(root) + b"/" + name)).write_text("x")
    checkpoint = open_checkpoint(root)
    odd = [f for f in checkpoint.side_files if f.name not in SIDE_FILES]
    assert len(odd) == 1 and odd[0].rule and odd[0].name.isprintable()
    assert len(checkpoint.warnings) == 1


def test_index_decides_between_copies(tmp_path):
    """Where a name stands in two shards the index decides, and the other copy is reported."""
    root = write_checkpoint(tmp_path / "s", TENSORS, {}, shards=2)
    other = open_checkpoint(root).tensors["a"].file
    here = next(f for f in open_checkpoint(root).shards if f != other)
    write_safetensors(root / here, {"c": TENSORS["c"], "d": TENSORS["d"], "a": Tensor.of([9, 9, 9])})
    checkpoint = open_checkpoint(root)
    assert checkpoint.tensors["a"].file == other
    assert [w for w in checkpoint.warnings if "also stands here" in w and here in w]
    edit_index(root, a=here)
    assert open_checkpoint(root).tensors["a"].file == here


def test_tensor_in_no_index_is_taken(tmp_path):
    """A tensor of a listed shard that the index forgot is taken, with a warning."""
    root = write_checkpoint(tmp_path / "s", TENSORS, {}, shards=2)
    edit_index(root, a=None)
    checkpoint = open_checkpoint(root)
    assert set(checkpoint.tensors) == set(TENSORS)
    assert any("a is not in the index" in w for w in checkpoint.warnings)


def test_same_name_twice_and_in_no_index(tmp_path):
    """Without a word of the index nobody can say which copy is meant."""
    root = write_checkpoint(tmp_path / "s", TENSORS, {}, shards=2)
    first, second = open_checkpoint(root).shards
    write_safetensors(root / first, {"a": TENSORS["a"], "b": TENSORS["b"], "x": TENSORS["a"]})
    write_safetensors(root / second, {"c": TENSORS["c"], "d": TENSORS["d"], "x": TENSORS["a"]})
    with pytest.raises(DataError, match="E0410") as caught:
        open_checkpoint(root)
    assert caught.value.tensor == "x"


def test_single_file_beside_others(tmp_path):
    """Without an index `model.safetensors` is the model, and other files are reported."""
    root = write_checkpoint(tmp_path / "s", TENSORS, {})
    write_safetensors(root / "other.safetensors", {"z": TENSORS["a"]})
    checkpoint = open_checkpoint(root)
    assert checkpoint.shards == (SINGLE,) and "z" not in checkpoint.tensors
    assert any("other.safetensors" in w for w in checkpoint.warnings)


def test_index_of_another_name(tmp_path):
    """The only index there is counts, whatever its name."""
    root = write_checkpoint(tmp_path / "s", TENSORS, {}, shards=2)
    (root / INDEX).rename(root / "weights.safetensors.index.json")
    assert set(open_checkpoint(root).tensors) == set(TENSORS)
    shutil.copy(root / "weights.safetensors.index.json", root / "more.safetensors.index.json")
    with pytest.raises(RequestError, match="E0405"):
        open_checkpoint(root)


def test_fingerprint(tmp_path):
    """The fingerprint follows config, headers and shard names, and neither data nor place."""
    one = write_checkpoint(tmp_path / "1", TENSORS, {"a": 1})
    same = write_checkpoint(tmp_path / "2", TENSORS | {"a": Tensor.of([7, 7, 7])}, {"a": 1})
    config = write_checkpoint(tmp_path / "3", TENSORS, {"a": 2})
    header = write_checkpoint(tmp_path / "4", TENSORS | {"e": TENSORS["a"]}, {"a": 1})
    prints = [open_checkpoint(r).fingerprint for r in (one, same, config, header)]
    assert prints[0] == prints[1] and len(set(prints)) == 3


def replaced(path: Path, target: str | None = None) -> None:
    """A link to `target` in the place of a file, or a directory."""
    path.unlink()
    if target is None:
        path.mkdir()
    else:
        path.symlink_to(target)


def no_weights(root: Path, _: Path) -> None:
    for file in [*root.glob("*.safetensors"), root / INDEX]:
        file.unlink()


DAMAGE: dict[str, tuple[type[PagestoneError], str, Callable[[Path, Path], object]]] = {
    "missing shard": (DataError, "E0403", lambda root, shard: shard.unlink()),
    "dangling link": (DataError, "E0403", lambda root, shard: replaced(shard, "../blobs/gone")),
    "shard that is a directory": (DataError, "E0403", lambda root, shard: replaced(shard)),
    "truncated": (DataError, "E0212", lambda root, shard: shard.write_bytes(shard.read_bytes()[:-1])),
    "not in the header": (DataError, "E0409", lambda root, shard: edit_index(root, z=shard.name)),
    "path in the index": (DataError, "E0406", lambda root, shard: edit_index(root, a="../model.safetensors")),
    "index without a map": (DataError, "E0408", lambda root, shard: (root / INDEX).write_text("{}")),
    "map of numbers": (DataError, "E0408", lambda root, shard: (root / INDEX).write_text('{"weight_map": {"a": 1}}')),
    "index cut short": (
        DataError, "E0407", lambda root, shard: (root / INDEX).write_text((root / INDEX).read_text()[:-5])
    ),
    "index of zeros": (DataError, "E0407", lambda root, shard: (root / INDEX).write_bytes(bytes(100))),
    "dangling index": (DataError, "E0403", lambda root, shard: replaced(root / INDEX, "nowhere")),
    "config cut short": (DataError, "E0407", lambda root, shard: (root / CONFIG).write_text('{"a": ')),
    "config that is a list": (DataError, "E0407", lambda root, shard: (root / CONFIG).write_text("[]")),
    "config with half a surrogate": (
        DataError, "E0407", lambda root, shard: (root / CONFIG).write_text('{"a": "\\ud800"}')
    ),
    "no config": (RequestError, "E0402", lambda root, shard: (root / CONFIG).unlink()),
    "no index": (RequestError, "E0404", lambda root, shard: (root / INDEX).unlink()),
    "no weights": (RequestError, "E0404", no_weights),
}  # fmt: skip
"""The error expected, and what is done to a checkpoint of two shards: to its folder, or to its second shard."""


@pytest.mark.parametrize("how", DAMAGE)
def test_damage(tmp_path, how):
    """Every kind of damage is an error that names the file and says what to do."""
    root = write_checkpoint(tmp_path / "s", TENSORS, {}, shards=2)
    kind, code, damage = DAMAGE[how]
    damage(root, root / open_checkpoint(root).shards[1])
    with pytest.raises(kind) as caught:
        open_checkpoint(root)
    error = caught.value
    assert error.code == code and error.remedy and str(root) in str(error.file), error


def test_no_directory(tmp_path):
    """A file, or nothing, is no checkpoint directory."""
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "nothing", tmp_path / "file" / "below"):
        with pytest.raises(RequestError, match="E0401"):
            open_checkpoint(path)


def test_nothing_is_read_but_headers(tmp_path):
    """Opening costs headers only: the size of the data does not matter."""
    spec = T_ORDER.having(fused=False)
    checkpoint = open_checkpoint(spec.write(tmp_path / "s", shards=4))
    assert len(checkpoint.tensors) == len(spec.tensors())
    assert {t.dtype for t in checkpoint.tensors.values()} == {"BF16", "F32"}
