"""Return whether a name or a value may be of a key, a token or a password; in doubt it is."""

from __future__ import annotations

import re

_NAME = re.compile(
    # Not tokenizers, max_tokens, authors or num_key_value_heads.
    r"TOKEN(?!IZ|S)|SECRET|PASSW|CREDENTIAL|AUTH(?!OR)|API_?KEY|ACCESS_?KEY|PRIVATE|(?:^|_)KEY(?!_VALUE)(?:_|$)"
)
_VALUE = re.compile(
    r"://[^/\s]*@"  # a password in a URL
    r"|-----BEGIN"
    r"|\b(?:sk|pk|rk|hf|gh[pousr]|github_pat|glpat|xox[abprs]|ya29|wandb|nvapi)[-_][A-Za-z0-9]"
    r"|\b(?:AKIA|ASIA|AIza|eyJ)[A-Za-z0-9_-]{10}"
    r"|\b[0-9a-fA-F]{32,}\b"
)
# A long run of letters and digits that no word, path or list of devices has.
_RUN = re.compile(r"[A-Za-z0-9+=]{20,}")
# CUDA_VISIBLE_DEVICES may hold them, and a GPU's number opens nothing.
_DEVICE_ID = re.compile(r"\b(?:GPU|MIG)-[0-9a-fA-F-]{8,}(?:/\d+/\d+)?")


def names_secret(name: str) -> bool:
    """Return whether a variable, or an option such as ``--hub-token``, is named like one with a secret."""
    return _NAME.search(name.upper().replace("-", "_")) is not None


def looks_secret(value: str) -> bool:
    """Return whether a value may be a key, a token or a password."""
    value = _DEVICE_ID.sub("", value)
    if _VALUE.search(value):
        return True
    return any(any(c.isdigit() for c in run) and any(c.isalpha() for c in run) for run in _RUN.findall(value))
