"""Texts that were written to block: their time grows with their length, and they fail no request."""

import math
from contextlib import suppress
from time import thread_time

import pytest
from cosyvoice_triton.text.cleaning import clean_text
from cosyvoice_triton.text.frontend import TextFrontend
from cosyvoice_triton.text.markup import parts

HOSTILE = {
    "digits": "1",
    "groups of digits": "1,234,",
    "points": "1.1.1.",
    "ranges": "1-",
    "fractions": "1/",
    "colons": "12:30:",
    "powers": "2^",
    "percent": "5%-",
    "money": "$1.5k",
    "units": "5 km/h²",
    "signs": "+-=<>×",
    "degrees": "-5°C~",
    "combining marks": "e\u0301",
    "only combining marks": "a" + "\u0301" * 9,
    "brackets": "[((",
    "closed brackets": "[](x)",
    "quotes": '"“',
    "stars": "**_",
    "tags": "<b><i>",
    "open tags": "<a ",
    "links": "[a](b",
    "tables": "|a",
    "footnotes": "[^1][1]",
    "hosts": "a.b.",
    "mail": "a@b.c@",
    "protocols": "http://",
    "initials": "J. ",
    "titles": "Dr. St. ",
    "months": "Jan-Feb ",
    "Roman": "King XXIV ",
    "feet": "6'2\"",
    "hyphens": "well-known-",
    "phone": "+1 (555) ",
    "Chinese": "第3-5章7×24",
    "Chinese dates": "2024-05-06年",
    "Chinese scores": "比分1:2-3",
    "Japanese": "¥1,980-は〜3",
    "Korean": "3개₩1,000~",
    "emoji": "👍🏽❤\ufe0f",
    "pauses": "[pause",
    "invisible": "\u200b\u200d",
    "vulgar": "½²",
    "long addresses": "https://www.example.com/a/2024/05/06?id=1&x=2#top",
    "numbered lines": "1.\n",
    "comparisons": "a<b>c≥3≤4≠5 ",
    "superscripts": "x²+y³=10⁵ ",
    "faces": "(^_^:)(；ω",
    "formulas": "$a=\\frac{1}{",
    "attributes": "<a b='c' d=\"",
    "silent elements": "<style><script>",
    "entities": "&amp;&#x3c;",
    "circles": "①② ③",
    "cues": "00:00:01,000 --> 00:00:02,000\n",
    "units with per": "5kg/m³/",
    "masks": "138****",
    "pictures, quotes and code": "![> `~~",
    "accents and blanks": "é" + " " * 99,
}
CHARS = 1_000


def seconds(frontend: TextFrontend, text: str, language: str) -> float:
    """Return the CPU time of this thread, the least of two tries."""
    taken = []
    for _ in range(2):
        begin = thread_time()
        list(frontend.segments(clean_text("Go on " + text, name="text", max_chars=10**6), language=language))
        taken.append(thread_time() - begin)
    return min(taken)


@pytest.mark.serial
@pytest.mark.parametrize("language", ["zh", "en"])
def test_the_time_of_hostile_text_grows_with_its_length(language: str) -> None:
    """A quadratic pattern takes 64 times as long for eight times the text. What is short beside plain text may grow."""
    frontend = TextFrontend()
    plain = seconds(frontend, "We walked down to the harbour. " * (8 * CHARS // 31), language)
    for name, unit in HOSTILE.items():
        text = (unit * CHARS)[:CHARS]
        once, eight = (seconds(frontend, text * times, language) for times in (1, 8))
        assert eight < 32 * max(once, plain / 8), name


@pytest.mark.serial
@pytest.mark.parametrize(
    "mark", ["[pause {}]", "[pause {}s]", "[pause{}", '<break time="{}"/>', "[voice:{}", "<speak{}"]
)
@pytest.mark.parametrize("char", ["1", " "])
def test_the_time_of_a_mark_grows_with_its_length(mark: str, char: str) -> None:
    """A time of 4,096 digits took a second. Whether it is refused does not matter."""

    def taken(length: int) -> float:
        least, text = math.inf, mark.replace("{}", char * length)
        for _ in range(3):
            begin = thread_time()
            for _ in range(3):
                with suppress(ValueError):
                    list(parts(text))
            least = min(least, thread_time() - begin)
        return least

    assert taken(8 * CHARS) < 32 * max(taken(CHARS), 1e-3)


@pytest.mark.serial
def test_numbers_cost_at_most_a_few_times_plain_text() -> None:
    frontend = TextFrontend()
    for language, plain, numbers in (
        ("zh", "今天天气很好，我们去公园散步吧。", "2024年5月6日共1,234人，增长2.5%。"),
        ("en", "We walked down to the harbour today. ", "On March 3, 2026, 1,234 paid $12.50. "),
    ):
        cost = {text: seconds(frontend, (text * 300)[:4096], language) for text in (plain, numbers)}
        assert cost[numbers] < 10 * cost[plain], language
