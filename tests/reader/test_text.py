"""Tokenizer, template and generation config: used as their publishers mean them, and refused by name when damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from kits import words
from kits.inference import TINY
from kits.words import directory, edited

from pagestone.formats.errors import DataError, PagestoneError, RequestError
from pagestone.reader.hosts import transformers as host
from pagestone.reader.libraries import quiet
from pagestone.reader.sampling import choose_sampling
from pagestone.reader.text import check_ids, end_tokens, open_tokenizer, parse_variables

USER = {"role": "user", "content": "What is the capital of France?"}


@pytest.fixture(scope="session", autouse=True)
def libraries(oracle: Callable[[str], ModuleType]) -> None:
    """Skip (or fail) the whole file without torch and transformers."""
    oracle("torch")
    oracle("transformers")


def prepared(root: Path, *, system: bool = False) -> list[int]:
    """Everything `run` and `chat` do with side files before the model is loaded."""
    choose_sampling(root)
    tokenizer = open_tokenizer(root)
    ids = tokenizer.chat([*([{"role": "system", "content": "Be brief."}] if system else []), USER])
    check_ids(ids, 1024, tokenizer.place)
    assert end_tokens(root, tokenizer)
    return ids


# -- damage -----------------------------------------------------------------------------------------------------------

TOKENIZER = json.loads((TINY / "tokenizer.json").read_bytes())
MODEL = TOKENIZER["model"]
FEW = {word: i for word, i in MODEL["vocab"].items() if i < 256}
BROKEN: dict[str, tuple[str, bytes | str | None, str]] = {
    # tokenizer.json
    "tokenizer: empty": ("tokenizer.json", "", "E1237"),
    "tokenizer: cut": ("tokenizer.json", (TINY / "tokenizer.json").read_bytes()[:5000], "E1237"),
    "tokenizer: zeros": ("tokenizer.json", bytes(4096), "E1237"),
    "tokenizer: not UTF-8": ("tokenizer.json", b'{"a": "\xff"}', "E1237"),
    "tokenizer: a list": ("tokenizer.json", "[1]", "E1237"),
    "tokenizer: an empty object": ("tokenizer.json", "{}", "E1237"),
    "tokenizer: nested": ("tokenizer.json", '{"a":' * 9000 + "1" + "}" * 9000, "E1237"),
    "tokenizer: another version": ("tokenizer.json", edited("tokenizer.json", version="9.0"), "E1237"),
    "tokenizer: no model": ("tokenizer.json", edited("tokenizer.json", model=None), "E1237"),
    "tokenizer: an unknown model": ("tokenizer.json", edited("tokenizer.json", model={"type": "Magic"}), "E1237"),
    "tokenizer: a vocabulary of texts": (
        "tokenizer.json", edited("tokenizer.json", model=MODEL | {"vocab": {"a": "b"}}), "E1237",
    ),
    "tokenizer: merges of unknown tokens": (
        "tokenizer.json", edited("tokenizer.json", model=MODEL | {"merges": [["qqq", "zzz"]]}), "E1237",
    ),
    "tokenizer: hardly any vocabulary": (
        "tokenizer.json",
        edited("tokenizer.json", model=MODEL | {"merges": [], "vocab": FEW}),
        "E1233",
    ),
    "tokenizer: an unknown decoder": ("tokenizer.json", edited("tokenizer.json", decoder={"type": "Magic"}), "E1237"),
    "tokenizer: added tokens of no text": (
        "tokenizer.json", edited("tokenizer.json", added_tokens=[{"id": "x", "content": 5}]), "E1237",
    ),
    "tokenizer: no added tokens": (
        "tokenizer.json", json.dumps({k: v for k, v in TOKENIZER.items() if k != "added_tokens"}), "E1237",
    ),
    "tokenizer: away": ("tokenizer.json", None, "E1233|E1230"),  # the latter before transformers 5.18
    # tokenizer_config.json
    "tokenizer_config: cut": ("tokenizer_config.json", '{"eos_token": ', "E1237"),
    "tokenizer_config: a list": ("tokenizer_config.json", "[1]", "E1237"),
    "tokenizer_config: a token that is a number": (
        "tokenizer_config.json", edited("tokenizer_config.json", eos_token=5), "E1237",
    ),
    "tokenizer_config: a token of no content": (
        "tokenizer_config.json", edited("tokenizer_config.json", eos_token={"__type": "AddedToken"}), "E1237",
    ),
    "tokenizer_config: a token of no kind": (
        "tokenizer_config.json", edited("tokenizer_config.json", pad_token={"content": "x"}), "E1230",
    ),
    "tokenizer_config: a third side": (
        "tokenizer_config.json", edited("tokenizer_config.json", padding_side="x"), "E1230",
    ),
    "tokenizer_config: added tokens of another form": (
        "tokenizer_config.json", edited("tokenizer_config.json", added_tokens_decoder={"x": 5}), "E1237",
    ),
    "tokenizer_config: a class that is a number": (
        "tokenizer_config.json", edited("tokenizer_config.json", tokenizer_class=5), "E1237",
    ),
    # chat template
    "template: syntax": ("chat_template.jinja", "{% for m in messages %}", "E1234"),
    "template: an unknown filter": ("chat_template.jinja", "{{ messages | magic }}", "E1234"),
    "template: an unknown test": ("chat_template.jinja", "{{ messages is magic }}", "E1234"),
    "template: a refusal": ("chat_template.jinja", "{{ raise_exception('roles must alternate') }}", "E1234"),
    "template: undefined": ("chat_template.jinja", "{{ a.b.c }}", "E1234"),
    "template: a sum of text and number": ("chat_template.jinja", "{{ messages[0]['content'] + 1 }}", "E1234"),
    "template: a division by zero": ("chat_template.jinja", "{{ 1 / 0 }}", "E1234"),
    "template: endless": ("chat_template.jinja", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "E1234"),
    "template: what a sandbox forbids": ("chat_template.jinja", "{{ messages.__class__.__mro__ }}", "E1234"),
    "template: not UTF-8": ("chat_template.jinja", b"\xff\xfe\x00", "E1237"),
    "template: nothing": ("chat_template.jinja", "{# #}", "E1243"),
    # generation_config.json
    "generation: a list": ("generation_config.json", "[1]", "E1227"),
    "generation: cut": ("generation_config.json", "{", "E1227"),
    "generation: not UTF-8": ("generation_config.json", b"\xff", "E1227"),
    "generation: nested": ("generation_config.json", "[" * 5000, "E1227"),
    "generation: nested ends": ("generation_config.json", '{"eos_token_id": [[1023]]}', "E1235"),
    "generation: an end that is text": ("generation_config.json", '{"eos_token_id": "1023"}', "E1235"),
    "generation: an end of a fraction": ("generation_config.json", '{"eos_token_id": [1023.0]}', "E1235"),
    "generation: an end that is true": ("generation_config.json", '{"eos_token_id": true}', "E1235"),
    "generation: a warm temperature": ("generation_config.json", '{"temperature": "warm"}', "E1235"),
    "generation: a temperature of NaN": ("generation_config.json", '{"temperature": NaN}', "E1235"),
    "generation: a temperature below 0": ("generation_config.json", '{"temperature": -1}', "E1235"),
    "generation: all of top-p": ("generation_config.json", '{"top_p": [0.9]}', "E1235"),
    "generation: top-k of a half": ("generation_config.json", '{"top_k": 0.5}', "E1235"),
    "generation: a penalty of 0": ("generation_config.json", '{"repetition_penalty": 0}', "E1235"),
    "generation: perhaps": ("generation_config.json", '{"do_sample": "perhaps"}', "E1235"),
    # config.json
    "config: cut": ("config.json", "{", "E1237"),
    "config: a list": ("config.json", "[]", "E1237"),
    "config: a text config that is a list": ("config.json", edited("config.json", text_config=[]), "E1237"),
    "config: a field of another kind": ("config.json", edited("config.json", vision_config="x"), "E1225"),
    "config: nested ends": ("config.json", edited("config.json", eos_token_id={"a": 1}), "E1235"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json", "generation_config.json", "config.json"])
def test_a_mark_before_a_table(tmp_path: Path, name: str) -> None:
    """An editor's doing, which is undone in it: nothing is to be restored."""
    root = directory(tmp_path / "m")
    (root / name).write_bytes(b"\xef\xbb\xbf" + (root / name).read_bytes())
    with pytest.raises(DataError) as caught:
        open_tokenizer(root)
        choose_sampling(root)
    assert caught.value.file == str(root / name)
    assert caught.value.remedy == "save it as UTF-8 without a byte order mark"


