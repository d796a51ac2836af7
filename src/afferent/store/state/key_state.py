"""States of a key on its way from missing to sealed, and the allowed transitions. Pure.

`docs/store.md` has the diagram. `SingleFlight.state_of` returns a key's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class KeyState(StrEnum):
    """State of a key.

    - ``absent``: no object, and no request that waits.
    - ``owned``: a request makes the object.
    - ``orphaned``: requests wait, and one of them will make it; it waits for an extent.
    - ``unplaced``: a job waits for an extent.
    - ``queued``: a job waits for a worker.
    - ``fetching``: the tier process fetches the object.
    - ``making``: a worker makes it.
    - ``sealed``: the object exists.
    - ``quarantined``: two processes died while they made it; refused for a minute.
    """

    ABSENT = "absent"
    OWNED = "owned"
    ORPHANED = "orphaned"
    UNPLACED = "unplaced"
    QUEUED = "queued"
    FETCHING = "fetching"
    MAKING = "making"
    SEALED = "sealed"
    QUARANTINED = "quarantined"


TRANSITIONS: Final[Mapping[KeyState, frozenset[KeyState]]] = {
    state: frozenset(after)
    for state, after in {
        # Claim; Queue or Fetch, with an extent for the object or without one.
        KeyState.ABSENT: {
            KeyState.OWNED,
            KeyState.ORPHANED,
            KeyState.UNPLACED,
            KeyState.QUEUED,
        },
        # Seal; the owner aborts or is lost, and another request takes over, or none.
        KeyState.OWNED: {
            KeyState.SEALED,
            KeyState.ORPHANED,
            KeyState.ABSENT,
            KeyState.QUARANTINED,
        },
        # An extent was freed: the first request that can make the object owns it.
        KeyState.ORPHANED: {KeyState.OWNED, KeyState.ABSENT, KeyState.QUARANTINED},
        # An extent was freed; or no request waits any more.
        KeyState.UNPLACED: {KeyState.QUEUED, KeyState.ABSENT},
        # A worker or the tier process takes the job; no worker can, and a request makes the object;
        # or no request waits any more.
        KeyState.QUEUED: {
            KeyState.FETCHING,
            KeyState.MAKING,
            KeyState.ORPHANED,
            KeyState.ABSENT,
        },
        # The object came; or the tier did not have it.
        KeyState.FETCHING: {KeyState.SEALED, KeyState.QUEUED, KeyState.ABSENT},
        # Finish; or the worker died, and another one takes the job.
        KeyState.MAKING: {
            KeyState.SEALED,
            KeyState.QUEUED,
            KeyState.ABSENT,
            KeyState.QUARANTINED,
        },
        # Evict, delete.
        KeyState.SEALED: {KeyState.ABSENT},
        # A minute has passed; or a client creates the object without asking for it.
        KeyState.QUARANTINED: {KeyState.ABSENT, KeyState.OWNED},
    }.items()
}
"""The states after each state, in one step. A verb may take a key several steps further."""
