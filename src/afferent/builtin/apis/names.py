"""Known parameter names of each API, and checks of names and values. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Raw

from afferent.builtin.apis.parameters import Only, of_api
from afferent.errors import InvalidRequest, UnsupportedParameter

_MAX_UNKNOWN = 64
_LONGEST_VALUE_NBYTES = 256
"""Upper bound of values without effect."""
_SHORTEST_TYPO = 6
"""Too many shorter names differ by one letter only."""
_ELSEWHERE: Final = {
    "max_completion_tokens": "max_output_tokens",
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_tokens": "max_output_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "stop": "stop_sequences",
    "stop_sequences": "stop",
    "stop_strings": "stop",
}
"""Names of parameters in other APIs, too different to be found by their spelling."""


class ParameterNames:
    """Parameter names of one API."""

    def __init__(self, api: str) -> None:
        self._api, self._known = api, of_api(api)
        self._spelled = {_plain(name): name for name in self._known}
        long = {_plain(n): n for n in self._known if len(_plain(n)) >= _SHORTEST_TYPO}
        nearly = {less: name for plain, name in long.items() for less in _one_letter_less(plain)}
        self._nearly = {**nearly, **long}

    def check(self, given: Mapping[str, Raw], *, refuses_unknown: bool) -> tuple[str, ...]:
        """Return the unknown names, which are ignored.

        A name that is nearly a known one is always refused: a misspelt ``max_token`` must not
        become a long answer.

        Args:
            refuses_unknown: Refuse every unknown name.

        Raises:
            InvalidRequest: A name is unknown, and refused.
            UnsupportedParameter: A value would have an effect that is not supported.
        """
        unknown = [name for name in given if name not in self._known]
        if len(unknown) > _MAX_UNKNOWN:
            raise InvalidRequest(f"more than {_MAX_UNKNOWN} parameters that nobody knows")
        for name in unknown:
            meant = self._meant_by(name)
            if meant is not None or refuses_unknown:
                hint = f": is it {meant!r} that is meant?" if meant is not None else ""
                raise InvalidRequest(f"there is no parameter {name[:64]!r}{hint}", param=name[:64])
        for name, value in given.items():
            if name in self._known:
                self._check_value(name, value)
        return tuple(unknown)

    def _check_value(self, name: str, value: Raw) -> None:
        one = self._known[name]
        use = one.uses[self._api]
        if not isinstance(use, Only) or bytes(value) == b"null":
            return
        if len(value) > _LONGEST_VALUE_NBYTES or not _is_one_of(value, use.values):
            about = one.about.replace("`", "")
            raise UnsupportedParameter(f"{name} is not supported: {about}", param=name)

    def _meant_by(self, name: str) -> str | None:
        """Return the known name with the same or nearly the same spelling."""
        elsewhere = _ELSEWHERE.get(name)
        if elsewhere in self._known:
            return elsewhere
        plain = _plain(name[:64])
        if plain in self._spelled:
            return self._spelled[plain]
        if len(plain) < _SHORTEST_TYPO:
            return None
        spellings = [plain, *_one_letter_less(plain)]
        return next((self._nearly[each] for each in spellings if each in self._nearly), None)


def _is_one_of(raw: Raw, values: Sequence[object]) -> bool:
    try:
        return msgspec.json.decode(raw) in values
    except msgspec.DecodeError:  # such as a number without bounds: 1e999
        return False


def _plain(name: str) -> str:
    """Remove the difference between ``maxTokens`` and ``max_tokens``."""
    return name.replace("_", "").replace("-", "").lower()


def _one_letter_less(plain: str) -> Iterator[str]:
    return (plain[:place] + plain[place + 1 :] for place in range(len(plain)))
