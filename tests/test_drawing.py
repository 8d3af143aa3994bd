"""Pictures whose labels are in any script."""

import logging

from capsroute.drawing import figure, png

SERIF = "\u1d15"  # of the fonts that matplotlib brings along, DejaVu Serif and STIX have it
NOBODYS = "\U000e0fff"  # assigned to no letter


def picture(label):
    canvas = figure(2, 1)
    canvas.text(0.1, 0.5, label)
    return canvas


def test_letters_that_the_font_lacks_come_from_another(caplog):
    canvas = picture(f"cat {SERIF}")
    with caplog.at_level(logging.WARNING):
        png(canvas)
    assert not caplog.records
    assert len(canvas.texts[0].get_fontfamily()) == 2


def test_letters_that_no_font_has_are_told(caplog):
    with caplog.at_level(logging.WARNING):
        assert png(picture(f"cat {NOBODYS}")).startswith(b"\x89PNG")
    assert [record.getMessage() for record in caplog.records] == [
        f"no font here has the letters {NOBODYS}: they are drawn as boxes"
    ]


def test_usual_letters_keep_their_font():
    canvas = picture("Katze, gâteau, кошка, γάτα")
    family = canvas.texts[0].get_fontfamily()
    png(canvas)
    assert canvas.texts[0].get_fontfamily() == family
