"""The requests built from the options of a command line."""

import argparse

import numpy as np
import pytest
from cosyvoice_triton import samples
from cosyvoice_triton.client.arguments import add_voice_arguments
from cosyvoice_triton.constants import TOKEN_RATE
from cosyvoice_triton.load.jobs import Jobs, add_job_arguments
from cosyvoice_triton.text.segments import expected_seconds

MANIFEST = ("--manifest-path", str(samples.MANIFEST))
VOICE = ("--reference-audio", str(samples.FOLDER / "reference_en.wav"), "--reference-text", "Words.")
ONE = ("--target-text", "Hello.", *VOICE)


def jobs_of(*options: str) -> Jobs:
    parser = argparse.ArgumentParser()
    add_voice_arguments(parser)
    add_job_arguments(parser)
    return Jobs.from_arguments(parser.parse_args(options))


def test_rows_are_repeated_in_order_with_distinct_names() -> None:
    names = [job.id for job in jobs_of(*MANIFEST, "--num-requests", "3").take(7)]
    assert names == ["en-01", "zh-01", "en-02", "en-01@2", "zh-01@2", "en-02@2", "en-01@3"]


def test_every_request_has_the_timeline_parameter_besides_the_given_ones() -> None:
    (job,) = jobs_of(*ONE, "--seed", "3", "--parameter", "max_tokens=212", "--parameter", "top_p=0.5").take(1)
    assert job.id == "test" and job.utterance().reference_text == "Words."
    assert job.utterance().parameters == {"seed": 3, "max_tokens": 212, "top_p": "0.5", "timeline": True}


def test_a_new_voice_is_a_recording_of_its_own_length_in_every_request() -> None:
    (job,) = jobs_of(*ONE, "--new-voices").take(1)
    (known,) = jobs_of(*ONE).take(1)
    first, second, plain = (each.utterance().reference for each in (job, job, known))
    assert first is not None and second is not None and plain is not None
    assert not np.array_equal(first, second)
    assert 0.9 * plain.size <= first.size <= plain.size
    np.testing.assert_array_equal(first[:-8], plain[: first.size - 8])
    assert 0 < np.abs(first - plain[: first.size]).max() <= 1e-3


def test_a_request_for_the_default_voice_has_only_the_text() -> None:
    for options in (MANIFEST, ONE):
        for flag in (("--use-spk2info-cache",), ("--use-spk2info-cache", "True")):
            utterance = jobs_of(*options, *flag).take(1)[0].utterance()
            assert list(utterance.arrays()) == ["target_text"]


def test_a_registered_speaker_replaces_the_recording_of_every_row() -> None:
    for job in jobs_of(*MANIFEST, "--speaker", "anna").take(10):
        assert job.utterance().speaker == "anna" and job.utterance().reference is None
        assert job.utterance().reference_text is None


def test_cross_lingual_and_instructed_requests_have_no_transcript() -> None:
    for options in (("--cross-lingual",), ("--instruct-text", "Slowly.")):
        utterance = jobs_of(*MANIFEST, *options).take(1)[0].utterance()
        assert utterance.reference is not None and utterance.reference_text is None


def test_a_realistic_load_has_answers_of_1_to_30_s_new_voices_and_cancelled_requests() -> None:
    jobs = jobs_of(*MANIFEST, "--realistic").take(1000)
    seconds = [int(job.base.parameters["max_tokens"]) / TOKEN_RATE for job in jobs]
    assert min(seconds) < 2 and max(seconds) > 29 and np.mean(seconds) == pytest.approx(15.5, rel=0.1)
    assert all(expected_seconds(job.base.target_text) > of - 0.1 for job, of in zip(jobs, seconds, strict=True))
    left = [job.cancel_after / of for job, of in zip(jobs, seconds, strict=True) if job.cancel_after is not None]
    assert 70 < len(left) < 130 and 0 < min(left) < 0.2 and 0.8 < max(left) <= 1.1, "while they are heard"
    assert 30 < sum(job.new_voice for job in jobs) < 70
