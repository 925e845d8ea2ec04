"""docker-compose.cosyvoice3.yml with cpu.yml and random.yml: small random weights, whose speech is noise."""

import base64
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cosyvoice_triton.client.utterance import Utterance, of_recording, read_reference

from tests.containers.project import SECONDS, Project, wait_for
from tests.support.server_requests import VOICE, VOICE_TEXT, assert_speech, stream

MODEL = "cosyvoice3"
USER = 1001  # of the image


@pytest.mark.extended
def test_random_weights_answer_over_grpc_and_the_speech_api(project: Callable[..., Project], tmp_path: Path) -> None:
    models = tmp_path / "models"  # the other stacks' volume has the demo checkpoint
    models.mkdir()
    os.chown(models, USER, USER)
    files = "docker-compose.cosyvoice3.yml", "deploy/compose/cpu.yml", "deploy/compose/random.yml"
    cosyvoice3 = project(*files, MODELS_DIR=str(models))
    cosyvoice3.up()
    wait_for("cosyvoice3, until all are healthy", lambda: all(map(cosyvoice3.healthy, ("tts", "gateway", "speech"))))
    utterance = Utterance("Hello there.", reference_text=VOICE_TEXT, **of_recording(read_reference(VOICE)))
    assert_speech(stream(f"127.0.0.1:{cosyvoice3.ports['GRPC_PORT']}", MODEL, utterance, SECONDS))
    recording = base64.b64encode(VOICE.read_bytes()).decode()
    status, audio = cosyvoice3.say(ref_audio=recording, ref_text=VOICE_TEXT)
    assert status == 200 and audio[:4] == b"RIFF" and len(audio) > 5_000
