"""Header parsers: the sides or the length of a file, without decoding it."""
