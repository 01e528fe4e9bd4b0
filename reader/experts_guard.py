"""Which experts modules of transformers ours may stand for: those proved to compute what ours compute.

Ours replaces a module that nobody will run again, and both sides of `verify-logits` would agree on a wrong one. So
nothing is taken on its looks. Standard is a class whose eager forward is, instruction by instruction and global by
global, that of Mixtral's experts; whose gate is the library's own default; whose activation is in a table; and whose
instance has the parameters of that and nothing else: no bias, no limit that is used, no norm, no hook. gpt_oss computes
otherwise: there it must be that very class, whose own gate ours calls. Everything else is refused (E1225).

Importing this module imports nothing of transformers; its functions do.
"""

from __future__ import annotations

from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from pagestone.formats.errors import RequestError
from pagestone.reader import transformers_inside as inside

if TYPE_CHECKING:
    from pagestone.reader.experts import RoutedExperts

ACTIVATIONS = (
    "gelu", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "relu6",
    "sigmoid", "silu", "swish", "tanh", "mish", "hardswish", "linear",
)  # fmt: skip
"""Activations as a config names them: element by element, without parameters."""
PLAIN = ("gate_up_proj", "down_proj")
BIASED = (*PLAIN, "gate_up_proj_bias", "down_proj_bias")


def ours_for(theirs: Any, name: str, file: Path) -> type[RoutedExperts]:
    """The class of ours that computes what the module `theirs` does; `RequestError` (E1225) if none is proved to."""
    from pagestone.reader.experts import GptOssExperts, RoutedExperts

    gpt_oss = inside.is_gpt_oss(theirs)
    problem = _altered(theirs, BIASED if gpt_oss else PLAIN) or (None if gpt_oss else _no_standard(theirs))
    if problem is not None:
        raise RequestError(
            f"{name}: {type(theirs).__name__} computes its experts in a way this version does not know: {problem}",
            code="E1225",
            file=file,
            remedy="this container can be read, not run",
        )
    return GptOssExperts if gpt_oss else RoutedExperts


def _altered(theirs: Any, parameters: tuple[str, ...]) -> str | None:
    """What an instance has that its class does not say; None if nothing."""
    held = {name for name, _ in theirs.named_parameters()} | {name for name, _ in theirs.named_buffers()}
    if held != set(parameters):
        return f"the parameters {', '.join(sorted(parameters))} expected, found {', '.join(sorted(held)) or 'none'}"
    changed = inside.changed_methods(theirs)
    if any("hook" in name for name in changed):
        return "no hook expected, found one"
    return f"a method of its class expected, found one of its own: {min(changed)}" if changed else None


def _no_standard(theirs: Any) -> str | None:
    """What keeps a module from being proved standard; None if it is."""
    kind = type(theirs)
    forward, standard = inside.eager_forward(kind), inside.standard_forward()
    if forward is None or standard is None:
        return "its forward is not the library's"
    if not same_function(forward, standard):
        return "its eager forward is not the standard one"
    if not inside.has_default_gate(kind):
        return "it has a gate of its own"
    flags = inside.flags_of(theirs)
    if flags != inside.FLAGS:
        return ", ".join(f"{name} is {flag}" for name, flag in flags.items())
    activation = type(getattr(theirs, "act_fn", None))
    if activation not in inside.activation_types(ACTIVATIONS):
        return f"its activation {activation.__name__} is not among the known ones"
    return None


def same_function(one: Any, two: Any) -> bool:
    """Whether two Python functions do the same: equal instructions, constants, names, defaults, and equal globals.

    transformers copies code between its models instead of sharing it, so identity would prove too little.
    """
    if not (isinstance(one, FunctionType) and isinstance(two, FunctionType)):
        return False
    if one is two:
        return True
    a, b = one.__code__, two.__code__
    facts = [
        (c.co_code, c.co_names, c.co_varnames, c.co_argcount, c.co_kwonlyargcount, c.co_flags, c.co_freevars)
        for c in (a, b)
    ]
    typed = [[(type(value), value) for value in c.co_consts] for c in (a, b)]
    if facts[0] != facts[1] or typed[0] != typed[1] or a.co_freevars:
        return False
    if (one.__defaults__, one.__kwdefaults__) != (two.__defaults__, two.__kwdefaults__):
        return False
    return all(one.__globals__.get(n) is two.__globals__.get(n) for n in a.co_names)
