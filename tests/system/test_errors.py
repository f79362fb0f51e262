"""Text of others on a terminal."""

import pytest

from pipeline.system.errors import replace_control_characters, report_uncaught


@pytest.mark.fault("F47")
def test_what_is_replaced_is_what_controls_and_what_stays_is_what_is_read() -> None:
    assert replace_control_characters("Größe ± 5 %\n\t中文 \N{GREEK SMALL LETTER MU}s") == "Größe ± 5 %\n\t中文 μs"
    ranges = ((0, 0x20), (0x7F, 0xA0), (0x200B, 0x2010), (0x2028, 0x202F), (0x2060, 0x2070))
    controls = [code for low, end in ranges for code in range(low, end)]
    controls += [0xAD, 0x61C, 0xFEFF, 0xFFFE, 0xFFFF, 0xE0041]
    replaced = replace_control_characters("".join(map(chr, controls)))
    assert replaced == "".join(chr(code) if chr(code) in "\n\t" else "\N{REPLACEMENT CHARACTER}" for code in controls)


def test_a_traceback_quotes_no_escape(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ValueError("\x1b[31m\u202ered")
    except ValueError as error:
        report_uncaught(type(error), error, error.__traceback__)
    said = capsys.readouterr().err
    assert said.startswith("Traceback (most recent call last):\n")
    assert said.endswith("ValueError: \N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}red\n")
