"""Files that a request names by id, looked up before it is parsed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from afferent.errors import UnsupportedParameter
from afferent.files.file_store import missing
from afferent.files.stored_file import StoredFile


@dataclass(frozen=True, slots=True)
class KnownFiles:
    """Files of the tenant that the ids of a request name; ids of other files are not in it."""

    by_id: Mapping[str, StoredFile] = field(default_factory=dict)
    has_store: bool = False

    def find(self, id: str, where: str) -> StoredFile:
        """Return a file.

        Args:
            where: Place of the id in the request.

        Raises:
            FileNotFound: The tenant has no such file.
            UnsupportedParameter: The server stores no files.
        """
        if not self.has_store:
            raise UnsupportedParameter(
                "this server stores no files, so that none has an id (--files-store)", param=where
            )
        found = self.by_id.get(id)
        if found is None:
            raise missing(id, param=where)
        return found


NO_FILES: Final = KnownFiles()
