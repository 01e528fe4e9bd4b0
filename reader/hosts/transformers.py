"""transformers as the host of a container.

The model is built on the meta device, so that no weight is made; dense tensors are then assigned as views of their
bytes, and the routed-experts module of every MoE layer is replaced by ours. What transformers does not promise to keep
is asked of `transformers_inside`; releases outside the tested range are refused rather than tried.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagestone.formats.errors import DataError, PagestoneError, RequestError
from pagestone.formats.strict_json import brief
from pagestone.reader import transformers_inside as inside
from pagestone.reader.attention import OWN, PACKED, register_attention
from pagestone.reader.configs import require_family, understood, vocabulary_of
from pagestone.reader.container import Container, Layer
from pagestone.reader.dense import (
    BY_ROWS,
    DenseTensors,
    bytes_of_tensor,
    decoded,
    dense_entries,
    dense_tensor,
    encoded_matrices,
    load_dense,
)
from pagestone.reader.dense_costs import DenseUse
from pagestone.reader.dense_modules import Places, find_places, put_modules, stored_type
from pagestone.reader.errors import Closing
from pagestone.reader.files import ANEW
from pagestone.reader.footprint import RECURRENT_LAYERS, Footprint
from pagestone.reader.footprint import footprint as by_config
from pagestone.reader.libraries import quiet, reason, require
from pagestone.reader.model import (
    BOTH,
    CPU,
    GRID,
    KEYS_AND_VALUES,
    NATIVE,
    PIECE,
    RECURRENT,
    REFERENCE,
    Context,
    Loading,
    check_runnable,
)
from pagestone.reader.pieces import masks_of_pieces, work_in_pieces
from pagestone.reader.rows import RowTable
from pagestone.reader.store import ExpertStore

if TYPE_CHECKING:
    import torch

LIBRARIES = ("torch", "transformers")


def _set_attention(model: Any, asked: str) -> str:
    """Give a model the attention function asked for; the name of the one it has then.

    A model that may not have ours keeps its own, which is transformers' "eager" and is called so.
    """
    own = asked == PACKED and not inside.supports_sdpa(model)
    model.set_attn_implementation(OWN if own else asked)
    return "eager" if own else asked


def _in_pieces(model: Any, attention: str | None, piece: int | None) -> tuple[int | None, str | None]:
    """Have a model work on prompts in pieces; the piece, or None, and then why not, if it was asked for.

    Masks are made in pieces for the attention that this host chooses, by whatever name a model has it.
    """
    if piece is None:
        return None, None
    chosen = attention is None or inside.attention_of(model) in (PACKED, OWN)
    problem = work_in_pieces(model, piece) if chosen else f"the attention {attention} was asked for"
    return (piece, None) if problem is None else (None, problem)


# -- the model --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Cast:
    """A dense tensor that does not run in the type it is stored in, because transformers would cast it too."""

    name: str
    stored: str
    used: str


@dataclass(slots=True)
class TransformersModel:
    """A `Model` of transformers; `model` is its module, `context` holds the store of its experts."""

    model: Any = field(repr=False)
    context: Context
    text_config: Any
    dtype: torch.dtype
    attention: str
    casts: list[Cast] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    """Dense tensors of the container that this model does not use (vision tower, MTP block)."""
    notes: list[str] = field(default_factory=list)
    tables: list[RowTable] = field(default_factory=list, repr=False)
    """Tables that are read by rows."""
    encoded: bool = False
    """Whether dense matrices are in an encoding."""
    piece: int | None = None
    """Tokens of a prompt that a layer works on at once, None for all of them (`reader/pieces.py`)."""

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
        positions = getattr(self.text_config, "max_position_embeddings", None)
        return positions if isinstance(positions, int) else None

    @property
    def state_kind(self) -> str:
        """By the config's `layer_types`; without them every layer keeps keys and values."""
        kinds = set(getattr(self.text_config, "layer_types", None) or ["full_attention"])
        recurrent = kinds & set(RECURRENT_LAYERS)
        return KEYS_AND_VALUES if not recurrent else RECURRENT if recurrent == kinds else BOTH

    def forward(self, ids: Sequence[int], state: Any = None, *, every: bool = False) -> tuple[torch.Tensor, Any]:
        """See `Model.forward`; logits are in the model's dtype."""
        import torch

        kind: Any = type(self.model)
        word = inside.state_word(kind)
        if state is None and self.context.tokens is not None:
            state = inside.fixed_state(self.model, self.context.tokens)
        with torch.no_grad(), masks_of_pieces(self.piece):
            outputs = self.model(
                input_ids=torch.tensor([list(ids)], device=self.context.device),
                use_cache=True,
                logits_to_keep=0 if every else _last(len(ids), self.context.device),
                **{word: state},
            )
        return outputs.logits[0], getattr(outputs, word)

    def surroundings(self) -> Mapping[str, Mapping[str, Any]]:
        """See `Model.surroundings`."""
        import torch
        import transformers

        build = hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:16]
        return {
            "versions": {
                "torch": torch.__version__, "transformers": transformers.__version__, "torch_build": build
            },
            "threads": {"torch": torch.get_num_threads(), "torch_interop": torch.get_num_interop_threads()},
            "model": {
                "host": HOST.name, "class": type(self.model).__name__,
                "dtype": str(self.dtype).removeprefix("torch."), "attention": self.attention,
                "prefill_piece": self.piece,
            } | ({"linears": self.context.linears} if self.encoded else {}),
        }  # fmt: skip

    def close(self) -> None:
        """Let the store's threads and memory go, and the files of tables."""
        self.context.store.close()
        for table in self.tables:
            table.close()


