"""Numbers of config.json: each is an integer within its bounds, or the plan is refused naming file and field."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from kits.checkpoints import T_ORDER
from kits.conversions import planned

from pagestone.convert import families
from pagestone.convert.checkpoint import CONFIG, INDEX, open_checkpoint
from pagestone.convert.family import depth_of, first_k_dense_layers, sparse_step_dense_layers
from pagestone.formats import encodings
from pagestone.formats.errors import DataError
from pagestone.formats.strict_json import MAX_LAYERS

MODEL = T_ORDER.having(family="qwen3_moe", fused=False)
WRONG = {"text": "2", "float": 2.0, "list": [2], "truth": True, "object": {"n": 2}, "negative": -1, "huge": 10**80}


def source(root: Path, config: str) -> Path:
    path = MODEL.write(root / "s")
    (path / CONFIG).write_text(config, encoding="utf-8")
    return path


def refusal(root: Path) -> DataError:
    begin = time.process_time()
    with pytest.raises(DataError) as caught:
        planned(root, encodings.get("int8"))
    assert time.process_time() - begin < 2 and len(str(caught.value)) < 1000
    assert caught.value.file == str(root / CONFIG) and caught.value.remedy
    return caught.value


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_experts", "num_local_experts", "decoder_sparse_step"])
@pytest.mark.parametrize("kind", WRONG)
def test_no_integer_where_one_is_meant(tmp_path, field, kind):
    config = MODEL.config() | {field: WRONG[kind]}
    error = refusal(source(tmp_path, json.dumps(config)))
    assert error.code == "E0213" and field in error.message


@pytest.mark.parametrize("value", [0, MAX_LAYERS + 1, 10**8, 10**30])
def test_layers_beyond_reason(tmp_path, value):
    """A depth that would be counted through for minutes is refused before anything is counted."""
    error = refusal(source(tmp_path, json.dumps(MODEL.config() | {"num_hidden_layers": value})))
    assert error.code == "E0213" and "num_hidden_layers" in error.message and str(MAX_LAYERS) in error.message


def test_most_layers_are_counted_quickly(tmp_path):
    root = source(tmp_path, json.dumps(MODEL.config() | {"num_hidden_layers": MAX_LAYERS}))
    with pytest.raises(DataError, match="layer 2 is the first without experts"):
        planned(root, encodings.get("int8"))


@pytest.mark.parametrize("value", ["1", 1, [1.0], [True], [-1], [MAX_LAYERS * 10**6], {"n": 1}])
def test_a_list_of_layers(tmp_path, value):
    error = refusal(source(tmp_path, json.dumps(MODEL.config() | {"mlp_only_layers": value})))
    assert error.code == "E0213" and "mlp_only_layers" in error.message


@pytest.mark.parametrize("field", ["first_k_dense_replace", "moe_layer_freq", "num_hidden_layers", "n_routed_experts"])
@pytest.mark.parametrize("kind", WRONG)
def test_fields_of_other_families(field, kind):
    config = {"num_hidden_layers": 4, field: WRONG[kind]}
    family = families.registry()["deepseek_v3"]
    with pytest.raises(DataError, match=field):
        first_k_dense_layers(config)
        family.experts_of(config)


def test_what_is_absent_or_null_is_not_stated():
    nothing = dict.fromkeys(("num_hidden_layers", "decoder_sparse_step", "mlp_only_layers", "first_k_dense_replace"))
    for config in ({}, nothing):
        assert depth_of(config) is None
        assert sparse_step_dense_layers(config) == first_k_dense_layers(config) == frozenset()
    family = replace(families.registry()["qwen3_moe"], count_fields=("a", "b"))
    assert family.experts_of({"a": None, "b": 3}) == 3 and family.experts_of({"a": 0, "b": 3}) == 0


DAMAGE = {
    "a number of 5000 digits": '{"num_hidden_layers": %s}' % ("9" * 5000),
    "a float of 5000 digits": '{"num_hidden_layers": 2.%s}' % ("0" * 5000),
    "beyond float64": '{"rope_theta": 1e999}',
    "nested without end": '{"a": ' + "[" * 100_000,
    "nested deep": '{"a": ' + "[" * 500 + "]" * 500 + "}",
}


@pytest.mark.parametrize("case", DAMAGE)
@pytest.mark.parametrize("name", [CONFIG, INDEX])
def test_json_without_limits(tmp_path, name, case):
    root = MODEL.write(tmp_path / "s", shards=2)
    (root / name).write_text(DAMAGE[case])
    with pytest.raises(DataError) as caught:
        open_checkpoint(root)
    assert caught.value.code == "E0407" and caught.value.file == str(root / name) and len(str(caught.value)) < 500


def test_what_configs_in_the_wild_hold_is_taken(tmp_path):
    """Infinity, a key that stands twice, and 10^30, which tokenizers write for "no limit"."""
    text = json.dumps(MODEL.config())[:-1] + f', "a": 1, "a": 2, "limit": [0.0, Infinity], "length": {int(1e30)}}}'
    plan = planned(source(tmp_path, text))
    assert plan.checkpoint.config["a"] == 2 and plan.warnings == ()
