"""What config.json must say of a container's experts, so that others read right weights or raise (specs/container.md).

The converter writes it, verify compares with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pagestone.formats.encodings import Codec, ConfigFacts, codes_dtypes
from pagestone.formats.layout import PARTS, ExpertShape
from pagestone.formats.text import natural


def config_facts(
    dense: Iterable[tuple[str, str, tuple[int, ...]]], shapes: Iterable[ExpertShape], part_names: tuple[str, str, str]
) -> ConfigFacts:
    """What codecs need for a `quantization_config`: from (name, dtype, shape) of the dense tensors, and experts."""
    modules: set[str] = set()
    quantised = codes_dtypes(plain=False)
    matrices = {shape.matrix(part) for shape in shapes for part in PARTS}
    for name, dtype, dims in dense:
        if dtype == "F8_E4M3" and len(dims) == 2:
            matrices.add((dims[0], dims[1]))  # dense codes that are kept need the same promises
        if name.endswith(".weight") and len(dims) >= 2 and dtype not in quantised:
            module = name.removesuffix(".weight")
            # transformers strips the nesting when it loads the text model alone: both spellings must match
            modules |= {module, module.replace("model.language_model.", "model.", 1)}
    return ConfigFacts(tuple(sorted(modules, key=natural)), tuple(sorted(matrices)), part_names)


LOADABLE_BY = "loadable_by"
"""Key of a `quantization_config` that says nobody but pagestone finds the experts."""


def stated_config(codec: Codec, facts: ConfigFacts, loadable: bool) -> dict[str, Any] | None:
    """The codec's `quantization_config`; for a container that is not `loadable` one at which transformers raises.

    Where transformers does not know the experts' names, or where experts are left out, it would fill them with random
    numbers and warn. A `quantization_config` without `quant_method` makes it raise (an unknown method does not).
    """
    stated = codec.quantization_config(facts)
    if loadable:
        return stated
    rest = {key: value for key, value in (stated or {}).items() if key != "quant_method"}
    return {LOADABLE_BY: "pagestone"} | rest


def config_with(config: dict[str, Any], stated: dict[str, Any] | None, keys: Iterable[str]) -> dict[str, Any]:
    """A config with this quantization_config under each of `keys`, at top level and in text_config, and no other."""
    result = dict(config)
    places = [result]
    if isinstance(result.get("text_config"), dict):
        result["text_config"] = dict(result["text_config"])
        places.append(result["text_config"])
    for place in places:
        for key in ("quantization", "quantization_config", "compression_config"):
            place.pop(key, None)
        if stated is not None:
            place |= dict.fromkeys(keys, stated)
    return result
