"""What is wrong with a recording of a voice, and what can be mended: judged once, before it is encoded.

A clone repeats the faults of its recording: a word that is cut off at its end leaks into answers, silence becomes
pauses, and a transcript of other words makes the LLM repeat or leave out some.
"""

from dataclasses import dataclass, replace

import numpy as np

from cosyvoice_triton.constants import MAX_REFERENCE_SECONDS, MIN_REFERENCE_SECONDS
from cosyvoice_triton.text.segments import expected_seconds
from cosyvoice_triton.voice.prompt import Recording

KEPT_SILENCE = 0.2  # seconds at either end, as upstream's web page leaves

_FRAME_SECONDS = 0.01
_SILENT_DB = -35.0  # a frame this far below the level of speech is silence
_END_SECONDS, _END_DB = 0.03, -15.0  # a recording whose end is louder than this below its speech ends inside a word
_DEEPEST_DB = -40.0  # noise further below speech than this makes no difference
_LONG_SILENCE = 0.5  # seconds
_FULL_SCALE, _CLIPPED_SHARE = 0.99, 1e-3
_QUIET_DBFS = -40.0
_LENGTH_RATIO = 2.5  # slow speakers take twice the expected time, fast ones half of it


@dataclass(frozen=True)
class Judgement:
    """A recording's measures. level: of its speech, in dBFS. clipped: share of samples at full scale. leading,
    trailing: seconds of silence. abrupt: it ends without a pause. expected: seconds that its transcript takes; None
    without one."""

    seconds: float
    level: float
    clipped: float
    leading: float
    trailing: float
    abrupt: bool
    expected: float | None

    @property
    def warnings(self) -> list[str]:
        """Return what a caller should know, with what to do."""
        spoken = self.seconds - self.leading - self.trailing
        found = []
        if self.abrupt:
            found.append("ends inside a word, which answers may repeat: end it with a pause, or trim it")
        for place, silence in (("beginning", self.leading), ("end", self.trailing)):
            if silence > _LONG_SILENCE:
                found.append(f"has {silence:.1f} s of silence at its {place}, which answers may repeat: trim it")
        if self.clipped > _CLIPPED_SHARE:
            found.append(f"is clipped in {100 * self.clipped:.1f} % of its samples: record it with less gain")
        if self.level < _QUIET_DBFS:
            found.append(f"is quiet, {self.level:.0f} dBFS: record it louder or nearer")
        if self.expected is not None and not 1 / _LENGTH_RATIO <= spoken / self.expected <= _LENGTH_RATIO:
            found.append(
                f"speaks for {spoken:.1f} s, but its transcript takes about {self.expected:.1f} s: give the words that "
                "are spoken, all of them and no others"
            )
        return list(map("the recording {}".format, found))

    def of(self, text: str) -> "Judgement":
        """Return the same measures for another transcript."""
        return replace(self, expected=expected_seconds(text) if text else None)

    def mended(self, recording: Recording) -> Recording:
        """Return the recording with at most KEPT_SILENCE at both ends, and with as much after an abrupt end, within the
        limits of its duration."""
        if self.seconds - self.leading - self.trailing < MIN_REFERENCE_SECONDS:
            return recording
        begin, end = (round(max(0.0, each - KEPT_SILENCE) * recording.rate) for each in (self.leading, self.trailing))
        wav = recording.wav[begin : len(recording.wav) - end]
        if self.abrupt:
            room = int(MAX_REFERENCE_SECONDS * recording.rate) - len(wav)
            wav = np.append(wav, np.zeros(min(room, round(KEPT_SILENCE * recording.rate)), np.float32))
        return recording if len(wav) == len(recording.wav) else replace(recording, wav=wav)


def judge(recording: Recording) -> Judgement:
    """Return the measures of a recording that `validate_reference` has passed."""
    frame = round(_FRAME_SECONDS * recording.rate)
    frames = recording.wav[: len(recording.wav) // frame * frame].reshape(-1, frame)  # (N,) -> (frames, samples)
    levels = 20 * np.log10(np.sqrt(np.square(frames, dtype=np.float64).mean(axis=1)) + 1e-7)
    level = float(np.percentile(levels, 95))
    loud = np.flatnonzero(levels > level + _SILENT_DB)
    noise = max(float(np.percentile(levels, 5)), level + _DEEPEST_DB)
    end = float(np.mean(levels[-round(_END_SECONDS / _FRAME_SECONDS) :]))
    return Judgement(
        seconds=recording.seconds,
        level=level,
        clipped=float((np.abs(recording.wav) >= _FULL_SCALE).mean()),
        leading=float(loud[0] * _FRAME_SECONDS),
        trailing=float((len(levels) - 1 - loud[-1]) * _FRAME_SECONDS),
        abrupt=end > max(level + _END_DB, (level + noise) / 2),
        expected=expected_seconds(recording.text) if recording.text else None,
    )
