"""The requests that a command line asks for."""

import argparse
from pathlib import Path

import numpy as np

from common.client.requests import add_voice_arguments
from tools.load.jobs import Jobs, add_job_arguments

ASSETS = Path(__file__).parents[1] / "assets"
MANIFEST = ("--manifest-path", str(ASSETS / "manifest.jsonl"))
ONE = ("--target-text", "Hello.", "--reference-audio", str(ASSETS / "reference_en.wav"), "--reference-text", "Words.")


def jobs_of(*options: str) -> Jobs:
    parser = argparse.ArgumentParser()
    add_voice_arguments(parser)
    add_job_arguments(parser)
    return Jobs.from_arguments(parser.parse_args(options))


def test_rows_are_repeated_in_turn_under_names_of_their_own() -> None:
    names = [job.id for job in jobs_of(*MANIFEST, "--num-requests", "3").take(7)]
    assert names == ["en-01", "zh-01", "en-02", "en-01@2", "zh-01@2", "en-02@2", "en-01@3"]


def test_every_request_asks_for_its_stages_beside_the_parameters_given() -> None:
    (job,) = jobs_of(*ONE, "--seed", "3", "--parameter", "max_tokens=212", "--parameter", "top_p=0.5").take(1)
    assert job.id == "test" and job.utterance().reference_text == "Words."
    assert job.utterance().parameters == {"seed": 3, "max_tokens": 212, "top_p": "0.5", "timeline": True}


def test_a_new_voice_is_another_recording_each_time_and_sounds_the_same() -> None:
    (job,) = jobs_of(*ONE, "--new-voices").take(1)
    (known,) = jobs_of(*ONE).take(1)
    first, second, plain = (each.utterance().reference for each in (job, job, known))
    assert first is not None and second is not None and plain is not None
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(first[:-8], plain[:-8])
    assert np.abs(first - plain).max() < 0.1


def test_the_server_s_own_voice_is_asked_for_by_the_text_alone() -> None:
    for options in (MANIFEST, ONE):
        for flag in (("--use-spk2info-cache",), ("--use-spk2info-cache", "True")):
            utterance = jobs_of(*options, *flag).take(1)[0].utterance()
            assert list(utterance.arrays()) == ["target_text"]


def test_one_registered_speaker_can_say_every_row() -> None:
    for job in jobs_of(*MANIFEST, "--speaker", "anna").take(10):
        assert job.utterance().speaker == "anna" and job.utterance().reference is None
        assert job.utterance().reference_text is None


def test_modes_without_a_transcript_send_none() -> None:
    for options in (("--cross-lingual",), ("--instruct-text", "Slowly.")):
        utterance = jobs_of(*MANIFEST, *options).take(1)[0].utterance()
        assert utterance.reference is not None and utterance.reference_text is None
