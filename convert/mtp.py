"""Multi-token prediction: the blocks that are there, against those config.json announces.

Loaders make a module for every block that is announced and fill it with random numbers where no tensor comes, or fail.
So the container's config.json says what is there.
"""

from __future__ import annotations

import re
from typing import Any

from pagestone.convert.checkpoint import Checkpoint
from pagestone.convert.family import Family
from pagestone.formats.strict_json import MAX_LAYERS, whole

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Fields in which configs state how many blocks there are, whatever the family."""
SWITCH = "use_mtp"
TRACE = re.compile(r"(.*[._])?(mtp|nextn)([._].*)?", re.IGNORECASE)
"""A name that may be of such a block where the family does not say where they stand."""


def blocks(checkpoint: Checkpoint, family: Family) -> int | None:
    """How many blocks the checkpoint has tensors of; None if some stand where the family does not know them."""
    depth = whole(checkpoint.text_config, "num_hidden_layers", most=MAX_LAYERS) or 0
    roots = dict.fromkeys(family.mtp, 0)
    if family.mtp_as_extra_layer:
        roots |= dict.fromkeys(family.decoders, depth)
    pattern = re.compile(rf"({'|'.join(map(re.escape, roots))})\.(\d{{1,9}})\..+")
    matches = [m for name in checkpoint.tensors if (m := pattern.fullmatch(name))]
    numbered = {(m[1], int(m[2])) for m in matches if int(m[2]) >= roots[m[1]]}
    if not numbered and any(TRACE.fullmatch(name) for name in checkpoint.tensors):
        return None
    return len(numbered)


def truthful(checkpoint: Checkpoint, family: Family, warnings: list[str]) -> dict[str, Any]:
    """The source's config with the number of blocks that are there in every field that states another number."""
    count = blocks(checkpoint, family)
    if count is None:
        return checkpoint.config
    config, said = dict(checkpoint.config), dict[str, None]()
    places = [config]
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = dict(config["text_config"])
        places.append(config["text_config"])
    for place in places:
        for field in COUNTS:
            stated = whole(place, field)
            if stated is not None and stated != count:
                place[field] = count
                said[f"{field} {stated}"] = None
        if place.get(SWITCH) is True and count == 0:
            place[SWITCH] = False
            said[f"{SWITCH} true"] = None
    if said:
        warnings.append(
            f"config.json announces multi-token-prediction blocks ({', '.join(said)}), the checkpoint has {count}; "
            "the container's config.json says what is there"
        )
    return config
