"""Format of a document, by its first bytes alone."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final

from afferent.errors import UnsupportedMedia

_PDF: Final = b"%PDF-"
_PDF_WITHIN_NBYTES: Final = 1024
"""Readers of PDFs look for the mark in so many bytes, as some files have others before it."""
_TIFF: Final = re.compile(rb"II[*+]\0|MM\0[*+]")


class DocumentFormat(StrEnum):
    PDF = "PDF"
    TIFF = "TIFF"


def document_format_of(data: bytes | memoryview) -> DocumentFormat:
    """Return the format of a document.

    Raises:
        UnsupportedMedia: Its first bytes belong to none.
    """
    head = bytes(data[:_PDF_WITHIN_NBYTES])
    if _TIFF.match(head):
        return DocumentFormat.TIFF
    if _PDF in head:
        return DocumentFormat.PDF
    raise UnsupportedMedia("the file is no PDF and no TIFF; documents are one of these")
