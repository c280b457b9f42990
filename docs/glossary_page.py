"""The page of the site with all words, from what ``tracedoc explain`` says of them."""

from __future__ import annotations

HEAD = """# Glossary

Words of the answer, of PyTorch and of GPUs as tracedoc uses them. `tracedoc explain WORD` shows one,
in any spelling, and `tracedoc explain ZeRO-2 ZeRO-3` compares two; it has every fact, rule and limit too.
"""


def glossary_page() -> str:
    """The text of the page: a heading for each word, its text, and a table of what else is told of it."""
    from tracedoc.glossary import spellings, words

    return HEAD + "".join(
        _entry(word, meaning, spellings().get(word, ())) for word, meaning in sorted(words().items())
    )


def _entry(word: str, meaning: dict[str, str], others: list[str] | tuple[()]) -> str:
    also = f"\n\nAlso: {', '.join(others)}." if others else ""
    rows = [
        f"| {label} | {text.replace('|', '&#124;')} |" for label, text in meaning.items() if label != "Is"
    ]
    table = "\n\n" + "\n".join(["| | |", "|---|---|", *rows]) if rows else ""
    return f"\n## {word}\n\n{meaning['Is']}{table}{also}\n"
