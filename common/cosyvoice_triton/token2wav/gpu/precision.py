"""The number formats in which the networks of token2wav compute: as settings name them, or as fast as is safe.

A network that is to compute in less than float32 is compared with float32 when it is loaded, on an utterance in a real
voice. If its error is beyond a limit, the next format is tried: bfloat16, which has float32's range, then float32.
"""

import hashlib
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cosyvoice_triton import samples
from cosyvoice_triton.config import FlowRuntime
from cosyvoice_triton.constants import EULER_STEPS, MEL_BINS, TOKEN_MEL_RATIO, TOKEN_RATE
from cosyvoice_triton.runtimes.loading import flow_runtime
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.token2wav.flow.base import FlowOptions, StreamingFlow
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.stream import NotFiniteError, VocoderState
from cosyvoice_triton.token2wav.vocoder.base import BatchVocoder, VocoderOptions
from cosyvoice_triton.voice.audio import load_recording
from cosyvoice_triton.voice.encoders import TOKENIZER_FILES, ReferenceEncoder, reference_mel
from cosyvoice_triton.voice.prompt import Prompt, Recording

logger = logging.getLogger(__name__)

NetworkName = Literal["flow", "vocoder"]
# Largest RMS error of the flow's mel and of the vocoder's audio, relative to the RMS in float32. bfloat16, the coarsest
# format in use, is at half of them or less (docs/results/speed.md); a network whose values leave a format's range
# is beyond them by far. 0.05 of a log mel's RMS is about 2.5 dB in each bin; 0.1 of the audio is noise 20 dB below it.
LIMITS: dict[NetworkName, float] = {"flow": 0.05, "vocoder": 0.1}
CODE = Path(__file__).parents[2]  # a change there may change an error


@dataclass(frozen=True)
class Precision:
    """Number formats of the flow, and of HiFT between its source and its spectrum. automatic: the networks whose
    format was not asked for by name."""

    flow: torch.dtype
    vocoder: torch.dtype
    automatic: frozenset[NetworkName] = field(default=frozenset(), compare=False)

    @classmethod
    def named(cls, flow: str, vocoder: str, device: str, runtime: FlowRuntime = "auto") -> "Precision":
        """Make it from names of torch's dtypes. "auto" is the fastest that does not harm the audio (docs/gpu.md):
        float16 on a GPU; on a CPU float32, except for a flow in torch, which uses bfloat16 if the CPU supports it.

        runtime: of the flow's estimator, as the setting names it. ValueError for bfloat16 on a GPU without it.
        """
        on_gpu = torch.device(device).type == "cuda"
        auto_flow = auto_vocoder = torch.float16 if on_gpu else torch.float32
        if not on_gpu and flow_runtime(runtime, device) == "torch" and _multiplies_bfloat16():
            auto_flow = torch.bfloat16
        names: dict[NetworkName, str] = {"flow": flow, "vocoder": vocoder}
        if on_gpu and "bfloat16" in names.values():
            _require_bfloat16(device, next(network for network, name in names.items() if name == "bfloat16"))
        automatic = frozenset(network for network, name in names.items() if name == "auto")
        return cls(_dtype(flow, auto_flow), _dtype(vocoder, auto_vocoder), automatic)

    @torch.inference_mode()
    def checked(
        self,
        stack: Stack,
        model_dir: str | Path,
        device: str,
        *,
        limits: BatchLimits,
        steps: int = EULER_STEPS,
        notes: Path | None = None,
    ) -> "Precision":
        """Return this precision, with bfloat16 or float32 for each automatic network whose error is beyond its limit.
        One that was asked for by name stays, with a warning. One network is loaded at a time, without CUDA graphs.

        notes: a folder that outlives the process. What has passed there is not compared again, for as long as the
        checkpoint, the GPU, torch and this package are the same; what has not is, with its warnings, at every start.
        ValueError naming the file if its network's output is not finite in a precision that was asked for.
        """
        if self.flow == self.vocoder == torch.float32:
            return self
        note = None
        if notes and len(self.automatic) == 2:  # by name, a network keeps a format that it fails, with a warning
            note = notes / f"precision-{self._circumstances(stack, Path(model_dir), device, steps)}"
            if os.path.exists(note):  # Path.exists raises where the folder may not be entered
                return self
        one = replace(limits, max_streams=1)
        flow_path, hift_path = Path(model_dir) / stack.flow, Path(model_dir) / stack.hift

        def mel(dtype: torch.dtype) -> Tensor:
            options = FlowOptions(
                stack=stack,
                device=device,
                dtype=dtype,
                runtime="torch",
                steps=steps,
                limits=one,
                prompt_cache_bytes=1 << 30,
                retries=False,  # a voice that needs it does so for every new stream
            )
            try:
                return _mel(resolve_name(stack.loader)(flow_path, options), prompt, tokens)
            except NotFiniteError:  # the voice's prompt cache
                return torch.full((MEL_BINS, 1), torch.nan, device=device)

        def audio(dtype: torch.dtype) -> Tensor:
            options = VocoderOptions(device=device, dtype=dtype, limits=one, graphs=False)
            vocoder: BatchVocoder = resolve_name(stack.vocoder_loader)(hift_path, options)
            return vocoder.whole([exact_mel])[0]  # the same mel for both formats, and so the same source

        prompt, tokens = _utterance(stack, model_dir)
        exact_mel = mel(torch.float32)
        flow = self._format("flow", flow_path, device, mel, exact_mel)
        vocoder = self._format("vocoder", hift_path, device, audio, None)
        if torch.device(device).type == "cuda":
            torch.cuda.empty_cache()
        made = replace(self, flow=flow, vocoder=vocoder)
        if note and made == self:
            with suppress(OSError):  # the next start takes longer
                note.parent.mkdir(parents=True, exist_ok=True)
                note.touch()
        return made

    def _circumstances(self, stack: Stack, model_dir: Path, device: str, steps: int) -> str:
        """Return a digest of all that a comparison depends on."""
        paths = [path for path in sorted(model_dir.glob("*")) + sorted(CODE.rglob("*.py")) if path.is_file()]
        files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        gpu = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device
        all_of_it = stack, self.flow, self.vocoder, files, gpu, steps, torch.__version__
        return hashlib.sha256(repr(all_of_it).encode()).hexdigest()

    def _format(
        self,
        network: NetworkName,
        path: Path,
        device: str,
        render: Callable[[torch.dtype], Tensor],
        exact: Tensor | None,
    ) -> torch.dtype:
        """Return the number format for a network. render: its output in a format; exact: in float32, if known."""
        dtype: torch.dtype = getattr(self, network)
        automatic, limit = network in self.automatic, LIMITS[network]
        while dtype != torch.float32:
            exact, rounded = render(torch.float32) if exact is None else exact, render(dtype)
            error = float((rounded - exact).norm() / exact.norm())
            found = f"{path} in {dtype}: RMS error {error:.1e} of a fixed utterance, limit {limit:g}"
            if error <= limit:  # not if it is NaN
                logger.info("%s", found)
                return dtype
            if not automatic:
                if not rounded.isfinite().all():
                    raise ValueError(f"{found}: set {network}_precision to auto or float32")
                logger.warning("%s; %s_precision asks for it", found, network)
                return dtype
            dtype = torch.bfloat16 if dtype == torch.float16 and _has_bfloat16(device) else torch.float32
            logger.warning("%s: the %s computes in %s", found, network, str(dtype).removeprefix("torch."))
        return dtype


