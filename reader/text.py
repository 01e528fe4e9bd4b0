"""A model's words: its tokenizer, its chat template, and what its configs say about text.

Everything here comes from files that others wrote: whatever is wrong with one is an error that names it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pagestone.formats.errors import DataError, PagestoneError, RequestError
from pagestone.formats.strict_json import WITHOUT_MARK, brief, loads
from pagestone.reader.configs import GENERATION, is_int, read_config, read_table, vocabulary_of, wrong_field
from pagestone.reader.files import RESTORE
from pagestone.reader.inputs import file as read_text
from pagestone.reader.inputs import option
from pagestone.reader.libraries import quiet, reason, require

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "tekken.json")
SIDE_TABLES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
               "chat_template.json", "config.json")  # fmt: skip
"""What transformers reads as JSON objects when it makes a tokenizer."""
FIELD_TABLES = ("tokenizer_config.json", "special_tokens_map.json")
FEWEST = 0.5
"""A tokenizer with a smaller share of the model's vocabulary than this is another model's, or incomplete."""
GIVE = "give --tokenizer DIR, a directory that holds the model's tokenizer"

Message = dict[str, str]


def end_tokens(root: Path, tokenizer: Tokenizer | None = None) -> frozenset[int]:
    """Every id that ends an answer: `eos_token_id` of generation_config.json, config.json, its text_config and the
    tokenizer; ints or lists. Raises `DataError` (E1227, E1235)."""
    config, part = read_config(root)
    ends: set[int] = set()
    for name, table in ((GENERATION, read_table(root / GENERATION)), ("config.json", config), ("config.json", part)):
        ids = table.get("eos_token_id")
        for i in ids if isinstance(ids, list) else [] if ids is None else [ids]:
            if not is_int(i):
                raise wrong_field(root / name, "eos_token_id", "a token id or a list of them", ids)
            ends.add(i)
    if tokenizer is not None and is_int(tokenizer.tokens.eos_token_id):
        ends.add(tokenizer.tokens.eos_token_id)
    return frozenset(ends)


# -- the tokenizer ----------------------------------------------------------------------------------------------------


class Tokenizer:
    """A tokenizer of transformers (`tokens`), its chat template, and the directory both came from.

    `variables` are given to the template besides the messages.
    """

    def __init__(self, tokens: Any, place: Path, variables: Mapping[str, Any] | None = None) -> None:
        self.tokens, self.place = tokens, place
        self._variables = template_variables(tokens, variables or {})

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with what the tokenizer puts around one. Never fails but on a broken tokenizer."""
        return [int(i) for i in self._guarded(lambda: self.tokens(text)["input_ids"])]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids, all at once."""
        return str(self.tokens.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation by the chat template, ready for the assistant's answer.

        Raises `RequestError`: E1231 without a template, E1234 if it fails, whatever the reason.
        """
        if not getattr(self.tokens, "chat_template", None):
            raise RequestError(
                "a chat template expected among the tokenizer's files, found none",
                code="E1231",
                file=self.place,
                remedy="use `pagestone run --raw`, or give --tokenizer DIR with a chat_template.jinja",
            )
        try:
            text = self.tokens.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False, **self._variables
            )
        except (MemoryError, KeyboardInterrupt):
            raise
        except Exception as error:  # a template is a program: it can raise anything
            roles = ", ".join(m["role"] for m in messages[-4:])
            raise RequestError(
                f"the chat template fails on messages of {roles}: {reason(error)}",
                code="E1234",
                file=self._template_file(),
                remedy="leave out what it does not take (a system message?), use `pagestone run --raw`, or give "
                "--tokenizer DIR with a template that works",
            ) from None
        return [
            int(i)
            for i in self._guarded(
                lambda: self.tokens(option("a message", text), add_special_tokens=False)["input_ids"]
            )
        ]

    def _template_file(self) -> Path:
        named = (self.place / n for n in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"))
        return next((path for path in named if path.is_file()), self.place)

    def _guarded(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except (MemoryError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the tokenizers library is no Exception
            raise _unusable(self.place, error) from None


def template_variables(tokens: Any, variables: Mapping[str, Any]) -> dict[str, Any]:
    """`variables`, unless one has the name of something that is the template's already (E1236)."""
    ours = {*inspect.signature(tokens.apply_chat_template).parameters, "messages"}
    for name in variables:
        if name in ours:
            raise RequestError(
                f"--template-var {name}: a variable of the template's own expected, this name is taken",
                code="E1236",
                remedy="see the chat template for the variables it reads",
            )
    return dict(variables)


def parse_variables(given: Sequence[str]) -> dict[str, Any]:
    """Template variables from KEY=VALUE: a value that is JSON is what it says, another is a string. E1236."""
    variables: dict[str, Any] = {}
    for pair in given:
        name, sign, value = option("--template-var", pair).partition("=")
        if not sign or not name.isidentifier() or name in variables:
            raise RequestError(
                f"--template-var KEY=VALUE expected, each key once, found {pair[:60]!r}",
                code="E1236",
                remedy="for example --template-var enable_thinking=false",
            )
        try:
            variables[name] = loads(value)
        except ValueError:
            variables[name] = value
    return variables


def open_tokenizer(root: Path, given: Path | None = None, variables: Mapping[str, Any] | None = None) -> Tokenizer:
    """The tokenizer among the side files of the model in `root`, or the one in the directory `given`.

    Raises `RequestError`: E1230 if there is none or it cannot be loaded, E1233 if it is not this model's;
    `DataError` E1237 if the file that is damaged can be told.
    """
    require("transformers")
    quiet()
    from transformers import AutoTokenizer

    place = given or root
    if not any((place / name).is_file() for name in TOKENIZER_FILES):
        raise RequestError(
            "a tokenizer among the files expected (tokenizer.json or its like), found none",
            code="E1230",
            file=place,
            remedy=GIVE,
        )
    _check_fields(place)
    try:
        tokens = AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    except (MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # see `Tokenizer._guarded`
        raise _unusable(place, error) from None
    if not getattr(tokens, "chat_template", None):
        # transformers gives the template in this file to processors, not to tokenizers: it is the model's all the same
        named = read_table(place / "chat_template.json").get("chat_template")
        tokens.chat_template = {str(t["name"]): str(t["template"]) for t in named} if isinstance(named, list) else named
    made = Tokenizer(tokens, place, variables)
    _check_belongs(made, root)
    return made


def _check_belongs(tokenizer: Tokenizer, root: Path) -> None:
    """Refuse (E1233) an empty tokenizer, which transformers makes when files are missing, and another model's."""
    size: Any = read_config(root)[1].get("vocab_size")
    have = len(tokenizer.tokens)
    if is_int(size) and have < FEWEST * size:
        complaint = f"{size} tokens expected, the vocabulary in config.json, found {have}"
    elif not tokenizer.decode(tokenizer.encode("word")).strip():
        complaint = "a tokenizer that knows words expected, found one that makes nothing of text"
    else:
        return
    file = tokenizer.place / "tokenizer.json"
    lacks = "" if file.is_file() else f"; there is no {file.name}"
    raise RequestError(complaint + lacks, code="E1233", file=file if not lacks else tokenizer.place, remedy=GIVE)


def check_ids(ids: Sequence[int], vocabulary: int, place: Path) -> None:
    """Refuse (E1233) token ids that the model does not have, and none at all (E1243)."""
    if not ids:
        raise RequestError("a prompt of at least one token expected, found none", code="E1243", remedy="say something")
    if max(ids) >= vocabulary:
        raise RequestError(
            f"token ids below {vocabulary} expected, found {max(ids)}: the tokenizer is not this model's",
            code="E1233",
            file=place,
            remedy=GIVE,
        )


# -- what is wrong with a tokenizer -----------------------------------------------------------------------------------


def _unusable(place: Path, error: BaseException) -> DataError | RequestError:
    """The error to raise for a tokenizer that failed: about the damaged file, if it can be told which."""
    for path in (*(place / name for name in SIDE_TABLES), *sorted(place.glob("**/*.jinja"))):
        complaint = _complaint(path)
        if complaint is not None:
            return _damaged(path, complaint)
    try:
        if (place / "config.json").is_file():
            vocabulary_of(place)  # which class of tokenizer it is stands there
    except RequestError as config:
        return config
    why = reason(error)
    plain = why.lower().replace("_", " ")
    tables = (place / name for name in FIELD_TABLES)
    speaks_of = (path for path in tables if any(f.replace("_", " ") in plain for f in read_table(path)))
    return RequestError(
        f"transformers cannot load this tokenizer: {why}", code="E1230", file=next(speaks_of, place), remedy=GIVE
    )


def tokenizer_problems(place: Path) -> Iterator[PagestoneError]:
    """What is wrong with each file of the tokenizer in `place`, as far as it can be seen from it alone; no model's
    libraries are needed, but with them more is seen."""
    for path in (*(place / name for name in SIDE_TABLES if name != "config.json"), *sorted(place.glob("**/*.jinja"))):
        try:
            complaint = _complaint(path)
        except PagestoneError as error:
            yield error
            continue
        if complaint is not None:
            yield _damaged(path, complaint)


def _damaged(path: Path, complaint: str) -> DataError:
    return DataError(complaint, code="E1237", file=path, remedy=f"{RESTORE}, or {GIVE}")


def _check_fields(place: Path) -> None:
    """Refuse (E1237) fields of the small tables that transformers would take as they are, and forget what they mean."""
    for name in FIELD_TABLES:
        complaint = _complaint(place / name)
        if complaint is not None:
            raise _damaged(place / name, complaint)


def _complaint(path: Path) -> str | None:
    """What is wrong with one of a tokenizer's files, as far as can be seen from it alone."""
    if not path.is_file():
        return None
    try:
        if path.suffix == ".jinja":
            read_text(path)
            return None
        table = read_table(path)
    except PagestoneError as error:
        if error.remedy == WITHOUT_MARK:
            raise
        return error.message
    if path.name == "tokenizer.json":
        return _tokenizer_complaint(path) if "added_tokens" in table else "added_tokens: tokens expected, found none"
    for name, (expected, fits) in FIELDS.items():
        value = table.get(name)
        if value is not None and not fits(value):
            return f"{name}: {expected} expected, found {brief(value)}"
    return None


def _tokenizer_complaint(path: Path) -> str | None:
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError:  # nobody can run the model here, either
        return None
    try:
        Backend.from_file(str(path)).encode("word")
    except (MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return f"a tokenizer expected: {reason(error)}"
    return None


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _are_tokens(value: Any) -> bool:
    tokens = value.values() if isinstance(value, dict) else value
    return isinstance(value, dict | list) and all(map(_is_token, tokens))


def _are_numbered(value: Any) -> bool:
    return isinstance(value, dict) and all(
        i.isdecimal() and isinstance(token, dict) and _is_token(token) for i, token in value.items()
    )


def _is_template(value: Any) -> bool:
    named = isinstance(value, list) and all(isinstance(t, dict) and {"name", "template"} <= t.keys() for t in value)
    return named or isinstance(value, str)


FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        (f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")), ("a token", _is_token)
    ),
    "additional_special_tokens": ("tokens", _are_tokens),
    "extra_special_tokens": ("tokens", _are_tokens),
    "added_tokens_decoder": ("tokens by id", _are_numbered),
    "chat_template": ("a template, or a list of named ones", _is_template),
    "model_max_length": ("a number", lambda v: isinstance(v, int | float)),
    **dict.fromkeys(("tokenizer_class", "model_type", "backend"), ("a name", lambda v: isinstance(v, str))),
    "text_config": ("an object", lambda v: isinstance(v, dict)),
}
"""(in words, test) of fields of a tokenizer's tables and of config.json; any may be absent or null."""
