"""Upstream's own code on given inputs: python upstream_program.py REPOSITORY CHECKPOINT LLM_FILE GIVEN.npz FOUND.npz

Run by the Python of upstream's installation, so nothing of this package is imported. REPOSITORY is a checkout of
CosyVoice (with `third_party/Matcha-TTS`) or of Step-Audio2, or a folder of a package with the same modules.

given: text (n,) and prompt_tokens (p,) of the LLM, tokens (N,) that it is made to speak, mel (2p, 80), embedding
    (192,), flow_noise (80, T), source_noise (S, harmonics + 1); texts: what `text` was made from, encoded part by part
found: text, log_probabilities (N + 1, speech ids), flow_noise (80, T) as upstream draws it, mel (80, 2N), wave (960 N,)
    what cannot be computed is left out and named on standard output
"""

import inspect
import os
import sys
from typing import Any
from unittest import mock

import numpy as np
import torch

CONFIGURATIONS = "cosyvoice3.yaml", "cosyvoice2.yaml", "flow.yaml"
MAX_RATIO = 1e6  # of speech to text tokens: the given tokens end the answer


class Forced:
    """A sampler that keeps the log-probabilities and returns given tokens, then the end."""

    def __init__(self, tokens: list, end: int) -> None:
        self.tokens = [*tokens, end]
        self.found: list = []

    def __call__(self, log_probabilities: torch.Tensor, *others: Any) -> torch.Tensor:
        self.found.append(log_probabilities.reshape(-1).clone())
        return torch.tensor([self.tokens[len(self.found) - 1]])


def networks(folder: str) -> dict:
    """Return the names that the checkpoint's configuration defines, as upstream's classes read it."""
    import transformers
    from hyperpyyaml import load_hyperpyyaml

    # The LLM's file has all weights: those of the text model, which upstream loads first, need not be there.
    def made(path: str, **_: Any) -> Any:
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config.from_pretrained(path))

    setattr(transformers.Qwen2ForCausalLM, "from_pretrained", made)  # noqa: B010  # for mypy
    name = next(each for each in CONFIGURATIONS if os.path.isfile(f"{folder}/{each}"))
    given = {} if name == "flow.yaml" else {"qwen_pretrain_path": f"{folder}/CosyVoice-BlankEN"}
    with open(f"{folder}/{name}") as file:
        found = load_hyperpyyaml(file, overrides=given)
    if "hift" not in found:
        from flashcosyvoice.modules.hifigan import HiFTGenerator

        found["hift"] = HiFTGenerator()
    return found


def load(network: Any, path: str) -> Any:
    state = torch.load(path, map_location="cpu", weights_only=True)
    network.load_state_dict({key.replace("generator.", ""): value for key, value in state.items()}, strict=True)
    return network.float().eval()


def log_probabilities(llm: Any, given: dict) -> np.ndarray:
    """Return those of the given tokens and of what follows them, (N + 1, speech ids)."""
    llm.sampling = Forced(given["tokens"].tolist(), llm.speech_token_size)
    text, speech = (torch.from_numpy(given[name])[None] for name in ("text", "prompt_tokens"))
    parts = [text, text[:, :0], speech]
    lengths = [torch.tensor([part.shape[1]], dtype=torch.int32) for part in parts]
    embedding = torch.from_numpy(given["embedding"])[None]
    pairs = [each for pair in zip(parts, lengths) for each in pair]  # noqa: B905  # upstream runs on Python 3.9, too
    list(llm.inference(*pairs, embedding, max_token_text_ratio=MAX_RATIO, min_token_text_ratio=0))
    return torch.stack(llm.sampling.found).numpy()


def mel_of(flow: Any, given: dict) -> torch.Tensor:
    """Return the mel (80, 2N) of the given tokens."""
    flow.decoder.rand_noise = torch.from_numpy(given["flow_noise"])[None]
    known = inspect.signature(flow.inference).parameters
    options = {name: value for name, value in (("streaming", False), ("finalize", True)) if name in known}
    rows = [torch.from_numpy(given[name])[None] for name in ("tokens", "prompt_tokens", "mel")]
    inputs = [each for row in rows for each in (row, torch.tensor([row.shape[1]], dtype=torch.int32))]
    mel = flow.inference(*inputs, torch.from_numpy(given["embedding"])[None], **options)
    return mel[0] if isinstance(mel, tuple) else mel


def wave_of(hift: Any, mel: torch.Tensor, noise: np.ndarray) -> np.ndarray:
    """Return the audio (480 T,) of a mel (1, 80, T), with the given noise in the harmonic source."""
    drawn = torch.from_numpy(noise)[None]
    for module in hift.modules():
        if hasattr(module, "sine_waves"):  # CosyVoice3's table
            module.sine_waves[:, : drawn.shape[1]] = drawn

    def randn_like(x: torch.Tensor, **_: Any) -> torch.Tensor:
        return drawn[:, : x.shape[1]] if x.shape[2:] == drawn.shape[2:] else torch.zeros_like(x)

    with mock.patch("torch.randn_like", randn_like):
        found = hift.inference(speech_feat=mel) if hasattr(hift, "inference") else hift(speech_feat=mel)
    return np.asarray(found[0].reshape(-1))


@torch.inference_mode()
def main(repository: str, folder: str, llm_file: str, given_path: str, written: str) -> None:
    sys.path[:0] = [repository, os.path.join(repository, "third_party", "Matcha-TTS")]
    given, found = dict(np.load(given_path)), dict[str, np.ndarray]()
    parts = networks(folder)
    steps: dict = {}
    if "llm" in parts:
        own = parts["flow"].decoder.rand_noise  # seeded; Step-Audio2's is not
        steps["flow_noise"] = lambda: own[0, :, : given["flow_noise"].shape[1]].numpy()
        steps["text"] = lambda: np.concatenate(
            [parts["get_tokenizer"]().encode(each, allowed_special="all") for each in given["texts"].tolist()]
        )
        steps["log_probabilities"] = lambda: log_probabilities(load(parts.pop("llm"), f"{folder}/{llm_file}"), given)
    steps["mel"] = lambda: mel_of(load(parts["flow"], f"{folder}/flow.pt"), given)[0].numpy()
    steps["wave"] = lambda: wave_of(
        load(parts["hift"], f"{folder}/hift.pt"), torch.from_numpy(found["mel"])[None], given["source_noise"]
    )
    for name, step in steps.items():
        try:
            found[name] = step()
        except Exception as error:  # a part of upstream that is not installed must not hide the others
            sys.stdout.write(f"{name}: not computed by upstream: {type(error).__name__}: {error}\n")
    np.savez(written, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
