"""transformers as the host of a container: the only module that knows it.

The model is built on the meta device, so that no weight is made; dense tensors are then assigned as views of their
bytes, and the routed-experts module of every MoE layer is replaced by ours. transformers changes quickly: versions
outside the tested range are refused rather than tried.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagestone.formats.errors import DataError, RequestError
from pagestone.formats.strict_json import brief
from pagestone.formats.text import clipped
from pagestone.reader.container import Container
from pagestone.reader.dense import DenseTensors, decoded, dense_entries, dense_scales, dense_tensor, load_dense
from pagestone.reader.errors import Closing
from pagestone.reader.store import ExpertStore

if TYPE_CHECKING:
    import torch

    from pagestone.reader.experts import Context

TESTED = "5.24"
"""The transformers releases this module was tested with: 5.24.*"""
INSTALL = "pip install 'pagestone[inference]' (for torch's CPU build see the selector on PyTorch's site)"
PACKED = "pagestone_packed"
"""Our attention function's name in transformers' registries."""
NATIVE, REFERENCE = EXPERTS = ("native", "reference")
"""How experts are multiplied: from their codes, or decoded first (`reader/experts.py`)."""
AUTO = "auto"
TORCH_IS_FASTER = frozenset({"bf16"})
"""Codecs whose native product loses to torch's in the whole token (BENCHMARKS.md): there the default is reference."""


def require() -> None:
    """Raise `RequestError` unless torch and a tested transformers can be used. Nothing is imported."""
    for package in ("torch", "transformers"):
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise RequestError(
                f"{package} is needed to run a model and is not installed", code="E1220", remedy=INSTALL
            ) from None
    if found.split(".")[:2] != TESTED.split("."):
        raise RequestError(
            f"transformers {TESTED}.* expected, found {found}: other versions were not tested",
            code="E1221",
            remedy=f"pip install 'transformers=={TESTED}.*'",
        )


def quiet() -> None:
    """Keep transformers from asking the network and from writing progress bars and advice to stderr."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import utils

    logging: Any = utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()


# -- attention --------------------------------------------------------------------------------------------------------


def _packed_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: Any = None, **kwargs: Any
) -> Any:
    """transformers' sdpa, but for one new token the queries of a key/value head are attended to together.

    Query [batch, heads, tokens, dim], key and value [batch, key heads, length, dim]. torch's grouped-query path without
    a mask is slow on a CPU (51 ms at 4096 tokens against 1.3).
    """
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    batch, heads, tokens, dim = query.shape
    shared = key.shape[1]
    plain = tokens == 1 and heads != shared and not kwargs.get("dropout") and kwargs.get("position_bias") is None
    if not plain or (attention_mask is not None and attention_mask.shape[1] != 1):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    packed = query.reshape(batch, shared, heads // shared, dim)
    out = torch.nn.functional.scaled_dot_product_attention(packed, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(batch, 1, heads, value.shape[-1]), None


def register_attention() -> None:
    """Make our attention known to transformers under `PACKED`; harmless when repeated."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    AttentionInterface.register(PACKED, _packed_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED, sdpa_mask)


# -- the model --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Cast:
    """A dense tensor that does not run in the type it is stored in, because transformers would cast it too."""

    name: str
    stored: str
    used: str


@dataclass(slots=True)
class HostModel:
    """A model ready to run. `forward` is all that is needed; `context` holds the store of its experts."""

    model: Any = field(repr=False)
    context: Context
    text_config: Any
    dtype: torch.dtype
    attention: str
    casts: list[Cast] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    """Dense tensors of the container that this model does not use (vision tower, MTP block)."""
    notes: list[str] = field(default_factory=list)

    @property
    def vocabulary(self) -> int:
        """Number of logits."""
        return int(self.text_config.vocab_size)

    @property
    def layers(self) -> int:
        """Number of decoder layers, dense ones included."""
        return int(self.text_config.num_hidden_layers)

    @property
    def positions(self) -> int | None:
        """How many tokens the model was made for (`max_position_embeddings`), None if its config does not say."""
        found = getattr(self.text_config, "max_position_embeddings", None)
        return found if isinstance(found, int) else None

    def forward(self, ids: Sequence[int], state: Any = None, *, every: bool = False) -> tuple[torch.Tensor, Any]:
        """(logits, state) after feeding token ids to one sequence.

        `state` is what an earlier call returned, None to begin. Logits are [1, vocabulary] of the last token, or
        [len(ids), vocabulary] with `every`, in the model's dtype.
        """
        import torch

        with torch.no_grad():
            found = self.model(
                input_ids=torch.tensor([list(ids)]), cache=state, use_cache=True, logits_to_keep=0 if every else 1
            )
        return found.logits[0], found.cache

    def close(self) -> None:
        """Let the store's threads and memory go."""
        self.context.store.close()


