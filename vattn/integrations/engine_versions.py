"""Which release of an engine a plugin runs in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import version

from vattn.errors import ConfigError


def check_version(package: str, tested: Sequence[str]) -> str:
    """Return the version of an installed engine; local parts such as `+cu130` do not count.

    Raises:
        ConfigError: a version that is not among the tested ones, unless `VATTN_ALLOW_UNTESTED=1` is set.
    """
    installed = version(package)
    if installed.split("+")[0] not in tested and os.environ.get("VATTN_ALLOW_UNTESTED") != "1":
        raise ConfigError(
            f"{package} {installed}, which vattn's plugin was not tested with",
            ", ".join(tested),
            "install one of these, or set VATTN_ALLOW_UNTESTED=1 to go on",
        )
    return installed
