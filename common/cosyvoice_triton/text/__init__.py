"""Text before it reaches the LLM: cleaned, normalized, and split into segments that are synthesized one after another.

cleaning.py        what nobody speaks: HTML, LaTeX, subtitles, control tokens, Markdown, emoji, invisible signs
markup.py          pauses, changes of the voice, and the part of SSML that is supported
pronunciation.py   a request's dictionary of words and readings
language.py        the language of a text and of its sentences
quantities.py      finds amounts, dates, times and ranges for all languages
*_reading.py       how a language says them, and its words of numbers
reading.txt        units, currencies, words around numbers, and rules for signs and abbreviations; read by tables.py
kana.py            Japanese kanji as kana, by an optional package
segments.py        sentences, also of a text that arrives in pieces, the seconds that a text takes, segments
frontend.py        numbers and signs as words; all of this: a text -> its segments
"""