@pytest.mark.parametrize("kind", BROKEN)
def test_damage_names_its_file(tmp_path: Path, kind: str) -> None:
    """Whatever a side file holds: one error with the file's name, a code and a remedy, never another exception."""
    name, content, codes = BROKEN[kind]
    root = directory(tmp_path / "m", {name: content})
    with pytest.raises(PagestoneError) as caught:
        prepared(root)
    error = caught.value
    assert error.code in codes.split("|") and error.remedy, error
    assert error.exit_code in (1, 2) and len(str(error)) < 1000
    absent = content is None and error.code == "E1230"  # then it names the file that asks for it
    assert error.code == "E1243" or name in str(error) or absent, error


def test_a_sound_directory_has_no_complaint(tmp_path: Path) -> None:
    """The same steps on what nobody damaged, also under a template variable it does not know."""
    root = directory(tmp_path / "m")
    assert prepared(root) == prepared(root, system=False) and len(prepared(root)) > 8
    assert len(prepared(root, system=True)) > len(prepared(root))


# -- templates --------------------------------------------------------------------------------------------------------


def test_named_templates(tmp_path: Path) -> None:
    """A list of templates: its default is used, and without one the error says so."""
    for names, works in ((["default", "tool_use"], True), (["tool_use", "rag"], False)):
        templates = [{"name": n, "template": "{{ messages[0].content }}"} for n in names]
        change = {
            "tokenizer_config.json": edited("tokenizer_config.json", chat_template=templates),
            "chat_template.jinja": None,
        }
        tokenizer = open_tokenizer(directory(tmp_path / names[0], change))
        if works:
            assert tokenizer.decode(tokenizer.chat([USER])) == USER["content"]
            continue
        with pytest.raises(RequestError, match=r"tokenizer_config.json: .*E1234"):
            tokenizer.chat([USER])