def _last(tokens: int, device: Any) -> torch.Tensor:
    """The place of the last of `tokens`, for transformers to take its logits alone.

    A place, not how many: the library would cut out a view, over which torch's product takes seconds for a head of
    248,320 rows, and a copy of all its weights. The bits are the same.
    """
    import torch

    return torch.tensor([tokens - 1], device=device)


class _Transformers:
    """See `Host`."""

    name = "transformers"

    def require(self) -> None:
        require(*LIBRARIES)

    def vocabulary_of(self, root: Path) -> int:
        return vocabulary_of(root)

    def footprint(self, container: Container, how: Loading, longest: int) -> Footprint:
        from pagestone.reader import experts  # noqa: F401 - what loading imports is there to be measured
        from pagestone.reader.rehearsal import rehearse

        quiet()
        register_attention()
        model = _empty_model(container, PACKED if how.attention is None else how.attention)[0].eval()
        piece, _ = _in_pieces(model, how.attention, how.prefill_piece)
        kind: Any = type(model)
        word = inside.state_word(kind)

        def forward(ids: Any, state: Any) -> Any:
            last = _last(ids.shape[1], ids.device)
            with masks_of_pieces(piece):
                return getattr(model(input_ids=ids, use_cache=True, logits_to_keep=last, **{word: state}), word)

        try:
            found = rehearse(model, forward, longest, None if piece is None else piece + GRID - 1)
        except (MemoryError, PagestoneError):
            raise
        except Exception:  # code of theirs that asks for values, where there are none
            found = by_config(container.path, piece, longest)
        return replace(found, dense=dense_use(container))

    def load(
        self, container: Container, store: ExpertStore, how: Loading, dense: DenseTensors | None = None
    ) -> TransformersModel:
        attention = PACKED if how.attention is None else how.attention
        return load(
            container, store, attention=attention, dense=dense, verify=how.verify, experts=how.experts,
            device=how.device, tokens=how.context, linears=how.linears, piece=how.prefill_piece,
        )  # fmt: skip


HOST = _Transformers()


