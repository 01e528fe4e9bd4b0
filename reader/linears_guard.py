"""Which dense modules of transformers ours may stand for: those proved to be used as ours can be used.

A linear layer over codes has no weight that could be read. Standard is a module of torch's very own class, as its class
made it, without hooks, that its owner's code calls and does nothing else with. The code is looked at, not trusted:
every place in the owner's class that takes the module by its name must be a call of it. Whoever reaches it by other
ways still meets a module without a weight (E1257).

An encoded matrix where that is not so is refused (E1256); an embedding is then simply loaded whole.

Importing this module imports nothing of torch or transformers; its functions do.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from pagestone.formats.errors import RequestError

OUR_CODE = "transformers.models."
"""Where the classes are whose code says how a model uses its modules; what stands above them in the library is common
to all models, and hands modules out only to those who ask for them."""


def require_linear(model: Any, name: str, rows: int, columns: int, file: Path) -> Any:
    """The linear layer called `name` of a model, a stand-in's original; `RequestError` (E1256) if it is none that an
    encoded matrix [rows, columns] may stand for."""
    theirs = model.get_submodule(name)
    problem = linear_problem(model, name)
    if problem is None and (theirs.out_features, theirs.in_features) != (rows, columns):
        problem = f"[{theirs.out_features}, {theirs.in_features}] expected from config.json, found [{rows}, {columns}]"
    if problem is not None:
        raise RequestError(
            f"{type(theirs).__name__} cannot be computed from an encoded matrix: {problem}",
            code="E1256",
            file=file,
            tensor=name,
            remedy="convert the checkpoint with --dense keep; this container can be read, not run",
        )
    return theirs


def linear_problem(model: Any, name: str) -> str | None:
    """What keeps a module from being a plain linear layer that is only called; None if nothing."""
    from torch import nn

    theirs = model.get_submodule(name)
    if type(theirs) is not nn.Linear:
        return "torch's own Linear expected"
    parts = {"weight"} if theirs.bias is None else {"weight", "bias"}
    return _altered(theirs, parts) or _not_called(model, name)


def embedding_problem(model: Any, name: str) -> str | None:
    """What keeps a module from being a plain embedding that is only called; None if nothing."""
    from torch import nn

    theirs = model.get_submodule(name)
    if type(theirs) is not nn.Embedding:
        return "torch's own Embedding expected"
    if theirs.max_norm is not None:
        return "rows are normalised when they are used"
    return _altered(theirs, {"weight"}) or _not_called(model, name)


def _altered(theirs: Any, parts: set[str]) -> str | None:
    """What an instance has that its class does not say; None if nothing."""
    held = {name for name, _ in theirs.named_parameters()} | {name for name, _ in theirs.named_buffers()}
    if held != parts:
        return f"the parameters {', '.join(sorted(parts))} expected, found {', '.join(sorted(held)) or 'none'}"
    hooks = [name for name, value in vars(theirs).items() if "hook" in name and isinstance(value, dict) and value]
    if hooks or "forward" in vars(theirs):
        return f"a module as its class makes it expected, found {(*hooks, 'a forward of its own')[0]}"
    return None


def _not_called(model: Any, name: str) -> str | None:
    """What else than calling it the owner of a module does with it; None if nothing, and it is called."""
    parent, _, leaf = name.rpartition(".")
    owner: Any = type(model.get_submodule(parent))
    uses = uses_of(owner, leaf)
    if uses.difference({CALLED}):
        return f"{owner.__name__} does more with it than call it"
    return None if uses else f"{owner.__name__} does not call it by its name"


CALLED, TAKEN = "called", "taken"


@cache
def uses_of(owner: Any, name: str) -> set[str]:
    """How the code of a class and of those of models above it takes the attribute `name`: `CALLED`, `TAKEN`."""
    found: set[str] = set()
    for kind in owner.__mro__:
        if not kind.__module__.startswith(OUR_CODE) and kind is not owner:
            continue
        for member in vars(kind).values():
            for code in _codes(member):
                found |= set(_uses(code, name))
    return found


def _codes(member: Any) -> Iterator[CodeType]:
    """The code of a function, method or property, of what it wraps, and of the functions in it.

    Decorators hold what they wrap where `functools.wraps` says, or only in their closure.
    """
    if isinstance(member, property):
        waiting: list[Any] = [member.fget, member.fset, member.fdel]
    else:
        waiting = [getattr(member, "__func__", member)]
    seen: set[int] = set()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        yield from _nested(function.__code__)
        waiting.append(getattr(function, "__wrapped__", None))
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # an empty one
                waiting.append(cell.cell_contents)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _nested(value)


def _uses(code: CodeType, name: str) -> Iterator[str]:
    """Every place in `code` that loads an attribute, or deletes it. A call of one loads it as a method."""
    for step in dis.get_instructions(code):
        takes = step.opname == "LOAD_METHOD" or ("ATTR" in step.opname and step.opname != "STORE_ATTR")
        if step.argval != name or not takes:
            continue
        method = step.opname == "LOAD_METHOD" or (step.opname == "LOAD_ATTR" and step.argrepr.startswith("NULL|self"))
        yield CALLED if method or step.argrepr.endswith("+ NULL|self") else TAKEN