def test_the_template_is_given_variables(tmp_path: Path) -> None:
    """`--template-var`: JSON where it parses, else text; names that are taken are refused."""
    found = parse_variables(["enable_thinking=false", "n=3", "who=me", "empty=", "list=[1]", "eq=a=b", "bad={"])
    assert found == {
        "enable_thinking": False, "n": 3, "who": "me", "empty": "", "list": [1], "eq": "a=b", "bad": "{",
    }  # fmt: skip
    for wrong in (["x"], ["=1"], ["a b=1"], ["1a=1"], ["a=1", "a=2"], ["\udcff=1"], ["a=\udcff"]):
        with pytest.raises(RequestError, match=r"E1236|E1238"):
            parse_variables(wrong)
    template = "{{ 'no thought' if enable_thinking is false else 'thought' }} {{ who }}"
    root = directory(tmp_path / "m", template=template)
    tokenizer = open_tokenizer(root, variables=found)
    assert tokenizer.decode(tokenizer.chat([USER])) == "no thought me"
    tokenizer = open_tokenizer(root, variables={"who": "you"})
    assert tokenizer.decode(tokenizer.chat([USER])) == "thought you"
    for taken in ("tokenize", "messages", "add_generation_prompt", "conversation", "return_dict"):
        with pytest.raises(RequestError, match=f"--template-var {taken}.*E1236"):
            open_tokenizer(root, variables={taken: False})


def test_a_template_that_takes_no_system_message(tmp_path: Path) -> None:
    """The error names the roles that were tried, and the template's own words."""
    template = "x{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    root = directory(tmp_path / "m", template=template)
    prepared(root)
    with pytest.raises(RequestError, match=r"chat_template.jinja: .*system, user: no system role \(E1234\)"):
        prepared(root, system=True)


# -- what belongs together --------------------------------------------------------------------------------------------


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    """Far fewer tokens than the config's vocabulary, or ids beyond it; some fewer are padding, and usual."""
    text = json.loads((TINY / "config.json").read_bytes())["text_config"]
    for size, refused in ((2049, True), (2048, False), (1100, False)):
        config = edited("config.json", text_config=text | {"vocab_size": size})
        root = directory(tmp_path / str(size), {"config.json": config})
        if refused:
            with pytest.raises(RequestError, match=f"{size} tokens expected.*found 1024.*E1233"):
                open_tokenizer(root)
        else:
            open_tokenizer(root)
    with pytest.raises(RequestError, match=r"below 1000 expected, found 1000: .*E1233"):
        check_ids([5, 1000], 1000, tmp_path)
    check_ids([5, 999], 1000, tmp_path)
    with pytest.raises(RequestError, match="E1243"):
        check_ids([], 1000, tmp_path)


