"""The prompt encoders as other models of the same Triton, through an injected `call`."""

import asyncio

import numpy as np

from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.errors import LostAnswerError
from cosyvoice_triton.orchestrator.token2wav_port import Call
from cosyvoice_triton.voice.audio import at_rate
from cosyvoice_triton.voice.encoders import reference_mel
from cosyvoice_triton.voice.prompt import Recording


class TritonPromptEncoder:
    """Calls `audio_tokenizer` and `speaker_embedding`, answered from the response cache for a known recording.

    `first_speech_id`: id of <|s_0|> in the LLM's vocabulary; tokens travel between models as ids of the LLM.
    `mel_max_hz`: see `Stack`.
    """

    def __init__(self, call: Call, first_speech_id: int, mel_max_hz: float):
        self._call = call
        self._first_speech_id = first_speech_id
        self._mel_max_hz = mel_max_hz
        # The first call loads the filters: not in a request.
        reference_mel(Recording(np.zeros(PROMPT_SAMPLE_RATE, np.float32)), mel_max_hz)

    async def tokens(self, recording: Recording) -> np.ndarray:
        tokens = await self._ask("audio_tokenizer", recording, "prompt_speech_tokens")
        return tokens.reshape(-1).astype(np.int64) - self._first_speech_id

    async def mel(self, recording: Recording) -> np.ndarray:
        return await asyncio.to_thread(reference_mel, recording, self._mel_max_hz)

    async def embedding(self, recording: Recording) -> np.ndarray:
        return (await self._ask("speaker_embedding", recording, "prompt_spk_embedding")).reshape(-1)

    async def _ask(self, model: str, recording: Recording, output: str) -> np.ndarray:
        """Return `model`'s `output` for a recording. Only the recording is sent, so that equal ones hit the cache."""
        wav = recording.wav
        if recording.rate != PROMPT_SAMPLE_RATE:  # else a thread would take longer than the work
            wav = await asyncio.to_thread(at_rate, recording, PROMPT_SAMPLE_RATE)
        inputs = {"reference_wav": wav[None], "reference_wav_len": np.array([[len(wav)]], np.int32)}
        try:
            return (await self._call(model, inputs, [output]))[output]
        except LostAnswerError:  # the response cache keeps a failure: padding makes it a different request
            padded = inputs | {"reference_wav": np.pad(wav, (0, 1))[None]}
            return (await self._call(model, padded, [output]))[output]