def load(
    container: Container,
    store: ExpertStore,
    *,
    attention: str = PACKED,
    dense: DenseTensors | None = None,
    verify: bool = True,
    experts: str = NATIVE,
) -> HostModel:
    """The container's model with its experts coming from `store`.

    Dense tensors are mapped if the store maps, else read; `dense` gives them instead. `attention` is our packed
    function or any name transformers knows; `experts` is one of `EXPERTS`. Raises `RequestError` for containers that
    cannot run (E122x).
    """
    require()
    check_runnable(container)
    check_experts(experts)
    from pagestone.reader.experts import Context, require_native

    quiet()
    register_attention()
    model, text_config, dtype, attention = _empty_model(container.path, attention)
    if experts == NATIVE:
        require_native(dtype)
    context = Context(store, experts)
    replaced = _replace_experts(model, container, context)
    wanted = {name for name in model.state_dict() if not name.startswith(replaced)}
    entries = dense.entries if dense is not None else {n: e for n, (_, e) in dense_entries(container).items()}
    names = _names(model, entries)
    used = {theirs: ours for theirs, ours in names.items() if ours in wanted}
    scales = dense_scales(used, entries, container.path)
    if dense is None:
        mode = "mmap" if store.mode == "mmap" else "direct"
        dense = load_dense(container, {*used, *scales.values()}, mode, verify=verify)
    host = HostModel(model, context, text_config, dtype, attention)
    host.ignored = sorted(names.keys() - used.keys() - set(scales.values()))
    tied = _tied(model)
    missing = wanted - set(used.values())
    state = {}
    targets = _targets(model, dtype)
    for theirs, ours in sorted(used.items()):
        entry, target = dense.entries[theirs], targets[ours]
        coded = theirs in scales
        tensor = decoded(dense, theirs, scales[theirs]) if coded else dense_tensor(dense.arrays[theirs], entry)
        if coded or tensor.dtype != target:
            host.casts.append(Cast(ours, entry.dtype, str(target).removeprefix("torch.")))
        state[ours] = tensor.to(target)
    lost = sorted(missing - {n for pair in tied.items() if not missing.issuperset(pair) for n in pair})
    if lost:
        raise DataError(
            f"{len(lost)} dense tensors expected by {type(model).__name__} are missing, the first {lost[0]}",
            code="E1224",
            file=container.path,
            remedy="convert the checkpoint again: it, or its container, is incomplete",
        )
    _assign(model, state, container.path)
    model.tie_weights(missing_keys=set(missing), recompute_mapping=False)
    _rebuild_buffers(model, dtype)
    model.eval()
    if dense.mode == "buffered":
        host.notes.append("the file system refuses O_DIRECT: dense tensors were read through the page cache")
    return host


def experts_for(codec: str, asked: str) -> str:
    """One of `EXPERTS`: `asked` (E1244 if it is none), or for "auto" the faster one in the whole token."""
    if asked == AUTO:
        return REFERENCE if codec in TORCH_IS_FASTER else NATIVE
    check_experts(asked)
    return asked


def check_experts(word: str) -> None:
    """Refuse (E1244) what is none of `EXPERTS`."""
    if word not in EXPERTS:
        raise RequestError(
            f"--experts expected to be one of {', '.join(EXPERTS)}, found {word!r}",
            code="E1244",
            remedy="choose one, or auto (on the command line) for the faster of the two",
        )


def check_runnable(container: Container) -> None:
    """Refuse, by name, what no model can be made of: partial containers, layers of unequal expert counts."""
    if container.manifest.partial is not None:
        first, end = container.manifest.partial
        raise RequestError(
            f"a complete container expected, found one of layers {first} to {end - 1}",
            code="E1222",
            file=container.path,
            remedy="convert again without --layers",
        )
    counts = {n: layer.entry.experts for n, layer in container.layers.items()}
    if len(set(counts.values())) > 1:
        first = next(iter(counts))
        other = next(n for n, c in counts.items() if c != counts[first])
        raise RequestError(
            f"layers of equally many experts expected, found {counts[first]} in layer {first} and {counts[other]} "
            f"in layer {other}",
            code="E1223",
            file=container.path,
            remedy="transformers has one number of experts for all layers; this container can be read, not run",
        )