def load(
    container: Container,
    store: ExpertStore,
    *,
    attention: str = PACKED,
    dense: DenseTensors | None = None,
    verify: bool = True,
    experts: str = NATIVE,
    device: str = CPU,
    tokens: int | None = None,
    linears: str | None = None,
    piece: int | None = PIECE,
) -> TransformersModel:
    """The container's model with its experts coming from `store`.

    Dense tensors are mapped if the store maps, else read; `dense` gives them instead. `attention` is our packed
    function or any name transformers knows; for `experts`, `device`, `tokens` (its context), `linears` and `piece` see
    `Loading`. Raises `RequestError` for containers that cannot run (E122x, E1256).
    """
    HOST.require()
    check_runnable(container)
    Loading(experts, device, linears=linears, prefill_piece=piece)
    from pagestone.reader.multiply import require_native

    quiet()
    register_attention()
    model, text_config, dtype, attention = _empty_model(container, attention)
    if experts == NATIVE:
        require_native(dtype)
    context = Context(store, experts, device, linears)
    context.tokens = tokens
    replaced = _replace_experts(model, container, context)
    host = TransformersModel(model, context, text_config, dtype, attention)
    expected = {name for name in model.state_dict() if not name.startswith(replaced)}
    places, dense = _dense(host, container, expected, dense, verify)
    host.tables, host.encoded = [*dense.tables.values()], bool(dense.matrices)
    try:
        _fill(host, container, expected, places, dense)
        _rebuild_buffers(model, dtype, device)
    except BaseException:
        for table in host.tables:
            table.close()
        raise
    model.eval()
    host.piece, problem = _in_pieces(model, attention, piece)
    if problem is not None:
        host.notes.append(f"every layer works on a whole prompt at once, which takes memory: {problem}")
    if dense.mode == "buffered":
        host.notes.append("the file system refuses O_DIRECT: dense tensors were read through the page cache")
    host.notes += [f"{c.name}: stored as {c.stored}, runs as {c.used}, as in transformers" for c in host.casts]
    return host


def dense_use(container: Container) -> DenseUse:
    """What the container's model does with its dense tensors; an empty model is made to know it."""
    quiet()
    model, _, dtype, _ = _empty_model(container, "eager")
    replaced = tuple(f"{name}." for name in _experts_modules(model, container).values())
    expected = {name for name in model.state_dict() if not name.startswith(replaced)}
    entries = {name: entry for name, (_, entry) in dense_entries(container).items()}
    places = find_places(model, expected, entries, encoded_matrices(container), container.path)
    return places.use(entries, _targets(model, dtype))


def _dense(
    host: TransformersModel, container: Container, expected: set[str], dense: DenseTensors | None, verify: bool
) -> tuple[Places, DenseTensors]:
    """Where the dense tensors go, and they themselves: those given, or what the model uses of the container's."""
    model, mode = host.model, host.context.store.mode
    if dense is not None:
        return find_places(model, expected, dense.entries, dense.matrices, container.path), dense
    entries = {name: entry for name, (_, entry) in dense_entries(container).items()}
    places = find_places(model, expected, entries, encoded_matrices(container), container.path)
    use = places.use(entries, _targets(model, host.dtype))
    return places, load_dense(
        container, use.names, mode if mode in ("mmap", ANEW) else "direct", verify=verify, matrices=use.matrices,
        tables=use.tables if mode in BY_ROWS else (), passing=use.made,
    )  # fmt: skip


def _fill(
    host: TransformersModel, container: Container, expected: set[str], places: Places, dense: DenseTensors
) -> None:
    """Give an empty model its dense tensors, in the types they run in, and modules of ours where it needs them.

    What is cast, and what the model has no use for, is noted in `host`.
    """
    model, root = host.model, container.path
    host.ignored = places.ignored
    state, targets = {}, _targets(model, host.dtype)
    for theirs, ours in sorted(places.tensors.items()):
        entry, target, coded = dense.entries[theirs], targets[ours], theirs in places.codes
        if coded or stored_type(entry) != target:
            host.casts.append(Cast(ours, entry.dtype, str(target).removeprefix("torch.")))
        if theirs == places.table and theirs in dense.tables:
            continue
        tensor = decoded(dense, places.codes[theirs]) if coded else dense_tensor(bytes_of_tensor(dense, theirs), entry)
        state[ours] = tensor.to(host.context.device, target)
    put_modules(model, places, dense, host.context, targets, root)
    missing = (expected & model.state_dict().keys()) - state.keys()
    _check_whole(model, missing, root)
    _assign(model, state, root)
    inside.tie(model, missing)


def _check_whole(model: Any, missing: set[str], root: Path) -> None:
    """Refuse (E1224) a container without tensors that nothing else stands for."""
    stood_for = {n for pair in inside.tied(model).items() if not missing.issuperset(pair) for n in pair}
    lost = sorted(missing - stood_for)
    if lost:
        raise DataError(
            f"{len(lost)} dense tensors expected by {type(model).__name__} are missing, the first {lost[0]}",
            code="E1224",
            file=root,
            remedy="convert the checkpoint again: it, or its container, is incomplete",
        )


