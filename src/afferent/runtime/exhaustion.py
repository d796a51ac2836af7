"""System errors that mean that this server has exhausted a resource."""

from __future__ import annotations

import errno
import logging
import os
from typing import Final

from afferent.errors import AfferentError, Unavailable
from afferent.runtime.logs import Seldom

log = logging.getLogger(__name__)

_ERRNOS: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_DESCRIPTORS: Final = frozenset((errno.EMFILE, errno.ENFILE))
_seldom = Seldom(log)


def blamed(error: BaseException, otherwise: AfferentError) -> AfferentError:
    """Return `Unavailable` if the server has exhausted a resource, else ``otherwise``.

    The causes of ``error`` count too: libraries wrap errors in their own.
    """
    number = _errno_of(error)
    if number is None:
        return otherwise
    hint = "; raise its limit (ulimit -n)" if number in _DESCRIPTORS else ""
    _seldom.warning(f"the server has run out of a resource{hint}", reason=os.strerror(number))
    what = "file descriptors" if number in _DESCRIPTORS else "memory"
    return Unavailable(f"the server is out of {what}; try again")


def _errno_of(error: BaseException) -> int | None:
    pending, seen = [error], set[int]()
    while pending:
        found = pending.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, OSError) and found.errno in _ERRNOS:
            return found.errno
        if isinstance(found, BaseExceptionGroup):
            pending.extend(found.exceptions)
        cause = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
        if cause is not None:
            pending.append(cause)
    return None
