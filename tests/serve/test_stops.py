from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from afferent.builtin.pipeline.stops import StopMatcher


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
)
def test_stop_strings_whatever_the_cutting(pieces: list[str], stops: list[str]) -> None:
    """The same text as cutting the whole answer before the first stop string."""
    matcher = StopMatcher(tuple(stops))
    sent = ""
    for piece in pieces:
        sent += matcher.feed(piece)
        whole = "".join(pieces)
        assert whole.startswith(sent)
    sent += matcher.flush()
    # The earliest end of a stop string decides; among those that end there, the earliest start.
    whole, expected = "".join(pieces), None
    for end in range(1, len(whole) + 1):
        starts = [end - len(s) for s in stops if whole[:end].endswith(s)]
        if starts:
            expected = whole[: min(starts)]
            break
    if expected is None:
        assert sent == whole
        assert matcher.met is None
    else:
        assert matcher.met in stops
        assert sent == expected
        assert whole.startswith(sent + matcher.met)