@contextmanager
def _understood(root: Path, complaint: str) -> Iterator[None]:
    """Whatever transformers raises over a config as E1225 with its file: its classes check little, in many ways."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise RequestError(
            f"{complaint}: {reason(error)}",
            code="E1225",
            file=root / "config.json",
            remedy=f"only models that transformers {TESTED} knows can be run",
        ) from None


def reason(error: BaseException) -> str:
    """What an error of a library says, on one line, with its kind where the text alone says nothing."""
    text = " ".join(str(error).split())
    named = f"{type(error).__name__}: {text}" if isinstance(error, KeyError) or not text else text
    return clipped(named, 400)


def vocabulary_of(root: Path) -> int:
    """How many tokens the model of a config.json knows; no model is made. `RequestError` (E1225)."""
    from transformers import AutoConfig

    with _understood(root, "transformers does not understand this config"):
        config: Any = AutoConfig.from_pretrained(root, local_files_only=True, trust_remote_code=False)
        return int(config.get_text_config().vocab_size)


def _empty_model(root: Path, attention: str) -> tuple[Any, Any, Any, str]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with _understood(root, "transformers does not understand this config"):
        config = AutoConfig.from_pretrained(root, local_files_only=True, trust_remote_code=False)
        text = config.get_text_config()
        for part in (config, text):
            if hasattr(part, "quantization_config"):
                del part.quantization_config  # it tells others what our codecs do; the experts are ours here
        dtype = getattr(text, "dtype", None) or getattr(config, "dtype", None) or torch.float32
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype: a type of torch expected, found {brief(dtype)}")
    with _understood(root, "no language model of transformers fits this config"), torch.device("meta"):
        made = auto.from_config(config, dtype=dtype, attn_implementation="eager", experts_implementation="eager")
    if attention == PACKED and not made._supports_sdpa:
        attention = "eager"  # gpt_oss: attention sinks
    made.set_attn_implementation(attention)
    return made, made.config, dtype, attention


def _replace_experts(model: Any, container: Container, context: Context) -> tuple[str, ...]:
    """Put our module where the model has its own; the prefixes of the parameters that went."""
    from pagestone.reader.experts_guard import ours_for

    found = _experts_modules(model, container)
    for number, name in found.items():
        theirs = model.get_submodule(name)
        layer = container.layers[number]
        ours = ours_for(theirs, name, container.path)
        shape = layer.file.shape
        stated = (theirs.num_experts, shape.hidden, 2 * shape.intermediate)
        dims = theirs.gate_up_proj.shape
        wanted = (dims[0], dims[1], dims[2]) if theirs.is_transposed else (dims[0], dims[2], dims[1])
        if stated != wanted or len(layer) != dims[0]:
            raise RequestError(
                f"layer {number}: {wanted[0]} experts of hidden {wanted[1]} and intermediate {wanted[2] // 2} expected "
                f"from config.json, found {len(layer)} of {shape.hidden} and {shape.intermediate}",
                code="E1223",
                file=layer.path,
                remedy="the container can be read, not run: its layers are not the ones config.json describes",
            )
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, ours(theirs, number, context))
    return tuple(f"{name}." for name in found.values())


def _experts_modules(model: Any, container: Container) -> dict[int, str]:
    """Names of the model's routed experts by layer; refused unless they are one a layer, in the container's layers."""
    places = [
        name for name, module in model.named_modules() if getattr(getattr(module, "gate_up_proj", None), "ndim", 0) == 3
    ]
    numbers = [next((int(part) for part in name.split(".") if part.isdecimal()), None) for name in places]
    if sorted(numbers, key=str) != sorted(container.layers, key=str):
        raise RequestError(
            f"routed experts expected in layers {numbers} of {type(model).__name__}, "
            f"found them in layers {sorted(container.layers)}",
            code="E1225",
            file=container.path,
            remedy="this container can be read, not run: it and its config.json do not belong together",
        )
    return {number: name for number, name in zip(numbers, places, strict=True) if number is not None}


def _names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """The model's name of every tensor of a checkpoint, by transformers' own renaming rules."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    rules = [r for r in get_model_conversion_mapping(model) if isinstance(r, WeightRenaming)]
    meta = dict.fromkeys(model.state_dict(), True)
    return {
        name: rename_source_key(name, rules, [], base_model_prefix=model.base_model_prefix, meta_state_dict=meta)[0]
        for name in names
    }


