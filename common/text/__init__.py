"""Text on its way to the LLM: made safe, said in words, cut into segments that are spoken one after another.

cleaning.py   whitespace and control tokens; text with nothing to speak is an error
spoken.py     numbers, dates, units and currencies as words
segments.py   sentences, and how many of them make a segment
frontend.py   all of it: a text -> its segments
"""

from common.text.cleaning import clean_line, clean_text, is_speakable, strip_control_tokens
from common.text.frontend import TextFrontend

__all__ = ["TextFrontend", "clean_line", "clean_text", "is_speakable", "strip_control_tokens"]
