"""What a pipeline reports while it makes the audio of a request."""

from collections.abc import Callable, Sequence

OnWarning = Callable[[str], object]  # called with what the caller should know although there is audio

# Called with the name of each stage when it is reached: "voice" when the LLM's part of the prompt is ready; then, for
# each segment, "llm" ("source" of a conversion) at its first tokens and "prompt_cache" when token2wav has prefilled the
# prompt; for each chunk, or whole segment if nothing is streamed, "tokens" when it has all tokens that it needs, and
# "audio". The names are part of the output `timeline`.
OnStage = Callable[[str], object]

# Called before the last waveform of each segment with the text that the LLM got, the segment's samples and its speech
# tokens, and before each pause with "", the pause's samples and no tokens: in order, they are all samples of an answer.
OnSegment = Callable[[str, int, Sequence[int]], object]


def ignore(*reported: object) -> None:
    """Do nothing. This is the default callback: warnings are logged anyway."""
