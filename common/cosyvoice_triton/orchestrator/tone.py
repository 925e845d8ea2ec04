"""The tone of a segment, carried to the next one: the LLM continues its last sentence instead of the recording."""

from collections.abc import Collection, Sequence

from cosyvoice_triton.text.segments import SentenceSplitter, expected_seconds

PAUSE_TOKENS = 3  # silent tokens of a pause between sentences


def last_sentence(text: str, tokens: Sequence[int], silent: Collection[int]) -> tuple[str, list[int]]:
    """Return the last sentence of a segment and its speech ids 0..6560, from the pause that is nearest to where the
    sentence is expected to begin; all of the segment without such a pause. silent: ids of silence."""
    splitter = SentenceSplitter()
    *before, last = filter(str.strip, (*splitter.push(text), splitter.finish()))
    pauses = [
        at + PAUSE_TOKENS // 2
        for at in range(1, len(tokens) - PAUSE_TOKENS)
        if all(token in silent for token in tokens[at : at + PAUSE_TOKENS])
    ]
    if not before or not pauses:
        return text, list(tokens)
    spoken = sum(map(expected_seconds, before))
    begin = len(tokens) * spoken / (spoken + expected_seconds(last))
    return last, list(tokens[min(pauses, key=lambda at: abs(at - begin)) :])
