"""A tokenizer of any size, made without training: byte-level BPE whose merges are letters, pairs of them, and so on.

It costs what a published one of the same size costs to load and to keep, every text comes back from its tokens, and
English falls into pieces of up to four letters.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Iterator

LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
SPACE = "Ġ"
"""How byte-level BPE writes a space."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPARE = 276
"""Rows of the published table behind its words: special tokens, and rows of no token."""
VOCABULARY, MERGES = "the vocabulary", "the merges"
"""What stands for them until they are written."""
SMALLEST = 320
"""Rows of the smallest table that gets a tokenizer: the bytes, and some."""
TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)


def words(vocabulary: int) -> int:
    """How many tokens of a table are bytes and merges; the special ones follow."""
    return max(256, vocabulary - SPARE)


def special(vocabulary: int, name: str) -> int:
    """The id of a special token; within the table also where that is too small for a tokenizer."""
    return min(words(vocabulary) + SPECIAL.index(name), vocabulary - 1)


def byte_letters() -> list[str]:
    """The character that stands for each byte: itself if it is printable, one from 256 on otherwise."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(256)
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def merges() -> Iterator[tuple[str, str]]:
    """Pairs that become a token, in their order; each half is one already. About 490,000."""
    yield from ((SPACE, a) for a in LETTERS)
    pairs = [a + b for a, b in itertools.product(LETTERS, repeat=2)]
    yield from ((a[0], a[1]) for a in pairs)
    yield from ((SPACE + a[0], a[1]) for a in pairs)
    for start in ("", SPACE):
        yield from ((start + a, b) for a, b in itertools.product(pairs, LETTERS))
    yield from itertools.product(pairs, pairs)


def tokenizer(vocabulary: int) -> bytes:
    """tokenizer.json for a table of so many rows, written as it is published: 16 MB of lines for the largest.

    Line by line: as a tree of Python's objects it would be ten times that, in the process that is measured.
    """
    size = words(vocabulary)
    if size - 256 > sum(1 for _ in merges()):
        raise ValueError(f"no tokenizer of {vocabulary} tokens")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    table = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": size + n, "content": name} | flags for n, name in enumerate(SPECIAL)],
        "normalizer": {"type": "NFC"}, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": VOCABULARY, "merges": MERGES,
        },
    }  # fmt: skip
    head, rest = json.dumps(table, indent=2).split(json.dumps(VOCABULARY))
    between, tail = rest.split(json.dumps(MERGES))
    joined = (a + b for a, b in itertools.islice(merges(), size - 256))
    tokens = enumerate(itertools.chain(byte_letters(), joined))
    pairs = ([quoted(a), quoted(b)] for a, b in itertools.islice(merges(), size - 256))
    out = io.BytesIO()
    out.write(f"{head}{{".encode())
    _lines(out, (f"\n      {quoted(token)}: {number}" for number, token in tokens))
    out.write(f"\n    }}{between}[".encode())
    _lines(out, (f"\n      [\n        {a},\n        {b}\n      ]" for a, b in pairs))
    out.write(f"\n    ]{tail}\n".encode())
    return out.getvalue()


def quoted(text: str) -> str:
    """As JSON."""
    return json.dumps(text, ensure_ascii=False)


def _lines(out: io.BytesIO, lines: Iterator[str]) -> None:
    """Write them with commas between."""
    out.writelines(f"{',' if number else ''}{line}".encode() for number, line in enumerate(lines))


def files(vocabulary: int) -> dict[str, Callable[[], bytes]]:
    """The side files of a tokenizer, each made when it is called for."""
    settings = {
        "tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "model_max_length": 262144,
    }  # fmt: skip
    return {
        "tokenizer.json": lambda: tokenizer(vocabulary),
        "tokenizer_config.json": lambda: f"{json.dumps(settings)}\n".encode(),
        "chat_template.jinja": TEMPLATE.encode,
    }
