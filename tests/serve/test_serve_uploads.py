"""Uploads: refused by their header, decoded, or called damaged."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import encoded, grey, png_of_size

from capsroute.serve.uploads import RefusedError, decode, open_picture

MOST = 25_000_000


def test_too_many_pixels_are_refused_before_any_is_decoded(predictor):
    with pytest.raises(RefusedError, match="too many pixels"):
        open_picture(png_of_size(5001, 5000), MOST)
    # one pixel column fewer is let through, and only decoding finds that nothing is there
    with pytest.raises(RefusedError, match="damaged"):
        decode(open_picture(png_of_size(5000, 5000), MOST), predictor.prepare)


WHOLE = [encoded(grey(), kind) for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP")]


@settings(deadline=None)
@given(
    data=st.sampled_from(WHOLE),
    where=st.floats(0, 1),
    junk=st.binary(max_size=8),
    cut=st.booleans(),
)
def test_any_change_to_a_picture_is_read_or_refused(predictor, data, where, junk, cut):
    at = round(where * len(data))
    changed = data[:at] + junk + (b"" if cut else data[at + len(junk) :])
    try:
        image = decode(open_picture(changed, MOST), predictor.prepare)
    except RefusedError as refused:
        assert refused.status in (413, 415, 422)
    else:
        assert image.shape == (1, 36, 36)


def test_an_exact_fit_is_taken():
    assert open_picture(encoded(grey(10)), 100).size == (10, 10)
    with pytest.raises(RefusedError, match="at most 99 are taken"):
        open_picture(encoded(grey(10)), 99)
