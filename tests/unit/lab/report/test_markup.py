"""Text that others wrote, on a page of ours."""

from __future__ import annotations

from kbrl_async.lab.report.markup import Markup, clipped, element, escape, source, visible


def test_text_can_not_become_an_element() -> None:
    assert element("p", "<b>&</b>") == "<p>&lt;b&gt;&amp;&lt;/b&gt;</p>"


def test_text_can_not_leave_its_attribute() -> None:
    made = element("i", title='a" onclick="b', data_cells="'<>")
    assert made == '<i title="a&#34; onclick=&#34;b" data-cells="&#39;&lt;&gt;"></i>'


def test_markup_stays_as_it_is_and_what_is_added_to_it_is_escaped() -> None:
    assert element("p", element("b", "x") + "<") == "<p><b>x</b>&lt;</p>"
    assert isinstance(element("b") + "<", Markup)


def test_an_attribute_of_none_or_false_is_left_out_and_one_of_true_has_no_value() -> None:
    assert element("input", checked=True, disabled=False, class_=None, for_="a") == '<input checked for="a">'


def test_characters_that_hide_or_reorder_others_are_spelled_out() -> None:
    assert element("i", "\x1b", title="\u202e") == '<i title="⟨U+202E⟩">␛</i>'
    assert visible("a\x00b\x1b\u202ec\u200bd\udc80\r\n\te") == "a␀b␛⟨U+202E⟩c⟨U+200B⟩d\ufffd\n\te"


def test_none_is_nothing() -> None:
    assert escape(None) == ""


def test_long_texts_are_cut_and_say_so() -> None:
    text, note = clipped("\n".join(["y" * 500, *["x"] * 30]), lines=10, columns=100)
    assert [len(line) for line in text.split("\n")] == [102, *[1] * 9]
    assert note == "21 more lines and the ends of 1 long lines"


def test_a_kernel_in_a_string_is_coloured_as_c_and_what_follows_as_python() -> None:
    made = source('S = r"""\nfor (int i;;) {}\n"""\ndef f(): pass\n')
    assert '<span class="y-k">for</span>' in made
    assert '<span class="y-nf">f</span>' in made


def test_source_is_bounded_however_long_it_is() -> None:
    assert len(source("(" * 60_000 + "\n" * 60_000)) < 30_000


def test_colouring_changes_no_character_of_the_source() -> None:
    import html
    import re

    text = 'x = """a; <b> & \'c\'"""\n"""\n\n  y = "unterminated\n'
    shown = re.sub(r"<[^>]*>", "", source(text))
    assert html.unescape(shown) == text
