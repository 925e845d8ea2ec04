"""Validation of recordings, resampling and features equal to the training libraries, and sound files."""

import io
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
import soundfile as sf
import torch
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.voice.audio import at_rate, load_audio, load_untrusted, save_audio
from cosyvoice_triton.voice.features import MelConfig, fbank, mel_spectrogram, resample
from cosyvoice_triton.voice.prompt import validate_reference

SECOND = PROMPT_SAMPLE_RATE


def tone(samples: int, hz: float = 220.0, rate: int = PROMPT_SAMPLE_RATE) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hz / rate * np.arange(samples))).astype(np.float32)


def with_sample(value: float, index: int) -> np.ndarray:
    wav = tone(SECOND)
    wav[index] = value
    return wav


@pytest.mark.parametrize(
    ("wav", "length", "message"),
    [
        (np.zeros(0, np.float32), None, "reference_wav is empty"),
        (np.zeros(0, np.float32), 0, "reference_wav is empty"),
        (tone(SECOND), 0, r"reference_wav_len 0 is not in 1\.\.16000"),
        (tone(SECOND), -5, r"reference_wav_len -5 is not in 1\.\.16000"),
        (tone(SECOND), SECOND + 1, r"reference_wav_len 16001 is not in 1\.\.16000"),
        (tone(SECOND), 7999, "reference_wav of 7999 samples lasts 0.4999375 s"),
        (tone(100), None, "reference_wav of 100 samples lasts 0.00625 s"),
        (tone(30 * SECOND + 1), None, "reference_wav of 480001 samples lasts 30.00006 s"),
        (np.zeros(SECOND, np.float32), None, r"reference_wav is silent: its samples vary by 0\.0e\+00"),
        (np.full(SECOND, 0.5, np.float32), None, "reference_wav is silent"),
        (tone(SECOND) * 1e-5, None, r"reference_wav is silent: its samples vary by 5\.0e-06"),
        (with_sample(np.nan, 17), None, "reference_wav is nan at sample 17"),
        (with_sample(-np.inf, 400), None, "reference_wav is -inf at sample 400"),
        (np.ones(SECOND, np.int16), None, "reference_wav is int16 of shape"),
        (np.ones((2, SECOND), np.float32), None, r"reference_wav is float32 of shape \[2, 16000\]"),
        (np.float32(1), None, r"reference_wav is float32 of shape \[\]"),
        *(
            (with_sample(peak, 100), None, r"holds a sample of \S+: samples are -1..1; divide 16-bit ones by 32768")
            for peak in (5.0, 128.0, 32_767.0, 1e38, -32_768.0)
        ),
    ],
)
def test_a_bad_reference_is_rejected_with_its_name_and_value(wav, length, message):
    with pytest.raises(ValueError, match=message):
        validate_reference(np.asarray(wav), length)


@pytest.mark.parametrize("peak", [1.0, 1.4, 2.0])
def test_samples_that_decoding_lets_exceed_full_scale_are_taken(peak):
    assert validate_reference(with_sample(peak, 100)).max() == np.float32(peak)


def test_a_malformed_file_prints_no_traceback(capfd):
    """cffi prints one for each exception of a call by libsndfile, such as a seek to before the file's begin."""
    random = np.random.default_rng(0)
    for kind in ("WAV", "FLAC", "OGG", "MP3"):
        whole = io.BytesIO()
        sf.write(whole, random.standard_normal(4000) * 0.1, PROMPT_SAMPLE_RATE, format=kind)
        for _ in range(150):
            data = bytearray(whole.getvalue()[: random.integers(40, len(whole.getvalue()))])
            data[random.integers(0, 40)] = random.integers(256)
            with suppress(ValueError, RuntimeError):
                load_untrusted(bytes(data))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("padding", [0.0, np.nan, np.inf])
def test_samples_beyond_the_length_are_neither_checked_nor_used(padding):
    wav = tone(SECOND)
    padded = np.concatenate([wav, np.full(40 * SECOND, padding, np.float32)])
    np.testing.assert_array_equal(validate_reference(padded, SECOND), wav)
    batch = validate_reference(padded[None].astype(np.float64), SECOND)  # the batch dimension is removed
    assert (batch.shape, batch.dtype) == ((SECOND,), np.float32)
    with pytest.raises(ValueError, match="silent"):  # also with sound in the padding
        validate_reference(np.concatenate([np.zeros(SECOND, np.float32), wav]), SECOND)


@pytest.mark.parametrize("seconds", [0.5, 30.0])
def test_recordings_of_exactly_the_limits_are_allowed(seconds):
    samples = int(seconds * SECOND)
    assert validate_reference(tone(samples)).shape == (samples,)


