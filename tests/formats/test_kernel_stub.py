"""`_kernels.pyi`, which type checkers read, says what the built module exports."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from pagestone.formats import native

STUB = Path(native.__file__).with_name("_kernels.pyi")
SOURCES = STUB.with_name("kernels")


def parameters(function: ast.FunctionDef) -> list[tuple[str, bool, bool]]:
    """(name, whether it has a default, whether it is an array) of each parameter, in order."""
    names = function.args.args
    given = len(names) - len(function.args.defaults)
    words = [ast.unparse(a.annotation or ast.Constant(None)).lower() for a in names]
    return [(a.arg, at >= given, "array" in word) for at, (a, word) in enumerate(zip(names, words, strict=True))]


def stubbed() -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.FunctionDef)}


def built(name: str) -> ast.FunctionDef:
    """The signature nanobind gives the function `name`; it has one, not several to choose from."""
    ((signature, *_),) = getattr(native._kernels, name).__nb_signature__
    plain = re.sub(r"ndarray\[[^\]]*\]", "ndarray", re.sub(r"\\\d+", "...", signature))
    (function,) = ast.parse(f"{plain}: ...").body
    assert isinstance(function, ast.FunctionDef)
    return function


@pytest.mark.skipif(not native.built(), reason="native kernels are not built")
def test_the_stub_says_what_was_built():
    exported = {name for name in dir(native._kernels) if not name.startswith("_")}
    assert set(stubbed()) == exported
    for name, function in stubbed().items():
        assert parameters(function) == parameters(built(name)), name


def test_every_kernel_stands_in_each_of_its_places():
    """What CMakeLists.txt and CONTRIBUTING say a new kernel needs: its file, the list, its binding, the stub."""
    listed = {
        f"{word}_{codec}"
        for word, macro in (("encode", "PAGESTONE_ENCODERS"), ("matmul", "PAGESTONE_PRODUCTS"))
        for codec in re.findall(
            r"EACH\((\w+)\)", re.search(rf"#define {macro}\(EACH\)(.*)", (SOURCES / "kernels.h").read_text())[1]
        )
    }
    files = {file.stem for word in ("encode", "matmul") for file in SOURCES.glob(f"{word}_*.cpp")}
    bound = {
        name
        for word in ("encoders", "products")
        for name in re.findall(r'm\.def\("((?:encode|matmul)_\w+)"', (SOURCES / f"bind_{word}.cpp").read_text())
    }
    kernels = {name for name in stubbed() if name.startswith(("encode_", "matmul_"))}
    assert listed == files == bound == kernels and kernels