def _empty_model(container: Container, attention: str) -> tuple[Any, Any, Any, str]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    root = container.path
    require_family(root)
    with understood(root, "transformers does not understand this config"):
        config = AutoConfig.from_pretrained(root, local_files_only=True, trust_remote_code=False)
        text = config.get_text_config()
        for part in (config, text):
            if hasattr(part, "quantization_config"):
                del part.quantization_config  # it tells others what our codecs do; the experts are ours here
        dtype = getattr(text, "dtype", None) or getattr(config, "dtype", None) or dtype_of_weights(container)
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype: a type of torch expected, found {brief(dtype)}")
    with understood(root, "no language model of transformers fits this config"), torch.device("meta"):
        made = auto.from_config(config, dtype=dtype, attn_implementation="eager", experts_implementation="eager")
    return made, made.config, dtype, _set_attention(made, attention)


FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
"""Types a whole model may run in, by their names in files: not the shorter floats, which are codes."""


def dtype_of_weights(container: Container) -> str:
    """The type a model runs in whose config names none: that of the first float, files and names in order.

    So `from_pretrained(dtype="auto")` decides. float32 if there is no float among the dense tensors.
    """
    entries = sorted((file, name, entry.dtype) for name, (file, entry) in dense_entries(container).items())
    return next((FLOATS[dtype] for _, _, dtype in entries if dtype in FLOATS), "float32")


def _replace_experts(model: Any, container: Container, context: Context) -> tuple[str, ...]:
    """Put our module where the model has its own; the prefixes of the parameters that went."""
    from pagestone.reader.experts_guard import ours_for

    modules = _experts_modules(model, container)
    for number, name in modules.items():
        theirs = model.get_submodule(name)
        layer = container.layers[number]
        ours = ours_for(theirs, name, container.path)
        _check_shape(theirs, layer, number)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, ours(theirs, number, context))
    return tuple(f"{name}." for name in modules.values())


def _check_shape(theirs: Any, layer: Layer, number: int) -> None:
    """Refuse (E1223) a layer that is not the one config.json describes."""
    shape, dims = layer.header.shape, theirs.gate_up_proj.shape
    count, rows, columns = (dims[0], dims[2], dims[1]) if inside.is_transposed(theirs) else dims
    stored = (len(layer), 2 * shape.intermediate, shape.hidden)
    if stored != (count, rows, columns) or theirs.num_experts != count:
        raise RequestError(
            f"layer {number}: {count} experts of hidden {columns} and intermediate {rows // 2} expected "
            f"from config.json, found {len(layer)} of {shape.hidden} and {shape.intermediate}",
            code="E1223",
            file=layer.path,
            remedy="the container can be read, not run: its layers are not the ones config.json describes",
        )


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


def _targets(model: Any, dtype: Any) -> dict[str, torch.dtype]:
    """The type each tensor runs in, by the model's name for it, as `from_pretrained` decides.

    That is float32 where the model's plan says so, else the type its class made it with: `dtype` for most, float32 for
    what the class asked that for (a router, a correction bias), an integer for what counts.
    """
    import torch

    parts = [part.replace("*", ".*") for part in inside.float32_patterns(model, dtype)]
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


def _rebuild_buffers(model: Any, dtype: torch.dtype, device: str = CPU) -> None:
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
            with torch.device(device):
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


def plain_model(root: Path, *, attention: str = PACKED) -> TransformersModel:
    """The unmodified model of a checkpoint with transformers' eager experts: what a container is compared with.

    transformers maps or copies the weights as it does for anyone; nothing of ours is inside but, unless another name is
    given, the attention function.
    """
    HOST.require()
    import torch
    from transformers import AutoModelForCausalLM

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
    attention = _set_attention(model, attention)
    model.eval()
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    assert isinstance(dtype, torch.dtype)
    text = model.config.get_text_config()
    return TransformersModel(model, Context(_NoStore(), REFERENCE), text, dtype, attention)


class _NoStore(Closing):
    """The store of a model whose experts are its own."""

    mode = "transformers"
    open_leases = 0

    def __init__(self) -> None:
        self.counters: dict[int, Any] = {}

    def step(self, layer: int, experts: Iterable[int]) -> Any:
        raise AssertionError("this model has its own experts")
