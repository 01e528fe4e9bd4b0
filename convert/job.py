"""Which job a conversion is: what must be equal for unfinished work to be continued, and what is told where it is not.

Finished files are kept only where they are provably what would be made again. A source file whose times moved may hold
the same bytes (a change of mode, owner or links moves its change time), but only reading all of it would tell.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagestone.convert.journal import FinishedFile
from pagestone.convert.plan import Plan
from pagestone.convert.unchanged import FACTS, used_stamps
from pagestone.formats.errors import RequestError
from pagestone.formats.layer_file import SPEC_VERSION
from pagestone.formats.text import size_text

SOURCE, FILES = "source", "source files"
NAMED = 3
"""Files of a kind that are named; of more their number is said."""


def identity(plan: Plan) -> dict[str, Any]:
    """What must be equal for a job to be continued, as JSON has it; keys are in words, for messages.

    `FILES` has a list for every file of the source that is used: its stamp, and the digest of its contents or None.
    """
    digests = plan.checkpoint.digests
    facts: dict[str, Any] = {
        "spec version": SPEC_VERSION,
        "codec": plan.codec.name,
        "codec parameters": plan.codec.parameters,
        "--layers": plan.partial,
        "--dense": plan.dense_identity,
        "--include-code": plan.request.include_code,
        SOURCE: plan.checkpoint.fingerprint,
        FILES: {
            name: [*stamp, digests[name].hex() if name in digests else None]
            for name, stamp in sorted(used_stamps(plan).items())
        },
    }
    same: dict[str, Any] = json.loads(json.dumps(facts))
    return same


def another_job(
    asked: Mapping[str, Any], begun: Mapping[str, Any], finished: Sequence[FinishedFile], work: Path
) -> RequestError:
    """The refusal (E0803) to continue the job `begun`, read from a journal, as `asked`: what differs, what to do."""
    sizes = {f.name: f.nbytes for f in finished}  # a file that was made twice stands twice in the journal
    anew = f"use --force to begin anew: that discards {len(sizes)} finished file(s), {size_text(sum(sizes.values()))}"
    if asked.keys() != begun.keys():
        what, remedy = "by another version of pagestone is here", f"finish it with that version, or {anew}"
    else:
        differing = sorted(k for k in asked if asked[k] != begun[k])
        options = [k for k in differing if k not in (SOURCE, FILES)]
        changed, added, gone = _changes(asked[FILES], begun[FILES])
        told = [f"its {', '.join(options)} differ(s) from this one's"] if options else []
        told += [f"of the source changed or touched since it began: {changed}"] if changed else []
        told += [f"added to the source since it began: {added}"] if added else []
        told += [f"gone from the source since it began: {gone}"] if gone else []
        what = "is here; " + "; ".join(told or ["it is of another source"])
        remedy = f"repeat the command that began it, or {anew}"
        if changed or gone:
            remedy = (
                f"{anew}; whether a file that was only touched holds the same bytes is not known without reading it"
            )
        elif added and not options:
            remedy = f"move what was added elsewhere and run the same command, which then continues; or {anew}"
    return RequestError(f"an unfinished conversion {what}", code="E0803", file=work, remedy=remedy)


def _changes(asked: Mapping[str, Any], begun: Any) -> tuple[str, str, str]:
    """(changed, added, gone): files of the source in words, each "" if there are none."""
    if not isinstance(begun, dict):
        return "all of the source", "", ""
    changed = [f"{n} ({_fact(asked[n], begun[n])})" for n in sorted(asked.keys() & begun.keys())
               if asked[n] != begun[n]]  # fmt: skip
    return _named(changed), _named(sorted(asked.keys() - begun.keys())), _named(sorted(begun.keys() - asked.keys()))


def _fact(asked: Sequence[Any], begun: Any) -> str:
    """What of a file is another: the first fact that differs."""
    facts = (*FACTS, "contents")
    if not isinstance(begun, list) or len(begun) != len(facts):
        return "facts that are none"
    return "its " + next(fact for fact, a, b in zip(facts, asked, begun, strict=True) if a != b)


def _named(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
