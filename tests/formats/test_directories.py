"""What may name a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagestone.formats.directories import directory, output_directory
from pagestone.formats.errors import RequestError

ADDRESSES = ("hf://a/b", "https://host/a/b", "s3://bucket/key", "file:///a", Path("hf://a/b"), "hf:/a", "ssh+git://a/b")


@pytest.mark.parametrize("named", [directory, output_directory])
def test_names_of_directories(named, tmp_path, monkeypatch):
    """Paths are taken as they are, there or not; an empty word and an address are none."""
    for word in ("x", ".", "a:b/c", "C:/models", "/a/hf://b", str(tmp_path), "models--a--b"):
        assert named(word) == Path(word) and named(Path(word)) == Path(word)
    with pytest.raises(RequestError, match="empty word") as caught:
        named("")
    assert caught.value.code == "E0813"
    for word in ADDRESSES:
        with pytest.raises(RequestError, match="address") as caught:
            named(word)
        assert caught.value.code == "E0418" and caught.value.file == str(word)
    monkeypatch.chdir(tmp_path)
    Path("hf:/a").mkdir(parents=True)
    assert named("hf://a") == Path("hf:/a"), "which is there, whatever it looks like"


def test_what_to_do_about_an_address():
    for named, words in ((directory, "download it first"), (output_directory, "upload it when it is finished")):
        with pytest.raises(RequestError, match=words):
            named("hf://a/b")