def test_without_its_vocabulary_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """transformers makes an empty one of tokenizer_config.json alone, also where the config does not state a size."""
    text = json.loads((TINY / "config.json").read_bytes())["text_config"]
    config = edited("config.json", text_config={k: v for k, v in text.items() if k != "vocab_size"})
    for name, change in (("a", {}), ("b", {"config.json": config})):
        root = directory(tmp_path / name, {"tokenizer.json": None, **change})
        with pytest.raises(PagestoneError, match=r"there is no tokenizer.json.*E1233|E1230"):
            open_tokenizer(root)


BAD_END = edited("config.json", eos_token_id="x")


def test_ends_are_the_union_of_all_that_say_so(tmp_path: Path) -> None:
    """generation_config.json, config.json, its text_config, and the tokenizer's own."""
    text = json.loads((TINY / "config.json").read_bytes())["text_config"]
    root = directory(tmp_path / "m", {
        "generation_config.json": '{"eos_token_id": [3, 4]}',
        "config.json": edited("config.json", eos_token_id=5, text_config=text | {"eos_token_id": [6]}),
        "tokenizer_config.json": edited("tokenizer_config.json", eos_token="<|endoftext|>"),
    })  # fmt: skip
    tokenizer = open_tokenizer(root)
    assert tokenizer.tokens.eos_token_id == 1021
    assert end_tokens(root, tokenizer) == {3, 4, 5, 6, 1021} and end_tokens(root) == {3, 4, 5, 6}
    for table, name in (('{"eos_token_id": [1, [2]]}', "generation_config.json"), (None, "config.json")):
        change: dict[str, Any] = {
            "config.json": edited("config.json", eos_token_id="x"),
            "generation_config.json": table,
        }
        with pytest.raises(DataError, match=rf"{name}: eos_token_id: .*E1235"):
            end_tokens(directory(tmp_path / f"of-{name}", change))


def test_added_tokens_count(tmp_path: Path) -> None:
    """The vocabulary is all tokens, added ones too."""
    assert len(words.byte_level(["<a>", "<b>"]).tokens) == 1026


# -- configs that transformers chokes on ------------------------------------------------------------------------------

TEXT = json.loads((TINY / "config.json").read_bytes())["text_config"]
CONFIGS: dict[str, str] = {
    "a list": "[]", "cut": '{"model_type": ', "empty": "", "of no kind": edited("config.json", model_type="magic"),
    "of a number": edited("config.json", model_type=5), "text that is a list": edited("config.json", text_config=[]),
    "a torch type that is none": edited("config.json", text_config=TEXT | {"dtype": "magic"}),
    "another attribute of torch": edited("config.json", text_config=TEXT | {"dtype": "nn"}),
    **{
        f"{field} {value!r}": edited("config.json", text_config=TEXT | {field: value})
        for field, value in (
            ("hidden_act", "magic"), ("rope_parameters", 5), ("rope_parameters", {"rope_type": "magic"}),
            ("num_attention_heads", "4"), ("num_attention_heads", 0), ("layer_types", ["magic"] * 4),
            ("layer_types", ["full_attention"]), ("hidden_size", -1), ("hidden_size", 10**30), ("rms_norm_eps", "x"),
            ("vocab_size", None), ("num_experts", "16"), ("max_position_embeddings", [4096]),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_that_no_model_can_be_made_of(tmp_path: Path, kind: str) -> None:
    """Whatever transformers raises: E1225 with the file's name, its reason on one line."""
    quiet()
    host.register_attention()
    (tmp_path / "config.json").write_text(CONFIGS[kind])
    with pytest.raises(RequestError, match=r"config.json: .*E1225") as error:
        host._empty_model(SimpleNamespace(path=tmp_path), host.PACKED)
    message = str(error.value).splitlines()
    assert len(message) == 2 and len(message[0]) < 800 and not message[0].split("(E1225)")[0].rstrip().endswith(":")


def test_a_checkpoint_that_transformers_cannot_load(tmp_path: Path) -> None:
    """`compare` and its kin: E1251 with the directory's name."""
    root = directory(tmp_path / "m")
    with pytest.raises(RequestError, match=rf"{root}: transformers cannot load this checkpoint: .*E1251"):
        host.plain_model(root)
