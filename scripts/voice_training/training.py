"""What all stages share: a training run that ends by the clock, averages its weights, and goes on after a stop."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

SAVE_SECONDS = 60.0
REPORT_STEPS = 50  # reading a loss waits for the device
EMA_DECAY = 0.999
WARM_UP = 0.03  # share of the time
LAST_RATE = 0.03  # of the peak learning rate


def prepare(device: str | torch.device, seed: int) -> torch.device:
    """Fixed seeds; TF32 where the GPU has it, and its convolutions tuned to the few shapes that training has."""
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    return torch.device(device)


def autocast(device: torch.device) -> AbstractContextManager[None]:
    """bfloat16 on a GPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def adamw(
    parameters: Any, rate: float, betas: tuple[float, float] = (0.9, 0.98), weight_decay: float = 0.01
) -> torch.optim.AdamW:
    """`rate`: the peak of the schedule that `Run` follows. Groups may have a rate of their own."""
    return torch.optim.AdamW(
        parameters, lr=rate, betas=betas, weight_decay=weight_decay, fused=torch.cuda.is_available()
    )


def descend(loss: Tensor, optimizer: torch.optim.Optimizer, clip: float) -> None:
    """One step down the gradient, whose norm is cut off at `clip`."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    torch.nn.utils.clip_grad_norm_(parameters, clip)
    optimizer.step()


class Run:
    """Steps until `seconds` of training have been spent, those before a stop included. Iterating gives the share.

    networks: all that is trained, by name; the running average of the one called `averaged` is what training makes.
    The file at `path` holds it under "average", with all that is needed to go on.
    """

    def __init__(
        self,
        path: Path,
        seconds: float,
        networks: Mapping[str, nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        averaged: str = "network",
    ):
        self._path = path
        self._seconds = seconds
        self._networks = networks
        self._optimizers = optimizers
        self._peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
        self._source = dict(networks[averaged].named_parameters())
        self._average = {name: parameter.detach().clone() for name, parameter in self._source.items()}
        self._spent = 0.0
        self._steps = 0
        self._losses: dict[str, Tensor] = {}
        if path.exists():
            self._resume()

    @property
    def share(self) -> float:
        """Of the time, 0..1."""
        return min(1.0, self._spent / self._seconds)

    def __iter__(self) -> Iterator[float]:
        saved = begun = time.monotonic()
        before = self._spent
        bar = tqdm(total=round(self._seconds), initial=round(before), desc=self._path.stem, unit="s", mininterval=5)
        with bar:
            while self._spent < self._seconds:
                self._set_rates()
                yield self.share
                self._follow()
                now = time.monotonic()
                self._spent = before + now - begun
                bar.update(min(int(self._spent), bar.total) - bar.n)
                if self._steps % REPORT_STEPS == 0:
                    bar.set_postfix_str(self._report())
                if now - saved > SAVE_SECONDS:
                    self.save()
                    saved = now
            bar.set_postfix_str(self._report())
        self.save()
        tqdm.write(f"{self._path.stem}: {self._steps} steps, {self._report()}")

    def losses(self, **losses: Tensor) -> None:
        """Those of this step, for the progress bar."""
        self._losses = losses

    def save(self) -> None:
        scratch = self._path.with_suffix(".partial")
        torch.save(
            {
                "average": self._average,
                "networks": {name: network.state_dict() for name, network in self._networks.items()},
                "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
                "spent": self._spent,
                "steps": self._steps,
            },
            scratch,
        )
        scratch.replace(self._path)

    def _resume(self) -> None:
        device = next(iter(self._average.values())).device
        state = torch.load(self._path, map_location=device, weights_only=True)
        self._average = state["average"]
        for name, network in self._networks.items():
            network.load_state_dict(state["networks"][name])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._spent, self._steps = state["spent"], state["steps"]

    def _set_rates(self) -> None:
        rise = min(1.0, self.share / WARM_UP + 1e-3)
        fall = 0.5 * (1 + math.cos(math.pi * max(0.0, self.share - WARM_UP) / (1 - WARM_UP)))
        for optimizer, peaks in zip(self._optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * rise * (LAST_RATE + (1 - LAST_RATE) * fall)

    @torch.no_grad()
    def _follow(self) -> None:
        self._steps += 1
        decay = min(EMA_DECAY, self._steps / (self._steps + 10))
        parameters = [self._source[name].detach() for name in self._average]
        torch._foreach_lerp_(list(self._average.values()), parameters, 1 - decay)

    def _report(self) -> str:
        return " ".join(f"{name} {loss.item():.3f}" for name, loss in self._losses.items())


def trained(path: Path) -> dict[str, Tensor]:
    """The averaged weights that a run has made so far, float32 on the CPU."""
    return torch.load(path, map_location="cpu", weights_only=True)["average"]
