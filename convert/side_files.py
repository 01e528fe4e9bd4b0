"""Side files: what of a checkpoint's directory goes over beside its weights, and by which rule the rest stays.

The rule lists what a side file may be: text of a known kind, and tokenizer models. A link counts as the file it leads
to only if that lies in the checkpoint, or in the blobs of the hub cache whose snapshot the checkpoint is.
"""

from __future__ import annotations

import codecs
import os
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

from pagestone.convert.errors import machine_errors
from pagestone.formats.manifest import NAME_BYTES, TEMPLATE_SUFFIX, TEMPLATES
from pagestone.formats.storage import Place
from pagestone.formats.strict_json import loads

SIDE_FILE_LIMIT = 64 << 20
"""Bytes: a larger side file is listed, not copied."""
CODE = "code (copied only with --include-code)"
"""The rule by which a *.py file is no side file."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".pkl")
"""Files of other weight formats (or weights outside the index): never side files."""
UNFINISHED = (
    ".aria2", ".part", ".partial", ".incomplete", ".crdownload", ".download", ".opdownload", ".filepart", ".tmp",
    ".temp", ".st", ".!ut", ".bc!", ".dtapart", ".fdmdownload",
)  # fmt: skip
"""What downloaders add to a name while the file, or their notes on it, are unfinished."""
TEXTS = (
    ".json", ".jsonl", ".jinja", ".jinja2", ".j2", ".txt", ".md", ".rst", ".yaml", ".yml", ".toml", ".tiktoken",
    ".vocab", ".bpe", ".merges",
)  # fmt: skip
"""Kinds of text that are carried, by the end of the name in lower case."""
TOKENIZER_MODEL = re.compile(r".*\.(model(\.v\d+)?|spm)")
"""A SentencePiece model (protobuf), or a table of tokens under such a name."""
NAMED_TEXT = re.compile(
    r"(licen[cs]e|notice|copying|copyright|readme|authors|contributors|changelog|model_card|use_policy|usage_policy"
    r"|third_party_notices)([-_. ].*)?"
)
"""Texts without a suffix of the list above, by name in lower case."""
STALE_NAME = re.compile(r".*(quant|gptq|awq|exl[23]).*\.(json|ya?ml)|(.*[-_.])?recipe\.ya?ml|compression_config\.json")
STALE_KEYS = frozenset(
    ("quantization", "quantization_config", "quant_config", "quant_method", "quant_algo", "quantize_config",
     "compression_config")
)  # fmt: skip
"""Names of files, and fields of a JSON file, that say how the source was quantised."""
NEVER_STALE = re.compile(
    r"(tokenizer|generation|special_tokens|added_tokens|vocab|chat_template|(\w+_)?(pre)?processor).*\.json"
)
"""What loaders read for other things: carried whatever fields they have."""
STALE = "it says how the source was quantised; config.json says what holds for the container"
UNLISTED = "weights outside the index"
OUTSIDE = "a link that leaves the checkpoint"
POINTER = b"version https://git-lfs.github.com/spec/"
HEAD = 8192
"""Bytes looked at to tell text from other things."""
JSON_LIMIT = 1 << 20
"""Bytes: a JSON file that says how something was quantised is small."""


@dataclass(frozen=True, slots=True)
class SideFile:
    """A file that is no weight: `rule` is None if it is to be copied, else why it is not.

    `name` is that of an entry of the checkpoint's directory, or TEMPLATES, a slash and that of a template.
    """

    name: str
    nbytes: int
    rule: str | None


def is_plain(name: str) -> bool:
    """Whether a file's name can stand in a manifest and on a terminal: UTF-8, no control or formatting characters, and
    no longer than file systems take."""
    plain = name.isprintable() and name not in ("", ".", "..") and "/" not in name
    return plain and len(name.encode()) <= NAME_BYTES


def is_document(name: str) -> bool:
    """Whether a side file is for people alone, so that no loader's result hangs on it."""
    return name.lower().endswith((".md", ".rst")) or NAMED_TEXT.fullmatch(name.lower()) is not None


