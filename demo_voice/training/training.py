"""Code shared by all stages: a training run with a time limit and weight averaging.

The networks are small, and a GPU would wait for Python most of the time: steps are captured as CUDA graphs.
"""

import logging
import math
import random
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

logger = logging.getLogger(__name__)

REPORT_STEPS = 50  # reading a loss synchronises with the device
SAVE_SECONDS = 60.0
EMA_DECAY = 0.999
WARM_UP = 0.03  # share of the time
LAST_RATE = 0.03  # of the peak learning rate
STEPS_BEFORE_CAPTURE = 3  # they tune convolutions, plan FFTs and create constants and optimizer states


def prepare(device: str | torch.device, seed: int) -> torch.device:
    """Set fixed seeds, TF32 and cuDNN's autotuning, which pays off as training has few shapes; return the device.

    On a GPU the current stream becomes a new one, because the default stream cannot be captured.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    chosen = torch.device(device)
    if chosen.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(chosen))
    return chosen


def autocast(device: torch.device) -> AbstractContextManager[None]:
    """bfloat16 on a GPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@contextmanager
def exact_inference() -> Iterator[None]:
    """Context for running trained networks over all speech: no TF32, as in serving, since other rounding would change a
    few tokens; no gradients; and no autotuning, which is not worth it for hundreds of lengths."""
    backends = torch.backends
    tf32 = backends.cuda.matmul.allow_tf32
    backends.cuda.matmul.allow_tf32 = False
    try:
        with backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False), torch.no_grad():
            yield
    finally:
        backends.cuda.matmul.allow_tf32 = tf32


def adamw(parameters: Any, rate: float, weight_decay: float = 0.01) -> torch.optim.AdamW:
    """AdamW. rate: peak of `TrainingRun`'s schedule; parameter groups may have their own."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=weight_decay, fused=True)
    for group in optimizer.param_groups:
        device = group["params"][0].device
        # A tensor, because a captured number could not change.
        group.update(lr=torch.tensor(group["lr"], device=device), capturable=device.type == "cuda")
    return optimizer


def descend(loss: Tensor, optimizer: torch.optim.Optimizer, clip: float) -> None:
    """One optimizer step, with the gradient's norm clipped at `clip`; no step if the gradient is not finite."""
    optimizer.zero_grad(set_to_none=True)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    loss.backward(inputs=parameters)
    norm = torch.nn.utils.clip_grad_norm_(parameters, clip)
    optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]  # read by the fused kernel
    optimizer.step()


class CapturedStep:
    """A training step captured as one CUDA graph per value of its arguments, which determine all shapes.

    step: draws its batch, trains on it, and returns losses by name. It must not wait for the device, and must not draw
    random numbers on the host, which would be the same in every replay. On a CPU nothing is captured.
    """

    def __init__(self, step: Callable[..., dict[str, Tensor]], device: torch.device) -> None:
        self._step = step
        self._captures = device.type == "cuda"
        self._taken: dict[tuple[Hashable, ...], int] = {}
        self._graphs: dict[tuple[Hashable, ...], tuple[torch.cuda.CUDAGraph, dict[str, Tensor]]] = {}
        # One memory pool for all graphs: only the losses of the latest step are read outside of them.
        self._memory = torch.cuda.graph_pool_handle() if self._captures else None

    def __call__(self, *key: Hashable) -> dict[str, Tensor]:
        self._taken[key] = taken = self._taken.get(key, 0) + 1
        if not self._captures or taken <= STEPS_BEFORE_CAPTURE:
            return self._step(*key)
        if key not in self._graphs:
            self._graphs[key] = self._capture(key)
        graph, losses = self._graphs[key]
        graph.replay()
        return losses

    def _capture(self, key: tuple[Hashable, ...]) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor]]:
        begun = time.monotonic()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may copy data to the device meanwhile.
        stream = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, self._memory, stream, capture_error_mode="thread_local"):
                losses = self._step(*key)
        except RuntimeError:
            logger.exception("a step %s cannot be captured", key or "")
            raise
        logger.info("captured a step %s in %.1f s", key or "", time.monotonic() - begun)
        return graph, losses


class TrainingRun:
    """Iterates over steps until `seconds` have passed, and yields the share of them, 0..1.

    The running average of the weights of `network` is the result, written to `path` every minute and at the end. If
    there is a file already, `network` begins with its weights.
    """

    def __init__(self, path: Path, seconds: float, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._path = path
        self._seconds = seconds
        self._groups = optimizer.param_groups
        self._peaks = [float(group["lr"]) for group in self._groups]
        if path.is_file():
            network.load_state_dict(trained(path), strict=False)  # it has no buffers
        self._source = {name: parameter.detach() for name, parameter in network.named_parameters()}
        self._average = {name: parameter.clone() for name, parameter in self._source.items()}
        self._steps = 0
        self._losses: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[float]:
        begun = saved = time.monotonic()
        spent = 0.0
        with tqdm(total=round(self._seconds), desc=self._path.stem, unit="s", mininterval=5) as bar:
            while spent < self._seconds:
                share = spent / self._seconds
                self._set_rates(share)
                yield share
                self._follow()
                spent = time.monotonic() - begun
                bar.update(min(int(spent), bar.total) - bar.n)
                if self._steps % REPORT_STEPS == 0:
                    bar.set_postfix_str(self._report())
                    if time.monotonic() > saved + SAVE_SECONDS:
                        saved = time.monotonic()
                        self._save()
        self._save()
        tqdm.write(f"{self._path.stem}: {self._report()}")

    def _save(self) -> None:
        work = self._path.with_suffix(".part")  # a call that ends meanwhile leaves the file before
        torch.save(self._average, work)
        work.replace(self._path)

    def losses(self, **losses: Tensor) -> None:
        """Set this step's losses, for the progress bar."""
        self._losses = losses

    def _set_rates(self, share: float) -> None:
        rise = min(1.0, share / WARM_UP + 1e-3)
        fall = 0.5 * (1 + math.cos(math.pi * max(0.0, share - WARM_UP) / (1 - WARM_UP)))
        for group, peak in zip(self._groups, self._peaks, strict=True):
            group["lr"].fill_(peak * rise * (LAST_RATE + (1 - LAST_RATE) * fall))

    @torch.no_grad()
    def _follow(self) -> None:
        self._steps += 1
        decay = min(EMA_DECAY, self._steps / (self._steps + 10))
        torch._foreach_lerp_(list(self._average.values()), [self._source[name] for name in self._average], 1 - decay)

    def _report(self) -> str:
        return " ".join([f"{self._steps} steps", *(f"{name} {loss.item():.3f}" for name, loss in self._losses.items())])


def trained(path: Path) -> dict[str, Tensor]:
    """The averaged weights in the file of a `TrainingRun`, float32 on the CPU."""
    return torch.load(path, map_location="cpu", weights_only=True)


def rounded(path: Path) -> dict[str, Tensor]:
    """The same as it is exported: matrices in half precision."""
    return {key: value.half().float() if value.ndim > 1 else value for key, value in trained(path).items()}
