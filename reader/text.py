"""A model's words: its tokenizer, its chat template, and what its configs say about text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagestone.formats.errors import DataError, RequestError
from pagestone.reader import host

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "tekken.json")


def end_tokens(root: Path) -> frozenset[int]:
    """The union of `eos_token_id` in generation_config.json, config.json and its text_config; ints or lists."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = root / name
        if not path.is_file():
            continue
        try:
            table = json.loads(path.read_bytes())
        except ValueError as error:
            raise DataError(
                f"a JSON object expected: {error}", code="E1227", file=path, remedy="restore the file"
            ) from None
        for place in (table, table.get("text_config") or {}):
            ids = place.get("eos_token_id")
            found |= set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(found)


def open_tokenizer(root: Path, given: Path | None = None) -> Any:
    """The tokenizer among the container's side files, or the one in the directory `given`."""
    host.require()
    host.quiet()
    from transformers import AutoTokenizer

    place = given or root
    if not any((place / name).is_file() for name in TOKENIZER_FILES):
        raise RequestError(
            "a tokenizer among the files expected (tokenizer.json or its like), found none",
            code="E1230",
            file=place,
            remedy="give --tokenizer DIR, a directory that holds the model's tokenizer",
        )
    try:
        return AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise RequestError(
            f"transformers cannot load this tokenizer: {str(error).splitlines()[0]}",
            code="E1230",
            file=place,
            remedy="give --tokenizer DIR, a directory that holds the model's tokenizer",
        ) from None


def chat_ids(tokens: Any, messages: Sequence[dict[str, str]], root: Path) -> list[int]:
    """Token ids of a conversation by the chat template, ready for the assistant's answer."""
    if not getattr(tokens, "chat_template", None):
        raise RequestError(
            "a chat template expected among the tokenizer's files, found none",
            code="E1231",
            file=root,
            remedy="use `pagestone run --raw`, or give --tokenizer DIR with a chat_template.jinja",
        )
    found = tokens.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True, return_dict=True)
    return [int(i) for i in found["input_ids"]]