def _tied(model: Any) -> dict[str, str]:
    return dict(model.all_tied_weights_keys)


def _targets(model: Any, dtype: Any) -> dict[str, torch.dtype]:
    """The type each tensor runs in, by the model's name for it, as `from_pretrained` decides.

    That is float32 where the model's plan says so, else the type its class made it with: `dtype` for most, float32 for
    what the class asked that for (a router, a correction bias), an integer for what counts.
    """
    import torch

    parts = [part.replace("*", ".*") for part in sorted(model._get_dtype_plan(dtype))]
    plan = re.compile("|".join(parts)) if parts else None
    return {
        name: torch.float32 if plan is not None and plan.search(name) else made.dtype
        for name, made in model.state_dict().items()
    }


def _assign(model: Any, state: dict[str, torch.Tensor], root: Path) -> None:
    for name, tensor in state.items():
        have = model.get_parameter_or_buffer(name)
        if have.shape != tensor.shape:
            raise DataError(
                f"{list(have.shape)} expected by {type(model).__name__}, found {list(tensor.shape)}",
                code="E1208",
                file=root,
                tensor=name,
                remedy="the dense tensors do not belong to config.json: convert the checkpoint again",
            )
    for tensor in state.values():
        tensor.requires_grad_(False)
    model.requires_grad_(False)
    model.load_state_dict(state, assign=True, strict=False)


def _rebuild_buffers(model: Any, dtype: torch.dtype) -> None:
    """Make what is computed rather than stored (rotary frequencies): every module with such a buffer is built again.

    It is built as transformers does, with `dtype` as the default. A module that also holds what is stored would lose it
    and is refused (E1225).
    """
    import torch

    for name, module in list(model.named_modules()):
        own = [key for key, buffer in module.named_buffers(recurse=False) if buffer.device.type == "meta"]
        if not own:
            continue
        parent, _, leaf = name.rpartition(".")
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            if module.state_dict():
                raise TypeError(f"{next(iter(module.state_dict()))} beside it is stored")
            fresh = type(module)(module.config)
        except Exception as error:  # whatever a class of theirs does with arguments it does not expect
            raise RequestError(
                f"{name}: the buffer {own[0]} of {type(module).__name__} cannot be made: {error}",
                code="E1225",
                remedy="this container can be read, not run",
            ) from None
        finally:
            torch.set_default_dtype(default)
        setattr(model.get_submodule(parent), leaf, fresh)
    left = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.device.type == "meta"]
    if left:
        raise DataError(
            f"{len(left)} tensors of {type(model).__name__} have no value, the first {left[0]}",
            code="E1224",
            remedy="convert the checkpoint again: it, or its container, is incomplete",
        )


# -- the model of a checkpoint -----------------------------------------------------------------------------------------


def plain_model(root: Path, *, attention: str = PACKED) -> HostModel:
    """The unmodified model of a checkpoint with transformers' eager experts: what a container is compared with.

    transformers maps or copies the weights as it does for anyone; nothing of ours is inside but, unless another name is
    given, the attention function.
    """
    require()
    import torch
    from transformers import AutoModelForCausalLM

    from pagestone.reader.experts import Context

    quiet()
    register_attention()
    auto: Any = AutoModelForCausalLM
    try:
        model = auto.from_pretrained(
            root,
            dtype="auto",
            local_files_only=True,
            trust_remote_code=False,
            experts_implementation="eager",
            attn_implementation="eager",
        )
    except MemoryError:
        raise
    except Exception as error:
        raise RequestError(
            f"transformers cannot load this checkpoint: {reason(error)}",
            code="E1251",
            file=root,
            remedy="give the checkpoint the container was made from, whole",
        ) from None
    if attention == PACKED and not model._supports_sdpa:
        attention = "eager"
    model.set_attn_implementation(attention)
    model.eval()
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    assert isinstance(dtype, torch.dtype)
    return HostModel(model, Context(_NoStore(), REFERENCE), model.config.get_text_config(), dtype, attention)


class _NoStore(Closing):
    """The store of a model whose experts are its own."""

    mode = "transformers"
    open_leases = 0

    def __init__(self) -> None:
        self.counters: dict[int, Any] = {}

    def step(self, layer: int, wanted: Iterable[int]) -> Any:
        raise AssertionError("this model has its own experts")
