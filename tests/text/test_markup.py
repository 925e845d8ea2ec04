import pytest
from cosyvoice_triton.text.cleaning import clean_text
from cosyvoice_triton.text.frontend import TextFrontend
from cosyvoice_triton.text.markup import MAX_PAUSES_SECONDS, Pause, parts


@pytest.fixture(scope="module")
def frontend() -> TextFrontend:
    return TextFrontend()


def spoken(frontend: TextFrontend, text: str, normalize: bool = True) -> list[str | float]:
    """The segments, and the seconds of the pauses."""
    found = frontend.segments(clean_text(text, name="t", max_chars=4096), normalize)
    return [part.seconds if isinstance(part, Pause) else part for part in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello [pause 1.2s] there", ["Hello.", 1.2, "there."]),
        ("Hello, [PAUSE 300ms] you", ["Hello.", 0.3, "you."]),
        ("One.<break time='500ms'/> Two.<break/><break strength=\"strong\"></break>", ["One.", 0.5, "Two.", 0.5, 0.75]),
        ("[pause] 5", [0.5, "five."]),
        ("价格 [pause 1s] 25", ["价格。", 1.0, "二十五。"]),
        ("[pause .25s]", [0.25]),
        ("a [pause:0.75s] b [PAUSE: 300ms] c [silent 1s][pause:]", ["a.", 0.75, "b.", 0.3, "c.", 1.0, 0.5]),
        ("<speak>a [pause:1s] b</speak>", ["a.", 1.0, "b."]),
        ("[happy:0.5] Hi [gesture:wave] there [10:30] [a: b]", ["Hi there [ten thirty] [a: b]."]),
        ("[see:docs](x) [https://a.org]", ["see:docs [a dot org]."]),
        ("A.\n∞\nB → C.", ["A. B → C."]),  # alone a symbol without a name is silent
        ("[pause 5ms] [pause 6ms]", [0.005, 0.006]),
        ("[laughter] <b>Ha</b>", ["[laughter] Ha."]),
        ("<speak>Hi <break time='1s'/> there</speak>", ["Hi.", 1.0, "there."]),
        ("<?xml version='1.0' encoding='UTF-16'?>\n<speak>Hi</speak>", ["Hi."]),
        (
            "<speak version='1.1' xmlns='http://www.w3.org/2001/10/synthesis'><p>One</p><s>Two</s> "
            "<sub alias='the web'>WWW</sub> &amp; <say-as interpret-as='characters'>ABC</say-as> "
            "<say-as interpret-as='digits'>12</say-as></speak>",
            ["One. Two. the web and A B C one two."],
        ),
    ],
)
def test_pauses_and_ssml_become_segments_and_silence(
    text: str, expected: list[str | float], frontend: TextFrontend
) -> None:
    assert spoken(frontend, text) == expected


def test_pauses_are_kept_without_normalization(frontend: TextFrontend) -> None:
    assert spoken(frontend, "5 *a* [pause 1s] b", normalize=False) == ["5 *a*", 1.0, "b."]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<speak><prosody rate='slow'>x</prosody></speak>", "the tag <prosody> is not supported"),
        ("<speak><voice name='anna'>x</voice></speak>", "the tag <voice>"),
        ("[voice:anna] x", "is for texts of the speech service"),
        ("<speak>[voice:anna] x</speak>", "which has <voice>"),
        ("<speak>a<speak>b</speak></speak>", "the tag <speak>"),
        ("A <prosody rate='slow'>b</prosody>", "the tag <prosody>"),
        ("Hi. <speak>a</speak>", "the tag <speak>"),
        ("<speak>a", "the tag <speak>"),
        ("<speak>a<b></speak>", "not well-formed"),
        ("<speak><sub>a</sub></speak>", "the tag <sub> has no alias"),
        ("<speak><say-as interpret-as='ordinal'>1</say-as></speak>", "interpret-as 'ordinal'"),
        ("a <break times='1s'/>", "no attribute 'times'"),
        ("a <break strength='big'/>", "strength 'big'"),
        ("a [pause long]", "a pause of 'long'"),
        ("a [pause 1]", "a pause of '1'"),
        ("a [pause:1]", "a pause of '1'"),
        ("a [pause 11s]", "longer than 10 s"),
        ("[pause 10s]" * 7, f"longer than {MAX_PAUSES_SECONDS:g} s together"),
        ("<speak>" + "<s>" * 30 + "a" + "</s>" * 30 + "</speak>", "levels"),
        ("<speak></speak>", "nothing to speak"),
        ("[pause 0s]", "nothing to speak"),
        ("[pause 5ms]", "nothing to speak"),  # less than half a frame
    ],
)
def test_what_is_not_supported_is_an_error_that_names_it(text: str, message: str, frontend: TextFrontend) -> None:
    with pytest.raises(ValueError, match=f"^target_text.*{message}"):
        spoken(frontend, text)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("texts", [[*'.!—😀*…"→№∞�⠀ㅤ', "???", "**", "<>", "[happy:1]", "- - -", "( )", "...\n...", "󠁁󠁂"]])
def test_a_text_of_symbols_has_nothing_to_speak(texts: list[str], normalize: bool, frontend: TextFrontend) -> None:
    for text in texts:
        with pytest.raises(ValueError, match="^t.* has nothing to speak"):
            spoken(frontend, text, normalize)


def test_symbols_with_names_are_spoken_alone(frontend: TextFrontend) -> None:
    assert [spoken(frontend, text) for text in ("$", "©", "°")] == [["dollar."], ["copyright."], ["degree."]]


def test_an_entity_is_never_expanded() -> None:
    with pytest.raises(ValueError, match="DOCTYPE"):
        list(parts("<speak><!DOCTYPE a [<!ENTITY b 'c'>]>&b;</speak>"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1\n00:00:01,000 --> 00:00:02,500\nHello.\n2\n00:00:03,000 --> 00:00:04,000\nBye.", "Hello. Bye."),
        ("WEBVTT\n00:01.000 --> 00:04.000\n<v Bob>Hi there.", "Hi there."),
        ("Let $\\frac{1}{2} \\times x^2 \\leq 5$.", "Let one half times x squared is less than or equal to five."),
        ("It is List<String> and `<b>`.", "It is List<String> and <b>."),
        ("<w:p>Hello</w:p><o:p></o:p>", "Hello."),
    ],
)
def test_marks_of_other_formats_are_left_out(text: str, expected: str, frontend: TextFrontend) -> None:
    assert spoken(frontend, text) == [expected]


def test_thoughts_are_spoken_unless_a_setting_leaves_them_out() -> None:
    text = "<think>Well.</think>Yes."
    assert list(TextFrontend("", skip_thoughts=True).segments(text)) == ["Yes."]
    assert "Well" in "".join(map(str, TextFrontend().segments(text)))
