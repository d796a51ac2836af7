from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from afferent.builtin.pipeline.stops import StopMatcher


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
)
def test_stop_strings_whatever_the_cutting(pieces: list[str], stops: list[str]) -> None:
    """The text equals the whole answer up to the first stop string."""
    matcher = StopMatcher(tuple(stops))
    sent = ""
    for piece in pieces:
        sent += matcher.feed(piece)
        whole = "".join(pieces)
        assert whole.startswith(sent)
    sent += matcher.flush()
    # The stop string that ends first decides; of those that end there, the longest one.
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
