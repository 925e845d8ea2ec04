"""Whether an answer is speech of its text: cheap judges of its speech tokens and its audio, while it is made.

They find what no listener takes for speech: silence, a loop, a hum, noise, an end inside a word, far too much or too
little of it. Whether the words are right is for `cosyvoice-triton evaluate`.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

import numpy as np

from cosyvoice_triton.audible import audible_part, window_levels
from cosyvoice_triton.constants import SAMPLE_RATE, TOKEN_RATE
from cosyvoice_triton.orchestrator.report import OnWarning
from cosyvoice_triton.orchestrator.request import SynthesisRequest
from cosyvoice_triton.orchestrator.token_buffer import TokenBuffer
from cosyvoice_triton.text.segments import expected_seconds

logger = logging.getLogger(__name__)

Reason = Literal["silence", "loop", "length", "steady", "clipped", "cut", "voice"]
REASONS: tuple[Reason, ...] = get_args(Reason)
Counts = dict[tuple[Reason, bool], int]
FOUND: dict[Reason, str] = {
    "silence": "nothing is heard for seconds",
    "loop": "the same speech tokens are repeated",
    "length": "it is far longer or shorter than its text",
    "steady": "it is a hum or noise",
    "clipped": "it is clipped",
    "cut": "it ends inside a word",
    "voice": "it is in another voice",
}

LEADING_SILENCE = 2 * TOKEN_RATE  # tokens: official answers begin with 7 at the median, 20 at the 95th percentile
LONG_SILENCE = 4 * TOKEN_RATE
LONGEST_PERIOD = TOKEN_RATE  # tokens of a loop
LOOP_TOKENS, SHORT_LOOP_TOKENS = 40, 14  # that are each the token of a period before; of a period of one or two
LOOKED_BACK = 250
# Of the expected seconds of the text, sound alone; with seconds for what a short text may have beside it.
SHORTEST, LONGEST, LEEWAY = 0.5, 2.5, 1.0
# Cosine of two x-vectors, of answers of so many seconds. Fresh sentences of the demo voices have 0.71 at least with
# their own one, 0.42 with the other one at the 95th percentile.
VOICE_SIMILARITY, VOICE_SECONDS = 0.45, 2.0

FRAME = SAMPLE_RATE // 25  # samples of a spectrum
BANDS, BINS = 16, 30  # of 25 Hz each
# The mean deviation of the bands in so many frames, in dB, below which nobody speaks: a few need more certainty.
STEADY = ((10, 1.3), (14, 2.2))
# The loudest band of a frame that counts, below the loudest of all: at 32 the first pause of speech is taken for noise.
STEADY_BELOW_DB = 28
FULL_SCALE, CLIPPED_SHARE = 0.98, 0.02
# An answer whose last token is not silent, and that is louder in its last windows, below its loudest one, is cut.
ABRUPT_SECONDS, ABRUPT_DB = 0.06, -45.0


def judge_tokens(tokens: Sequence[int], silent: Collection[int], text: str, ended: bool) -> Reason | None:
    """Return what is wrong with the speech tokens of a segment so far, those that are not spoken included.

    silent: ids that are silence, none if they are not known.
    """
    recent = np.asarray(tokens[-LOOKED_BACK:], np.int64)
    quiet = np.isin(recent, list(silent))
    if len(tokens) >= LEADING_SILENCE and len(tokens) == len(recent) and quiet.all():
        return "silence"
    if _longest(quiet) >= LONG_SILENCE:
        return "silence"
    heard = recent[~quiet]
    for period in range(1, min(LONGEST_PERIOD, len(heard) - 1) + 1):
        least = SHORT_LOOP_TOKENS if period <= 2 else max(LOOP_TOKENS, 2 * period)
        if len(heard) >= period + least and _longest(heard[period:] == heard[:-period]) >= least:
            return "loop"
    sound = sum(token not in silent for token in tokens) / TOKEN_RATE
    expected = expected_seconds(text)
    if sound > LONGEST * expected + LEEWAY or (ended and sound + LEEWAY / 3 < SHORTEST * expected):
        return "length"
    return None


class Judge:
    """Judges the segments of an answer, and says whether one is to be made again.

    silent: ids that are silence; None: nothing is judged. counts: of what was found, by reason and by whether it was
    made again.
    """

    def __init__(
        self, request: SynthesisRequest, silent: Collection[int] | None, on_warning: OnWarning, counts: Counts
    ) -> None:
        self._speed = request.speed
        # A conversion has no text to be compared with, and its source's pauses and sounds are no faults of it.
        self._silent = None if request.source is not None else silent
        # Whether a segment of which nothing was sent may be made again, once.
        self._again = self._silent is not None and request.retry_bad_answers and request.pieces is None
        self._on_warning = on_warning
        self._counts = counts
        self.begin()

    def begin(self) -> None:
        """Begin a segment."""
        self._audio = AudioJudge(self._speed)
        self._warned: set[Reason] = set()

    def is_hopeless(self, segment: TokenBuffer) -> bool:
        """Return whether it is to be made again although no chunk of it is ready."""
        return self._again and not segment.tokens and len(segment.generated) >= LEADING_SILENCE

    def makes_again(self, segment: TokenBuffer, waveform: np.ndarray | None, *, final: bool, sent: int) -> bool:
        """Return whether a segment is to be made again after its next chunk (N,), of which so many samples were sent.
        If it is wrong and cannot be, warn of it."""
        if self._silent is None:
            return False
        reason = judge_tokens(segment.generated, self._silent, segment.text, segment.ended)
        if reason is None and waveform is not None:
            open_ended = segment.ended and segment.generated[-1] not in self._silent
            reason = self._audio.judge(waveform, final=final, open_ended=open_ended)
        return reason is not None and self.reports(reason, segment.text, can_again=not sent)

    def reports(self, reason: Reason, text: str, *, can_again: bool) -> bool:
        """Return whether a segment is to be made again for that reason; warn if it is not."""
        again = can_again and self._again
        if again:
            self._again = False
            self.begin()
        elif reason in self._warned:
            return False
        else:
            self._warned.add(reason)
            self._on_warning(f"the speech may be wrong, {FOUND[reason]}: {text[:80]!r}")
        self._counts[reason, again] += 1
        logger.warning("an answer was %s, %s: %r", "made again" if again else "sent", FOUND[reason], text[:80])
        return again


@dataclass(eq=False)
class AudioJudge:
    """Judges the audio of a segment chunk by chunk, before its silence is cut. Slow speech is not a hum."""

    speed: float = 1.0
    _loudest: float = 0.0
    _silent: int = 0  # samples before the first audible one
    _was_audible: bool = False
    _rest: np.ndarray = field(default_factory=partial(np.zeros, 0, np.float32))  # less than a frame
    _bands: np.ndarray = field(default_factory=partial(np.zeros, (0, BANDS)))

    def judge(self, waveform: np.ndarray, *, final: bool, open_ended: bool = False) -> Reason | None:
        """Return what is wrong with the next chunk, float32 (N,). open_ended: the segment ends with a token that is not
        silent."""
        levels = window_levels(waveform)
        if levels.size < 3:
            return None
        self._loudest = max(self._loudest, float(levels.max()))
        if audible_part(levels, self._loudest) is None and not self._was_audible:
            self._silent += waveform.size
            return (
                "silence" if final or self._silent * self.speed > LEADING_SILENCE / TOKEN_RATE * SAMPLE_RATE else None
            )
        self._was_audible = True
        high = np.abs(waveform) >= FULL_SCALE
        if (high[2:] & high[1:-1] & high[:-2]).mean() > CLIPPED_SHARE:
            return "clipped"
        if self.speed >= 1 and self._is_steady(waveform):
            return "steady"
        end = levels[-round(ABRUPT_SECONDS * 100) :]
        if final and open_ended and end.min() > self._loudest * 10 ** (ABRUPT_DB / 10):
            return "cut"
        return None

    def _is_steady(self, waveform: np.ndarray) -> bool:
        """Return whether the spectrum hardly changes for some frames: speech does, a hum, a tone and noise do not."""
        waveform = np.concatenate([self._rest, waveform])
        cut = waveform[: waveform.size // FRAME * FRAME].reshape(-1, FRAME)  # (N,) -> (frames, FRAME)
        self._rest = waveform[cut.size :]
        powers = np.square(np.abs(np.fft.rfft(cut * np.hanning(FRAME), axis=1)[:, 1 : 1 + BANDS * BINS]))
        bands = powers.reshape(-1, BANDS, BINS).sum(axis=2)  # (frames, BANDS)
        bands = np.concatenate([self._bands, bands])
        self._bands = bands[1 - STEADY[-1][0] :]
        decibels = 10 * np.log10(np.maximum(bands, bands.max(initial=0.0) * 1e-6) + 1e-9)
        for frames, limit in STEADY:
            if len(decibels) >= frames:
                runs = np.lib.stride_tricks.sliding_window_view(decibels, frames, axis=0)  # (runs, BANDS, frames)
                loud = runs.max(axis=1).min(axis=1) > decibels.max() - STEADY_BELOW_DB
                if (loud & (runs.std(axis=2).mean(axis=1) < limit)).any():
                    return True
        return False


def is_other_voice(embedding: np.ndarray, of_voice: np.ndarray) -> bool:
    """Return whether the x-vector of an answer, (192,), is not that of its voice."""
    norms = float(np.linalg.norm(embedding) * np.linalg.norm(of_voice))
    return norms > 0 and float(embedding @ of_voice) / norms < VOICE_SIMILARITY


def _longest(flags: np.ndarray) -> int:
    """Return the length of the longest run of true flags."""
    ends = np.flatnonzero(~np.concatenate([[False], flags, [False]]))
    return int(np.diff(ends).max() - 1)
