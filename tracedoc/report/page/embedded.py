"""Find the diagnosis that a page carries, so that a page can be read like the JSON."""

from __future__ import annotations

import re

from tracedoc.errors import InputError

_PAGE = re.compile(rb"\A\s*<!doctype html", re.IGNORECASE)
_BEGIN = b'<script type="application/json" id="tracedoc-diagnosis">'
_END = b"</script>"


def is_page(data: bytes) -> bool:
    """Return whether the data begin like a page."""
    return _PAGE.match(data) is not None


def diagnosis_in_page(data: bytes) -> bytes:
    """Return the JSON of the diagnosis in a page; raise :class:`InputError` where there is none, or half."""
    begin = data.find(_BEGIN)
    if begin < 0:
        raise InputError(
            "the page holds no diagnosis", "give a page that was written whole by: tracedoc diagnose RUN"
        )
    end = data.find(_END, begin)
    if end < 0:
        raise InputError("the page is cut off within its diagnosis", "copy the page again")
    if end == begin + len(_BEGIN):
        raise InputError(
            "the page does not carry its diagnosis, which has too many steps",
            "write it beside the page: tracedoc diagnose RUN -o page.html -o diagnosis.json",
        )
    return data[begin + len(_BEGIN) : end]
