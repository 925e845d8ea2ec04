"""The pipeline from a request to its audio: prompt -> LLM -> chunks -> waveforms.

The parts that do the work are ports (protocols); nothing here depends on a server:

    voice -+-> speech tokens, mel --+--> LLM, its stream read into a buffer by a task --+
           +-> x-vector ------------|--> token2wav stream opened, prompt prefilled -----+--> chunks --> waveforms
    text ----> segments ------------+

Each segment of a text has its own LLM request and its own token2wav stream, both with the same voice. The LLM is at
most one segment ahead of token2wav. A text in pieces is one segment, for which the LLM has a request for each block.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from cosyvoice_triton.audible import Playback, SilenceTrimmer
from cosyvoice_triton.constants import HOP_SAMPLES, MEL_RATE, ONSET_TOKENS, SAMPLE_RATE, TOKEN_RATE
from cosyvoice_triton.errors import OverloadedError
from cosyvoice_triton.llm.interface import LLMPrompt, SpeechLM
from cosyvoice_triton.llm.interleaving import InterleavedSpeech
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.orchestrator import length
from cosyvoice_triton.orchestrator.chunking import FirstHops, HopRules
from cosyvoice_triton.orchestrator.judges import REASONS, VOICE_SECONDS, Counts, Judge, is_other_voice
from cosyvoice_triton.orchestrator.rendering import Place, SegmentRenderer, VoiceInUse
from cosyvoice_triton.orchestrator.report import UNHEARD, Events
from cosyvoice_triton.orchestrator.request import SynthesisRequest
from cosyvoice_triton.orchestrator.token2wav_port import Token2WavPort, Token2WavSequence
from cosyvoice_triton.orchestrator.token_buffer import SilenceFilter, TokenBuffer
from cosyvoice_triton.refusals import LastRefusal
from cosyvoice_triton.tasks import TaskScope
from cosyvoice_triton.text.frontend import TextFrontend
from cosyvoice_triton.text.markup import Pause
from cosyvoice_triton.text.pronunciation import combined
from cosyvoice_triton.text.segments import SentenceSplitter, expected_seconds, is_open
from cosyvoice_triton.voice.book import VoiceBook
from cosyvoice_triton.voice.judgement import Judgement, judge
from cosyvoice_triton.voice.mix import Mix
from cosyvoice_triton.voice.prompt import Prompt, PromptEncoder, Recording, RecordingCache

# Characters of text and transcript that are prepared in the event loop: 0.3 ms of a core, 2 if all are numbers. A
# thread would hold the GIL as long, and passing the text to it and back takes as long as most of this.
SHORT_TEXT = 250
# After a listener was refused, others' work waits this long for their places: at several times the capacity, what
# refusals cost would be taken from those who were admitted.
CAREFUL_SECONDS = 10.0
# In a crowd, too: while so many others begin, work waits for the places, which so many ask for at once.
CROWD = 16

SENTENCE_PAUSE = 0.2  # seconds between two segments, beside what is left of their silence
PAUSE_TOKENS = 3  # silent tokens of a pause between sentences

# The segments of a request, a pause if it ends with one, None at the end. It has one slot, so that the LLM is at most
# one segment ahead.
SegmentQueue = asyncio.Queue[TokenBuffer | Pause | None]


Instructions = Literal["none", "alone", "with transcript"]  # what an LLM follows: another one reads them aloud


class Work(NamedTuple):
    """A request while it is answered. scope: of its tasks."""

    request: SynthesisRequest
    events: Events
    scope: TaskScope


Part = tuple[TokenBuffer | None, np.ndarray]  # a segment, or None for a pause, and its audio (N,)


@dataclass(eq=False)
class Synthesizer:
    """Turns requests into audio by its ports. Requests share only the ports and the cache of prompts. Long texts are
    prepared, and voices are read, in threads.

    long_silence: speech tokens of which long runs are shortened. silent_tokens: those that are dropped at the start of
    a segment, unless its request says otherwise. judges: whether answers are judged, which those of random weights
    cannot be.
    """

    texts: TextFrontend
    voices: VoiceBook
    encoder: PromptEncoder
    llm: SpeechLM
    tokenizer: LLMTokenizer
    token2wav: Token2WavPort
    rules: HopRules
    clock: Callable[[], float] = time.monotonic
    long_silence: Collection[int] = ()
    silent_tokens: Collection[int] = ()
    judges: bool = False
    instructions: Instructions = "with transcript"

    def __post_init__(self) -> None:
        self._first_hops = FirstHops(self.rules)
        self._judged_silence = self.silent_tokens if self.judges else None
        self.judged: Counts = {(reason, again): 0 for reason in REASONS for again in (False, True)}
        self._prompts: dict[bool, RecordingCache[Prompt]] = {trimmed: RecordingCache() for trimmed in (True, False)}
        self._judgements: RecordingCache[Judgement] = RecordingCache()
        self._careful_until = -math.inf
        self.refusal = LastRefusal(self.clock)  # of listeners
        self._asking = asyncio.Semaphore(CROWD)
        self._beginning = 0  # listeners

    async def stream(self, request: SynthesisRequest, events: Events = UNHEARD) -> AsyncGenerator[np.ndarray, None]:
        """Yield waveforms (N,) float32 as they become ready. Closing the generator ends everything started for it.

        `events`: the warning comes before the last waveform if speech was cut short.

        Raises what a port raises, as soon as it does, and ValueError if the LLM returns no speech tokens.
        """
        if request.duration is not None:
            yield await self.offline(request, events)
            return
        first = self.token2wav.open(request.speed)
        renderer: SegmentRenderer | None = None
        opening = self._first_hops.open(
            played=request.played and request.has_text,
            repeatable=request.sampling.repeatable or request.speed > 1,  # then it has less audio than was measured
        )
        try:
            async with TaskScope() as scope:
                # Silent tokens that the answer may begin with, whose audio is cut.
                silent = ONSET_TOKENS if request.trim_silence and self.silent_tokens else 0
                self._beginning += 1
                try:
                    prompt, segments = await self._begin(Work(request, events, scope), first, opening.short, silent)
                finally:
                    self._beginning -= 1
                live = request.source is not None and request.source.live
                rules = replace(self.rules, strategy="equal") if live else self.rules  # longer ones come later
                schedule = rules.schedule(
                    len(prompt.tokens), self.clock, short=opening.short, silent=silent, speed=request.speed
                )
                playback, judge = Playback(), Judge(request, self._judged_silence, events.warning, self.judged)
                while (segment := await scope.result(segments.get())) is not None:
                    if (silence := _silence(segment)).size:
                        playback.add(len(silence) / SAMPLE_RATE, self.clock())
                        events.segment("", silence.size, ())
                        yield silence
                    if isinstance(segment, Pause):
                        continue
                    stream = first.following() if renderer else first
                    renderer = SegmentRenderer(stream, segment, request.trim_silence, judge, self.clock)
                    rendered = renderer.chunks(prompt, schedule, playback, scope, events)
                    async with aclosing(rendered) as chunks:
                        async for hop, waveform in chunks:
                            now = self.clock()
                            missing = max(0.0, renderer.trimmer.cut / SAMPLE_RATE - silent / TOKEN_RATE)
                            self._first_hops.sent(opening, hop, now, missing)
                            playback.add(len(waveform) / SAMPLE_RATE, now)
                            yield waveform
                    schedule.begin_segment()
        except (GeneratorExit, asyncio.CancelledError):  # its listener has left
            self.refusal.forget()
            raise
        finally:  # after the scope, and so after the LLM's request: whoever gets the place needs both
            self._first_hops.end(opening)
            await (renderer.stream if renderer else first).abort()

    async def _whole(self, segment: TokenBuffer, prompt: Prompt, work: Work) -> np.ndarray:
        """Return the audio (N,) of a segment, rendered at once."""
        await work.scope.result(segment.wait_for_end())
        work.events.stage("tokens")
        waveform = await work.scope.result(self.token2wav.offline(prompt, segment.tokens, work.request.speed))
        work.events.stage("audio")
        return waveform

    async def _makes_again(
        self, judge: Judge, segment: TokenBuffer, waveform: np.ndarray, prompt: Prompt, request: SynthesisRequest
    ) -> bool:
        """Return whether a whole segment is to be made again, also because it is not in its registered voice."""
        if judge.makes_again(segment, waveform, final=True, sent=0):
            return True
        if not self.judges or waveform.size < VOICE_SECONDS * SAMPLE_RATE or isinstance(request.voice, Recording):
            return False
        if isinstance(await asyncio.to_thread(self.voices.get, request.voice), Mix):
            return False
        embedding = await self.encoder.embedding(Recording(waveform, rate=SAMPLE_RATE))
        return is_other_voice(embedding, prompt.embedding) and judge.reports("voice", segment.text, can_again=True)

    async def _reserve(self, stream: Token2WavSequence) -> None:
        since = self.clock()
        async with self._asking:
            self.refusal.check(since)
            try:
                await stream.reserve()
            except OverloadedError as error:
                self._careful_until = self.clock() + CAREFUL_SECONDS
                self.refusal.note(error)
                raise

    async def offline(self, request: SynthesisRequest, events: Events = UNHEARD) -> np.ndarray:
        """Return the whole utterance, (N,) float32. Warns and raises like `stream`."""
        async with TaskScope() as scope:
            work = Work(request, events, scope)
            prompt, segments = await self._begin(work)
            parts, judge = list[Part](), Judge(request, self._judged_silence, events.warning, self.judged)
            while (segment := await scope.result(segments.get())) is not None:
                if (silence := _silence(segment)).size:
                    parts.append((None, silence))
                if isinstance(segment, Pause):
                    continue
                judge.begin()
                waveform = await self._whole(segment, prompt, work)
                if await scope.result(self._makes_again(judge, segment, waveform, prompt, request)):
                    scope.spawn(segment.again())
                    waveform = await self._whole(segment, prompt, work)
                    await scope.result(self._makes_again(judge, segment, waveform, prompt, request))
                parts.append((segment, waveform))
            if request.duration is not None:
                parts = await self._fitted(request.duration, parts, prompt, work)
            waveforms = []
            for part, waveform in parts:
                if part is not None and request.trim_silence:
                    waveform = SilenceTrimmer().trimmed(waveform, final=True)
                waveforms.append(waveform)
                events.segment(part.text if part else "", waveform.size, part.tokens if part else ())
            answer = np.concatenate(waveforms)
            if request.duration is not None and (misfit := length.misfit(answer.size / SAMPLE_RATE, request.duration)):
                events.warning(misfit)
            return answer

    async def _fitted(self, seconds: float, parts: list[Part], prompt: Prompt, work: Work) -> list[Part]:
        """Return the segments and pauses with the segments rendered again, at the speed that fits."""
        spoken = [waveform for segment, waveform in parts if segment is not None]
        silence = sum(waveform.size for segment, waveform in parts if segment is None)
        speed = length.fitting_speed(spoken, silence, seconds, trims=work.request.trim_silence)
        fitted = list[Part]()
        for segment, waveform in parts:
            if segment is not None:
                waveform = await work.scope.result(self.token2wav.offline(prompt, segment.tokens, speed))
            fitted.append((segment, waveform))
        return fitted

    async def _begin(
        self, work: Work, first: Token2WavSequence | None = None, short: bool = False, silent: int = 0
    ) -> tuple[Prompt, SegmentQueue]:
        """Look up or encode the voice, start the LLM as soon as its part of the prompt is ready, and reserve a place
        for the `first` stream meanwhile, if somebody hears it."""
        request, events, scope = work
        place = Place(None if first is None else partial(self._reserve, first), scope)
        if self.clock() < self._careful_until or self._beginning > CROWD:
            await place.held()
        voice, words = await scope.result(asyncio.to_thread(self._read, request))  # a network disk can hang
        used = await self._use(voice, work, place)
        instruction, continued = self._style(voice, work)
        prepare = partial(self._prepared, request, voice.text, words, events)
        in_loop = used.known is not None and len(request.target_text) + len(voice.text) <= SHORT_TEXT
        transcript, text, texts = prepare() if in_loop else await scope.result(asyncio.to_thread(prepare))
        continues = await used.llm_tokens() if continued else None
        played = request.played and first is not None
        leading = self.silent_tokens if request.trim_silence else ()
        context = None if continues is None else len(continues)
        urgent = self.rules.first_context(context, short=short, silent=silent) if played else 0
        llm_prompt = LLMPrompt("", instruction=instruction, urgent_tokens=urgent, silent_tokens=leading, played=played)
        if continues is not None:
            llm_prompt = replace(llm_prompt, prompt_text=transcript, prompt_tokens=continues)
        events.stage("voice")
        segments: SegmentQueue = asyncio.Queue(maxsize=1)
        long_silence = () if request.source is not None else self.long_silence  # a conversion keeps its pauses
        new_buffer = partial(TokenBuffer, events, partial(SilenceFilter, long_silence, leading))
        if request.has_text:
            generating = self._generate(text, texts, llm_prompt, segments, new_buffer, work)
        else:
            generating = self._generate_whole(request, llm_prompt, segments, new_buffer(0.0))
        scope.spawn(place.unless_refused(generating))
        place.ask()  # after the LLM was started
        prompt = await used.prompt()
        if used.parts and isinstance(voice, Recording):
            self._prompts[request.trim_reference].put(voice, prompt)
        await place.held()
        return prompt, segments

    async def _use(self, voice: Recording | Prompt | Mix, work: Work, place: Place) -> VoiceInUse:
        """Return the voice with its prompt, or with the tasks that compute it once there is a place."""
        request, events, scope = work
        if isinstance(voice, Prompt):
            return VoiceInUse(voice, scope, voice)
        cached = self._prompts[request.trim_reference].get(voice) if isinstance(voice, Recording) else None
        if cached is None:
            await place.held()
        source = voice
        if isinstance(voice, Recording):
            if (judgement := self._judgements.get(voice)) is None:
                judgement = await scope.result(asyncio.to_thread(judge, voice))
                self._judgements.put(voice, judgement)
            for warning in judgement.of(voice.text).warnings:
                events.warning(warning)
            source = judgement.mended(voice) if request.trim_reference else voice
            if cached is not None:
                return VoiceInUse(voice, scope, cached.of(voice))
        used = VoiceInUse(voice, scope)
        used.encode(source, self.encoder)
        return used

    def _style(self, voice: Recording | Prompt | Mix, work: Work) -> tuple[str, bool]:
        """Return the instruction that the LLM follows, and whether it continues the voice, after its transcript."""
        request, events, _ = work
        if request.source is not None:
            return "", False
        asked, own = request.instruct_text, voice.instruction
        if (asked or own) and self.instructions == "none":
            events.warning("instruct_text was left out: this LLM does not follow instructions")
            asked = own = ""
        of_request = isinstance(request.voice, Recording)
        continued = bool(voice.text) and not request.cross_lingual and (of_request or not asked)
        if continued and (asked or own) and self.instructions == "alone":
            continued = False
            events.warning(
                f"the transcript {voice.text[:40]!r} was left out: this LLM follows instructions without one only"
            )
        return asked or own, continued

    def _read(self, request: SynthesisRequest) -> tuple[Recording | Prompt | Mix, Mapping[str, str]]:
        """Return the voice, and the words with another pronunciation; none without a whole text."""
        voice = request.voice if isinstance(request.voice, Recording) else self.voices.get(request.voice)
        if not request.has_text:
            return voice, {}
        words = self.voices.pronunciation(request.voice)
        return voice, combined(request.pronunciation, words) if request.pronunciation else words

    def _prepared(
        self, request: SynthesisRequest, transcript: str, pronunciation: Mapping[str, str], events: Events
    ) -> tuple[str, str | Pause | None, Iterator[str | Pause]]:
        """Return the voice's transcript, the first of the texts and the others: none without a whole text."""
        spelled = self.texts.transcript(transcript, request.normalize)
        if not request.has_text:
            return spelled, None, iter(())
        texts = self.texts.segments(
            request.target_text,
            request.normalize,
            request.sampling.max_tokens / TOKEN_RATE,
            request.as_is,
            request.language,
            transcript,
            pronunciation,
            events.warning,
        )
        return spelled, next(texts, None), texts

    async def _generate(
        self,
        text: str | Pause | None,
        rest: Iterator[str | Pause],
        llm_prompt: LLMPrompt,
        segments: SegmentQueue,
        new_buffer: Callable[[float], TokenBuffer],
        work: Work,
    ) -> None:
        """Queue a buffer for each text, with the pauses before it, and fill it from the LLM, one after another."""
        request = work.request
        pause, left, spoken = 0.0, request.max_tokens, ""
        while text is not None:
            if isinstance(text, Pause):
                pause += text.seconds
            elif left == 0:
                work.events.warning(f"max_tokens {request.max_tokens} was reached before {text[:80]!r}")
                break
            else:
                if spoken and not pause and request.trim_silence and not is_open(spoken):
                    pause = SENTENCE_PAUSE
                segment, pause, spoken = new_buffer(pause), 0.0, text
                await segments.put(segment)
                prompt = replace(llm_prompt, target_text=text)
                used = await segment.fill(self.llm, prompt, request.sampling, left)
                left = None if left is None else left - used
                if request.carry_tone and llm_prompt.prompt_tokens:
                    words, tokens = last_sentence(text, segment.generated, self.silent_tokens)
                    llm_prompt = replace(llm_prompt, prompt_text=f"{words.strip()} ", prompt_tokens=tokens)
                llm_prompt = replace(llm_prompt, urgent_tokens=0)  # later segments' listener has audio
            text = await asyncio.to_thread(next, rest, None)
        if pause:
            await segments.put(Pause(pause))
        await segments.put(None)

    async def _generate_whole(
        self, request: SynthesisRequest, llm_prompt: LLMPrompt, segments: SegmentQueue, segment: TokenBuffer
    ) -> None:
        """Queue the only buffer of a text in pieces, or of a conversion, and fill it."""
        await segments.put(segment)
        if request.source is not None:
            await segment.read(request.source.tokens(self.encoder.tokens), "source")
        elif request.pieces is not None:
            pieces = segment.noted(request.pieces)
            speech = InterleavedSpeech(self.llm, self.tokenizer, llm_prompt, request.sampling, request.max_tokens)
            await segment.read(speech.generate(pieces), "llm")
        await segments.put(None)


def _silence(segment: TokenBuffer | Pause) -> np.ndarray:
    """Return the pause before a segment, or a pause at the end, as (N,) float32: whole frames."""
    seconds = segment.seconds if isinstance(segment, Pause) else segment.pause
    return np.zeros(round(seconds * MEL_RATE) * HOP_SAMPLES, np.float32)


def last_sentence(text: str, tokens: Sequence[int], silent: Collection[int]) -> tuple[str, list[int]]:
    """Return the last sentence of a segment and its speech ids 0..6560, from the pause that is nearest to where the
    sentence is expected to begin; all of the segment without such a pause. silent: ids of silence.
    The LLM continues it in the next segment instead of the recording: so the tone is carried."""
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
