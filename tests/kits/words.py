"""Small tokenizers of every kind, and directories of them that a test may damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kits.inference import TINY
from pagestone.reader.text import Tokenizer

SIDES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
THINK = ("<think>", "</think>")
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")


def wrapped(backend: Any, **how: Any) -> Tokenizer:
    """A tokenizer of ours around one of the tokenizers library."""
    from transformers import PreTrainedTokenizerFast

    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **how), Path("nowhere"))


def byte_level(added: Sequence[str] = (), special: bool = True) -> Tokenizer:
    """tiny-moe's, with more added tokens."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(TINY / "tokenizer.json"))
    backend.add_tokens([AddedToken(word, special=special, normalized=False) for word in added])
    return wrapped(backend)


def _fallback_vocabulary() -> dict[str, int]:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁▁", "▁a", "b", "▁the", "c", "▁cat", "é", ".", "▁.", "'", "s"]
    return {word: i for i, word in enumerate(words)}


def byte_fallback(decoder: str = "fuse") -> Tokenizer:
    """As Mixtral's and Phi-3.5's: characters outside the vocabulary are one token a byte."""
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE(_fallback_vocabulary(), [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fused = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    meta = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()]
    backend.decoder = decoders.Sequence(fused if decoder == "fuse" else meta)
    backend.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in ("<s>", "</s>")])
    return wrapped(backend)


def unigram() -> Tokenizer:
    """As sentencepiece's unigram models with byte fallback."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    pieces = [(word, -1.0 - i / 100) for word, i in _fallback_vocabulary().items()]
    backend = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
    backend.add_special_tokens(["<s>", "</s>"])
    return wrapped(backend)


def word_piece(joins: bool = False) -> Tokenizer:
    """As BERT's; `joins`: transformers cleans spaces up behind it, which changes text that came before."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    words = [
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "a",
        "do",
        "##b",
        "##c",
        "n",
        "t",
        ",",
        "'",
        "##s",
        ".",
        "s",
        "é",
        "漢",
        "!",
        "m",
    ]
    backend = Backend(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=not joins)
    backend.add_special_tokens(["[CLS]", "[SEP]"])
    return wrapped(backend, clean_up_tokenization_spaces=joins)


def replacing() -> Tokenizer:
    """With a decoder whose replacements reach over tokens: nothing about it may be assumed."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.BPE({word: i for i, word in enumerate(["a", "b", "ab", "c"])}, []))
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("bca", "bcX")])
    return wrapped(backend)


def directory(to: Path, change: dict[str, bytes | str | None] | None = None, template: str | None = None) -> Path:
    """The text files of tiny-moe in a new directory; `change` replaces files, or removes them (None)."""
    to.mkdir(parents=True)
    for name in SIDES:
        shutil.copyfile(TINY / name, to / name)
    if template is not None:
        (to / "chat_template.jinja").write_text(template)
    for name, content in (change or {}).items():
        if content is None:
            (to / name).unlink()
        else:
            (to / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return to


def edited(name: str, **fields: Any) -> str:
    """One of tiny-moe's JSON files with other fields."""
    return json.dumps(json.loads((TINY / name).read_bytes()) | fields)
