"""The speech service's times of words, on recordings from which no number of its estimate was chosen."""

import re

import numpy as np
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.demo_checkpoint import TRAINED
from cosyvoice_triton.speech_service.audio.word_times import word_times
from cosyvoice_triton.voice.audio import load_audio
from pocketsphinx import Decoder


def test_estimated_times_of_words_are_near_those_that_pocketsphinx_aligns() -> None:
    decoder, away = Decoder(samprate=PROMPT_SAMPLE_RATE, loglevel="FATAL", lm=None), []
    for path in sorted((TRAINED / "voices").glob("*.wav")):
        text = path.with_suffix(".txt").read_text(encoding="utf-8").strip()
        said = re.findall("[a-z]+", text.lower())
        decoder.set_align_text(" ".join(said))
        decoder.start_utt()
        wave = load_audio(path, PROMPT_SAMPLE_RATE)
        decoder.process_raw((wave / np.abs(wave).max() * 22_000).astype(np.int16).tobytes(), full_utt=True)
        decoder.end_utt()
        segments = [(each.word.partition("(")[0], each.start_frame / 100) for each in decoder.seg()]
        aligned = [(word, start) for word, start in segments if word[0] not in "<[+"]
        estimated = word_times(text, load_audio(path, SAMPLE_RATE))
        assert [word for word, _ in aligned] == said and len(estimated) == len(said)
        away += [1000 * abs(word.start - start) for word, (_, start) in zip(estimated, aligned, strict=True)]
    assert np.median(away) < 120
