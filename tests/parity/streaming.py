"""The streaming loops: our engine compared with upstream's, chunk by chunk.

Upstream's loops have three errors that our engine does not: the DiT loop trims its cache as if the newest frames came
last, and then reuses noise; the UNet loop renders its final chunk without the streaming mask; both begin the vocoder's
source anew in every chunk. Our flows are compared up to the chunk where one of the first two (or a fixture's own
trimming) takes effect, our vocoder in the first chunk; what comes later is skipped.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from cosyvoice_triton.constants import OVERLAP_FRAMES
from cosyvoice_triton.networks.flow.dit import DiTFlow
from cosyvoice_triton.networks.flow.unet import UNetFlow
from cosyvoice_triton.token2wav.flow.dit_flow import DiTStream
from cosyvoice_triton.token2wav.gpu.noise import NoiseTape
from cosyvoice_triton.token2wav.stream import Chunk, Stream
from cosyvoice_triton.token2wav.vocoder.hift_vocoder import StreamingVocoder
from torch import Tensor

from tests.parity import flow_dit, flow_unet, hift
from tests.parity.fixture import Check, Fixture, steps_of
from tests.parity.served import LIMITS, ServedFlow, prompt_of

Outputs = Iterator[tuple[str, Tensor | None]]


def _file(fixture: Fixture, part: str) -> str:
    """The weights file of the fixture whose network has this part."""
    for name in fixture.meta["weights_files"]:
        if part in fixture.weights_meta(name)["config"]:
            return name
    raise ValueError(f"{fixture.name}: none of {fixture.meta['weights_files']} describes a {part!r}")


def _open(fixture: Fixture, network: DiTFlow | UNetFlow, mel: str) -> tuple[ServedFlow, Stream]:
    served = ServedFlow(fixture, network, fixture["in/rand_noise"], steps_of(fixture))
    prompt = prompt_of(fixture["in/prompt_token"].reshape(-1), fixture[mel][0], fixture["in/embedding"][0])
    return served, served.open(prompt)


def _tokens(fixture: Fixture, call: dict[str, Any]) -> Tensor:
    first, end = call["token"]
    return fixture["in/token"].reshape(-1)[first:end]


def _first_speech(fixture: Fixture, mel: Tensor) -> Tensor:
    """The audio (1, N) of a stream's first mel frames (80, T), with the fixture's noise."""
    network = hift.build(fixture, _file(fixture, "hift")).to(fixture.device).body_to(fixture.dtype)
    vocoder = StreamingVocoder(network, NoiseTape(fixture["in/noise_table"].to(fixture.device)), limits=LIMITS)
    chunk = Chunk(Stream(vocoder=vocoder.open()), np.zeros(0, np.int64), False, 0, 0, 0)
    (speech,) = vocoder.begin([chunk], [mel.to(vocoder.pool.mel.device)])()
    assert isinstance(speech, Tensor), speech
    return speech[None]


def _compared(fixture: Fixture, mels: dict[str, Tensor]) -> Outputs:
    """mels: those of the chunks that both render by the same rules, by their keys; the rest is skipped."""
    yield from ((key, mel[None]) for key, mel in mels.items())
    key, mel = next(iter(mels.items()))
    if fixture.dtype != torch.float32:  # a mel's error of 1e-3 moves f0, whose integral over the chunk is the phase
        mel = fixture[key][0]
        fixture.computed_by = "engine, of the stored mel"
    compared = f"out/{key.split('/')[1]}/speech"
    yield compared, _first_speech(fixture, mel)
    yield from ((key, None) for key in sorted(fixture.outputs - {compared}))


def check_dit(fixture: Fixture) -> Outputs:
    """token2wav_dit: chunks until the engine or upstream starts from a trimmed cache."""
    served, stream = _open(fixture, flow_dit.build(fixture, _file(fixture, "dit")), "in/prompt_mel")
    assert isinstance(stream, DiTStream)
    mels = {}
    for call in fixture.meta["calls"]:
        mels[f"mid/{call['tag']}/mel"] = served.chunk(stream, _tokens(fixture, call), final=call["last_chunk"])
        whole = call["flow_cache_frames_after_trim"] == call["flow_cache_frames_before_trim"]
        if not (whole and stream.complete):
            break
    yield from _compared(fixture, mels)


def check_unet(fixture: Fixture) -> Outputs:
    """token2wav: chunks until upstream renders one without the streaming mask. A chunk's stored mel begins with the
    frames that the vocoder gets again."""
    served, stream = _open(fixture, flow_unet.build(fixture, _file(fixture, "estimator")), "in/prompt_feat")
    mels, mel = {}, torch.zeros(fixture["in/prompt_feat"].shape[2], 0)
    for call in fixture.meta["calls"]:
        if not call["stream"]:
            break
        tokens, offset = _tokens(fixture, call), call["token_offset"]
        added = served.chunk(stream, tokens, final=call["finalize"], offset=offset).cpu().float()
        mel = torch.cat([mel[:, -OVERLAP_FRAMES:], added], dim=1)
        mels[f"mid/{call['tag']}/vocoder_mel"] = mel
    yield from _compared(fixture, mels)


CHECKS: dict[str, Check] = {
    "item8b_dit_streaming_token2wav": check_dit,
    "item8c_cosyvoice2_streaming_token2wav": check_unet,
}
