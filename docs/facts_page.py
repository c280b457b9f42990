"""The page of the site with the definitions of all facts, from their docstrings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tracedoc.facts.catalog import Fact

REPOSITORY = Path(__file__).resolve().parents[1]

HEAD = """# Facts

What `tracedoc facts` prints, and what rules are written over. A fact is a number with a unit and a
definition, or unknown with a reason. This page is made from the definitions in the code;
`tracedoc explain NAME` shows one of them.

The median step is the complete step of lower-median length: one real step that can be opened in Perfetto.
Scope says whether there is one value for the run, or one for each rank, step, group or unit. What a fact
needs of a capture: `cpu` (no GPU computes), `gpu` activity, `kernels`, `launches` linked to them,
`collectives`, `multi_rank`, `host_ops`, `shapes` (record_shapes=True), `memory` (profile_memory=True),
`sharding` (FSDP or ZeRO-3), `sends` to single ranks.
"""


def facts_page() -> str:
    """Return the text of the page."""
    if str(REPOSITORY) not in sys.path:
        sys.path.insert(0, str(REPOSITORY))
    from tracedoc.topics import by_topic, load_facts

    facts = load_facts()
    sections = (
        f"## {topic}\n\n" + "\n".join(_entry(facts[name]) for name in names)
        for topic, names in by_topic(facts).items()
    )
    return HEAD + "\n" + "\n".join(sections)


def _entry(fact: Fact) -> str:
    needs = ", ".join(f"`{need}`" for need in sorted(fact.needs))
    traits = f"{fact.unit}, one for the run" if fact.scope == "run" else f"{fact.unit}, by {fact.scope}"
    uses = ", ".join(f"[`{one.name}`](facts.md#{one.name})" for one in fact.uses)
    traits += f"; needs {needs}" if needs else ""
    traits += f"; made of {uses}" if uses else ""
    return f"### `{fact.name}`\n\n*{traits}*\n\n{fact.doc}\n"
