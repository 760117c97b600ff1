"""Choose the core of a kernel: the loop of `matmul`, or the warp-specialised one, which is imported when it is chosen.

A launch that the chosen core does not serve has the loop, and one warning for each reason.
"""

from __future__ import annotations

import importlib
import warnings
from functools import cache
from typing import Any

from .configs import LOOP as LOOP
from .configs import WARP_SPECIALISED as WARP_SPECIALISED
from .configs import Config

# How the warning begins.
NOT_USED = "the warp-specialised core is not used"


@cache
def _module() -> Any:
    # The module, or why it cannot be imported.
    try:
        return importlib.import_module(".warp_specialised", __package__)
    except (ImportError, AttributeError) as error:
        return f"this Triton's Gluon is not what it needs ({error})"


def chosen(config: Config, *launch: Any, **more: Any) -> Any:
    """Return the module of the core that a configuration chooses, or None for the loop.

    launch, more: what the core's `refusal` asks for. Warns of the reason why the core is not used.
    """
    if config.core == LOOP:
        return None
    found = _module()
    why = found if isinstance(found, str) else found.refusal(config, *launch, **more)
    if why:
        # Python shows it once. A search for the fastest core makes it an error, however often it was shown before.
        warnings.warn(f"{NOT_USED}: {why}", stacklevel=3)
        return None
    return found
