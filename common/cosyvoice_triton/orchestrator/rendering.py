"""One segment of a streamed answer: its chunks as token2wav renders them, judged and without silence at its ends."""

from collections.abc import AsyncGenerator, Callable

import numpy as np

from cosyvoice_triton.audible import SilenceTrimmer
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.orchestrator.chunking import Hop, HopSchedule
from cosyvoice_triton.orchestrator.judges import Judge
from cosyvoice_triton.orchestrator.report import OnSegment, OnStage
from cosyvoice_triton.orchestrator.token2wav_port import Token2WavSequence
from cosyvoice_triton.orchestrator.token_buffer import TokenBuffer
from cosyvoice_triton.playback import Playback
from cosyvoice_triton.tasks import TaskScope
from cosyvoice_triton.voice.prompt import Prompt


class SegmentRenderer:
    """Renders a segment, and from its beginning again if it is no speech and nothing of it was sent.

    stream: the one of token2wav that is open, to be aborted by the caller. trimmer: cuts the silence at the ends, if
    that is wanted. cut: seconds of the beginning that were not sent.
    """

    def __init__(
        self, stream: Token2WavSequence, segment: TokenBuffer, trims: bool, judge: Judge, clock: Callable[[], float]
    ) -> None:
        self.stream = stream
        self._segment = segment
        self._trims = trims
        self._judge = judge
        self._clock = clock
        self._trimmer = SilenceTrimmer()

    @property
    def cut(self) -> float:
        return self._trimmer.cut / SAMPLE_RATE

    async def chunks(
        self,
        prompt: Prompt,
        schedule: HopSchedule,
        playback: Playback,
        scope: TaskScope,
        on_stage: OnStage,
        on_segment: OnSegment,
    ) -> AsyncGenerator[tuple[Hop, np.ndarray], None]:
        """Yield the hops and what is to be sent of their audio, float32 (N,)."""
        segment, final, sent, left = self._segment, False, 0, None
        self._judge.begin()
        await scope.result(self.stream.start(prompt, playback.left(self._clock())))
        on_stage("prompt_cache")
        while not final:
            hop, waveform = await scope.result(self._next_hop(schedule)), None
            if hop is not None:
                on_stage("tokens")
                waveform = await scope.result(self.stream.render(segment.tokens, hop, left))
                on_stage("audio")
            if self._judge.makes_again(segment, waveform, final=hop is not None and hop.final, sent=sent):
                schedule.restart_segment()
                scope.spawn(segment.again())
                left, self._trimmer = None, SilenceTrimmer()
                await scope.result(self.stream.restart(prompt, playback.left(self._clock())))
                continue
            if hop is None or waveform is None:
                continue
            final, cut, left = hop.final, self.cut, None
            if self._trims:
                waveform = self._trimmer.trimmed(waveform, final)
            sent += waveform.size
            if final:
                on_segment(segment.text, sent, segment.tokens)
            if waveform.size:
                yield hop, waveform
            if self.cut > cut:  # then token2wav does not know what the listener has
                schedule.cut(self.cut - cut)
                left = playback.left(self._clock()) or 0.0

    async def _next_hop(self, schedule: HopSchedule) -> Hop | None:
        """Return the next hop once its tokens are there; None if it is plain before that they are no speech."""
        # In one task of the scope: tokens come one by one, and each would cost a task.
        segment = self._segment
        while (hop := schedule.next_hop(len(segment.tokens), segment.ended)) is None:
            if self._judge.is_hopeless(segment):
                return None
            await segment.wait_for_change()
        return hop