def folded(name: str) -> str:
    """What two names share that some file systems take for one: case, and composed or decomposed letters."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


def list_side_files(root: Place, taken: set[str], warnings: list[str]) -> Iterator[SideFile]:
    """Every entry of the directory that is not in `taken`, with the rule by which it is copied or stays.

    `warnings` is told of what the user may miss.
    """
    yield from _in_folder(root, "", taken, warnings)


def _in_folder(root: Place, prefix: str, taken: set[str], warnings: list[str]) -> Iterator[SideFile]:
    for path in (root / prefix.rstrip("/") if prefix else root).entries():
        name = prefix + path.name
        if name in taken:
            continue
        if not prefix and path.name == TEMPLATES and path.is_dir():
            yield from _in_folder(root, f"{path.name}/", taken, warnings)
            continue
        if not is_plain(path.name):
            name = ascii(os.fsencode(name).decode("utf-8", "backslashreplace"))
            warnings.append(f"{name}: its name is not UTF-8, or has characters that do not print; not copied")
            yield SideFile(name, 0, "a name that does not print")
            continue
        rule, warning = _rule(path)
        if prefix and rule in (None, CODE) and not path.name.endswith(TEMPLATE_SUFFIX):
            rule = "no chat template, in the folder of chat templates"
        if warning:
            warnings.append(f"{name}: {warning}")
        yield SideFile(name, path.size() if path.is_file() else 0, rule)


def _rule(path: Place) -> tuple[str | None, str | None]:
    """(why a file is not copied, or None; what the user should be told, or None)."""
    name = path.name.lower()
    if path.is_dir():
        return "a subfolder", None
    if not path.is_file():
        return "no regular file, or a link that points nowhere", "neither a file nor a link to one; not copied"
    if name.endswith(".safetensors"):
        told = "not in the index; its tensors are not copied (--merge-unlisted takes them)"
        return UNLISTED, told
    if name.endswith(WEIGHT_SUFFIXES) or ".index." in name:
        return "weights in another format", None
    if name.endswith(UNFINISHED):
        return (
            "an unfinished download",
            "an unfinished download; not copied, and the file it belongs to may not be whole",
        )
    if name.startswith("."):
        return "a hidden file", None
    if not path.holds():
        return OUTSIDE, f"{OUTSIDE}; not copied: put a copy in its place if the model needs it"
    return _rule_of_contents(path, name)


def _rule_of_contents(path: Place, name: str) -> tuple[str | None, str | None]:
    nbytes = path.size()
    if nbytes > SIDE_FILE_LIMIT:
        return f"larger than {SIDE_FILE_LIMIT >> 20} MiB", None
    with machine_errors(path, "reading the source"):
        head = path.read(0, JSON_LIMIT if nbytes <= JSON_LIMIT else HEAD)
        tail = path.read(max(0, nbytes - HEAD), HEAD)
    if head.startswith(POINTER):
        return "a git-LFS pointer, not the file", "a git-LFS pointer: the file itself was not downloaded; not copied"
    text = b"\0" not in head + tail and not head.startswith(b"\x80")  # a pickle begins with 0x80
    model = TOKENIZER_MODEL.fullmatch(name) is not None
    if not (name.endswith((*TEXTS, ".py")) or model or NAMED_TEXT.fullmatch(name)):
        return "of no kind that is carried (text, tokenizer models)", None
    if not text and not (model and head.startswith(b"\n")):  # field 1 of a protobuf: the pieces
        return "named like text, and holds something else", "no text, as its name says; not copied"
    if name.endswith(".py"):
        return CODE, None
    if not NEVER_STALE.fullmatch(name) and (STALE_NAME.fullmatch(name) or _states_quantisation(head)):
        return STALE, None
    return None, None


def _states_quantisation(raw: bytes) -> bool:
    """Whether these bytes are a JSON object that says how weights are quantised."""
    raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        table = loads(raw, twice=True, constants=True) if raw.lstrip()[:1] == b"{" else None
    except ValueError:
        return False
    return isinstance(table, dict) and not STALE_KEYS.isdisjoint(table)