def kept_notes() -> Path:
    """Return the folder where Triton keeps compiled kernels, for `Precision.checked`: users keep it between starts."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return Path(os.environ.get("TRITON_CACHE_DIR") or f"{home}/.triton/cache")


def _utterance(stack: Stack, model_dir: str | Path) -> tuple[Prompt, np.ndarray]:
    """Return two seconds of a recording as the prompt, and the tokens of the next one as what is spoken. Without the
    checkpoint's encoders, as in tests, tokens and x-vector are random."""
    recording = load_recording(samples.FOLDER / "reference_en.wav")
    first, second = (
        Recording(recording.wav[at * recording.rate :][: length * recording.rate], rate=recording.rate)
        for at, length in ((0, 2), (2, 1))
    )
    if any(Path(model_dir).glob(TOKENIZER_FILES)):
        encode = ReferenceEncoder(stack, model_dir)
        return encode(first), encode(second).tokens
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1 << 31, 3 * TOKEN_RATE)
    mel = reference_mel(first, stack.mel_max_hz)[: 2 * TOKEN_MEL_RATIO * TOKEN_RATE]
    return Prompt(tokens[: 2 * TOKEN_RATE], mel, rng.standard_normal(192).astype(np.float32), text=""), tokens[
        2 * TOKEN_RATE :
    ]


def _mel(flow: StreamingFlow, prompt: Prompt, tokens: np.ndarray) -> Tensor:
    """Return the mel (80, T) float32 of what is spoken in a voice."""
    ids = replace(prompt, tokens=prompt.tokens % flow.vocab_size, embedding=prompt.embedding[: flow.speaker_dim])
    stream = flow.open(ids, VocoderState(0))
    return flow.render([flow.chunk(stream, tokens % flow.vocab_size, final=True)])[0].float().clone()


def _dtype(name: str, auto: torch.dtype) -> torch.dtype:
    return auto if name == "auto" else getattr(torch, name)


def _has_bfloat16(device: str) -> bool:
    """Return whether the device computes in bfloat16, however slowly."""
    return torch.device(device).type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def _require_bfloat16(device: str, network: NetworkName) -> None:
    if not _has_bfloat16(device):
        major, minor = torch.cuda.get_device_capability(device)
        raise ValueError(
            f"{network}_precision bfloat16: a GPU of compute capability {major}.{minor} does not compute in it, only "
            "those of 8.0 and later; set auto or float16"
        )


def _multiplies_bfloat16() -> bool:
    """Return whether this CPU has bfloat16 instructions. Without them every value is converted: slower than float32."""
    has = torch.cpu.get_capabilities()
    return any(has.get(name, False) for name in ("avx512_bf16", "amx_bf16"))