@pytest.mark.parametrize(
    ("from_rate", "to_rate"), [(8000, 16000), (44100, 16000), (48000, 16000), (16000, 24000), (22050, 16000)]
)
@pytest.mark.parametrize("samples", [1, 997, 16000])
def test_resampling_keeps_the_duration(from_rate, to_rate, samples):
    resampled = resample(torch.from_numpy(tone(samples)), from_rate, to_rate)
    assert resampled.shape == (-(-samples * to_rate // from_rate),)


def test_features_of_other_sizes_follow_the_configuration():
    wav = torch.from_numpy(tone(4000))
    config = MelConfig(sample_rate=16_000, n_fft=1024, window=800, hop=200, bins=40, min_hz=50, max_hz=7600)
    assert mel_spectrogram(wav[None], config).shape == (1, 40, 20)
    assert fbank(wav, bins=23, rate=8000).shape == (48, 23)


def test_a_wave_too_short_for_features_is_rejected():
    with pytest.raises(ValueError, match="a wave of 720 samples has no mel spectrogram"):
        mel_spectrogram(torch.zeros(1, 720))
    with pytest.raises(ValueError, match="a wave of 399 samples is shorter"):
        fbank(torch.zeros(399))


def test_filters_first_used_in_inference_mode_serve_training_too() -> None:
    """They are cached for the whole process, and autograd refuses tensors made in inference mode."""
    config = MelConfig(bins=39)  # not in the cache yet
    with torch.inference_mode():
        mel_spectrogram(torch.zeros(1, SECOND), config)
        resample(torch.zeros(SECOND), PROMPT_SAMPLE_RATE, 8_000)
    wave = torch.from_numpy(tone(SECOND))[None].requires_grad_()
    mel_spectrogram(resample(wave, PROMPT_SAMPLE_RATE, 8_000), config).sum().backward()
    assert wave.grad is not None and wave.grad.abs().sum() > 0


def test_a_saved_wave_is_read_back_within_one_16_bit_step_and_within_full_scale(tmp_path):
    wav = 3 * tone(1000, rate=SAMPLE_RATE)
    save_audio(tmp_path / "a.wav", wav, SAMPLE_RATE)
    info = sf.info(tmp_path / "a.wav")
    assert (info.samplerate, info.channels, info.subtype) == (SAMPLE_RATE, 1, "PCM_16")
    np.testing.assert_allclose(load_audio(tmp_path / "a.wav", SAMPLE_RATE), wav.clip(-1, 1), atol=1 / 16384)


@pytest.mark.parametrize(("rate", "channels"), [(8000, 1), (16000, 2), (44100, 2), (48000, 6)])
def test_a_file_of_any_rate_and_channel_count_becomes_mono_at_the_requested_rate(tmp_path, rate, channels):
    """Channels are averaged: only the first one has the tone."""
    others = [np.zeros(rate)] * (channels - 1)
    sf.write(tmp_path / "a.flac", np.stack([tone(rate, rate=rate), *others], axis=1), rate)
    loaded = channels * load_audio(tmp_path / "a.flac", PROMPT_SAMPLE_RATE)
    untrusted = channels * at_rate(load_untrusted((tmp_path / "a.flac").read_bytes()), PROMPT_SAMPLE_RATE)
    np.testing.assert_array_equal(untrusted, loaded)
    assert loaded.shape == (PROMPT_SAMPLE_RATE,)
    assert loaded.dtype == np.float32
    np.testing.assert_allclose(loaded[200:-200], tone(PROMPT_SAMPLE_RATE)[200:-200], atol=4e-3)


def test_a_file_that_is_not_audio_is_an_error_naming_it(tmp_path):
    (tmp_path / "words.wav").write_text("no audio at all")
    with pytest.raises(RuntimeError, match=r"words\.wav"):
        load_audio(tmp_path / "words.wav", PROMPT_SAMPLE_RATE)


def test_files_of_clients_have_limits_by_their_header_before_they_are_decoded(tmp_path, monkeypatch):
    sf.write(tmp_path / "a.wav", tone(int(30.1 * SECOND)), SECOND)
    data = (tmp_path / "a.wav").read_bytes()
    assert load_untrusted(data, max_seconds=31).seconds == 30.1
    with pytest.raises(ValueError, match="the recording is longer than 30 s"):
        load_untrusted(data)
    monkeypatch.setattr(sf.SoundFile, "read", lambda *_, **__: pytest.fail("decoded"))
    for rate, kind, channels, message in (
        (16_001, "WAV", 1, "sample rate is 16001"),
        (3_000, "WAV", 1, "is 3000"),
        (191_975, "WAV", 1, "is 191975"),  # of no whole part of it
        (8_000, "OGG", 64, "64 channels"),
        (8_000, "WAV", 9, "9 channels"),
        (8_000, "AIFF", 1, "format AIFF"),
    ):
        sf.write(tmp_path / "a", np.zeros((800, channels)), rate, format=kind)
        with pytest.raises(ValueError, match=message):
            load_untrusted((tmp_path / "a").read_bytes())


def test_the_memory_for_decoding_does_not_grow_with_the_number_of_channels(tmp_path):
    sf.write(tmp_path / "a.flac", np.zeros((20 * SECOND, 8)), SECOND)
    data = (tmp_path / "a.flac").read_bytes()
    tracemalloc.start()
    load_untrusted(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5e6  # 1.3 MB of samples and one block; the 8 channels would be 10 MB


def test_a_registered_recording_whose_rate_needs_gigabytes_to_resample_is_an_error(tmp_path):
    sf.write(tmp_path / "a.wav", tone(48_001, rate=48_001), 48_001)
    with pytest.raises(ValueError, match="sample rate is 48001"):
        load_untrusted((tmp_path / "a.wav").read_bytes())
