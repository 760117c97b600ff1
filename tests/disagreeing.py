"""What ranks that mean different things are told."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import ProcessGroup

import fusedtp


def told(group: ProcessGroup, call: Callable[[], object]) -> str:
    """The message of RanksDisagree, which the call must raise on every rank; this group's memory is given back, and no
    other's, as other groups have ranks that are not here.
    """
    try:
        call()
    except fusedtp.RanksDisagree as error:
        return str(error)
    finally:
        fusedtp.destroy(group)
    return "nothing was said"
