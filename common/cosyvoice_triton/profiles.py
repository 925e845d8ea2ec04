"""Every tuned number of scheduling, in a named profile for each kind of machine: `h200` and `cpu`.

A model's setting `profile` chooses one; `auto` is `h200` where there is a GPU, and otherwise `cpu`. The defaults below
are those of `h200`, and nearly all of them were measured on H200s and H100s or chosen by simulation with their costs;
`cpu` names the numbers that differ. There is no profile for smaller GPUs: nothing has been measured on one, admission
measures how fast the GPU is, and hops follow from that. What their memory holds is in `GPU_PLANS`.

With `unlimited`, which is `auto` but for admission, `max_streams` is the only limit for new listeners, and a server
with more of them than it can serve leaves gaps. It is for audio that nobody listens to while it is made, for tests and
for measurements.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

ProfileName = Literal["auto", "h200", "cpu", "unlimited"]


@dataclass(frozen=True, kw_only=True)
class SchedulerNumbers:
    """How token2wav chooses the chunks of a batch, see token2wav/policy/scheduler.py."""

    # The fixed cost of a batch in tokens: 12 ms on an H200, where a token takes 0.04 ms. Measured with the DiT flow;
    # the UNet's ratio is about the same.
    batch_start_tokens: int = 300
    # A listener with this much audio left can wait. Chunks of such listeners fill a batch up to `unhurried_share` of
    # the tokens, so that a new stream waits less for them, and up to `company_share` if the batch has a first chunk. If
    # the GPU cannot keep up that way, listeners soon have less audio left, and batches grow.
    plenty_seconds: float = 1.0
    unhurried_share: float = 0.5
    company_share: float = 0.25
    # While a listener with a queued chunk has less audio left than this, one voice at a time is prefilled.
    nearly_dry_seconds: float = 0.25
    # While this many later chunks wait, first chunks do too, for a batch of `first_chunk_batch` or until one of them
    # has waited this long: eight of them take half as long again as one, and the GPU is the others' meanwhile.
    crowd_chunks: int = 16
    gather_seconds: float = 0.1
    # First chunks, or prompts, of a batch of their own: more would make the first of them wait for the last.
    first_chunk_batch: int = 8
    # Nobody listens to a whole utterance while it is rendered: it waits this long for the listeners, and after that
    # only for those who are nearly dry.
    whole_seconds: float = 5.0


@dataclass(frozen=True, kw_only=True)
class AdmissionNumbers:
    """Which new listeners token2wav admits, see token2wav/policy/admission.py.

    Chosen by simulation with the batch costs of an H200 (tests/token2wav/test_scheduler.py). Each is a share, or a time
    that listeners notice, and so holds on slower machines, too.
    """

    # A chunk waits for one batch and is rendered in the next: both fit into a player's buffer.
    batch_seconds: float = 0.1
    # The part of the measured capacity that is used: arrivals are random, and batches mix lengths.
    headroom: float = 0.72
    # The weight of the batches, or chunks, so far when another one comes.
    memory: float = 0.98
    # The most speech per second that a live stream counts for.
    max_demand: float = 1.7
    # How long a stream is taken to live until streams have ended, and at most.
    stream_seconds: float = 4.0
    # Starts at once: `burst`, a share of the limit, and one of what is free, the more the faster the tokens come.
    burst: float = 2
    burst_share: float = 0.025
    free_share: float = 0.03
    max_free_share: float = 0.2
    # A chunk that leaves less of the player's buffer nearly came too late.
    tight_seconds: float = 0.09
    # Fewer tight chunks than these, of the chunks of `settle_seconds`, are no overload.
    tight_chunks: int = 3
    tight_share: float = 0.05
    # How long a change of the limit takes to show in the listeners' audio.
    settle_seconds: float = 2.0
    # A listener without audio for this long has been left by the sender.
    abandoned_seconds: float = 5.0
    # The limit after an overload, of the streams that were too many.
    back_off: float = 0.85
    # The growth of a lowered limit per second, more each second.
    growth: float = 0.02
    averaged_seconds: float = 10.0
    # Seconds of rendering in the queue of whole utterances.
    max_whole_seconds: float = 5.0


@dataclass(frozen=True, kw_only=True)
class LimitNumbers:
    """The largest batches of token2wav, see token2wav/gpu/limits.py.

    A batch of this many tokens takes about 100 ms on an H200 (docs/results/speed.md), which bounds how long a chunk
    waits for the batch before its own. Each flow counts what it computes: new tokens (dit), or those of windows.
    """

    dit_batch_tokens: int = 2048
    unet_batch_tokens: int = 2500
    cosyvoice3_batch_tokens: int = 1000  # an estimate from its 7.4 GFLOP per frame
    max_batch: int = 64  # chunks; larger batches gain nothing


@dataclass(frozen=True, kw_only=True)
class FirstHopNumbers:
    """Which streams begin with a short first hop, see orchestrator/chunking.py."""

    # A server has slack if the slowest of so many second chunks came early enough. One chunk would be luck: every tenth
    # of a loaded server's comes early.
    measured_streams: int = 4
    # The audio that a player without a buffer has left when the second chunk comes: later chunks vary by as much.
    margin_seconds: float = 0.04
    # Streams that may wait for their second chunk after a short first hop: what a crowd that comes at once will wait
    # for, no earlier stream has measured.
    max_at_once: int = 2


@dataclass(frozen=True, kw_only=True)
class LLMNumbers:
    """When the engine `cuda` prefills, steps and reports, see llm/engines/cuda/scheduler.py. Measured on H200s with the
    official network's sizes; simulated in tests/llm/test_cuda_pacing.py with the times of its prefills and steps."""

    # Prompt tokens of one prefill at most; each size is a CUDA graph.
    max_prefill_tokens: int = 4096
    # Prompt tokens that are prefilled before a step: a step takes nearly as long for few requests as for many, so when
    # many begin together, their prompts come first; but those that run already must not wait for all of them.
    prefill_tokens_per_step: int = 16384
    # What a prefill counts for beside its tokens: one of few tokens takes as long as so many more.
    prefill_launch_tokens: int = 512
    # When the listeners of so many prefilled requests wait for their first chunk's tokens, no further prompts are
    # prefilled until all of them have these. Of 256 that begin together the first ones are served earlier, and the last
    # ones hardly later. Batches of 132 and of 160 requests were not faster.
    prefill_batch: int = 144
    # Steps whose tokens are read back together, unless a prompt waits or listeners wait for single tokens: each
    # read-back is work of the host.
    steps_per_readback: int = 3
    # A step of so few rows takes hardly longer than a read-back, so there the steps are always read back together.
    few_rows: int = 8
    # The first report of a request, which shows that it runs. A report takes the host half a millisecond in all
    # processes together.
    first_report_tokens: int = 3
    # Tokens that are buffered before a report at most: a second of speech.
    max_buffered_tokens: int = 25
    # How often the rows are stepped whose listeners have a first chunk to play: at ten times the rate of speech. A step
    # of many rows takes hardly longer than one of few, and in between the GPU renders other listeners' first chunks.
    decode_interval_seconds: float = 0.012
    # With more rows than this hundreds of people listen, and token2wav needs the GPU most: 6.7 times the rate of
    # speech. At four times (30 ms), tokens came so late that admission refused most newcomers.
    crowd_rows: int = 40
    crowd_decode_interval_seconds: float = 0.018
    # How long a thread waits for CPython's lock before it asks for it. The default of 5 ms delays the engine's thread
    # behind the thread that submits a crowd's prompts; 0.05 to 1 ms were equally fast.
    switch_seconds: float = 3e-4
    # A thread that submits a crowd gives way to the engine's thread each time so many requests wait. The tokenizer
    # releases CPython's lock and takes it again before the engine's thread is awake. 2, 4, 16 and 32 were slower.
    give_way_requests: int = 8
    give_way_seconds: float = 5e-5


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The numbers for one kind of machine."""

    scheduler: SchedulerNumbers = field(default_factory=SchedulerNumbers)
    admission: AdmissionNumbers = field(default_factory=AdmissionNumbers)
    limits: LimitNumbers = field(default_factory=LimitNumbers)
    first_hops: FirstHopNumbers = field(default_factory=FirstHopNumbers)
    llm: LLMNumbers = field(default_factory=LLMNumbers)


H200 = Profile()
# On a CPU the LLM's attention gathers the pages of each token, so a prefill of many tokens would take much memory.
CPU = Profile(llm=LLMNumbers(max_prefill_tokens=256))
PROFILES: Mapping[ProfileName, Profile] = {"h200": H200, "cpu": CPU}
# What the profile `unlimited` replaces: no load is too high, and nobody is ever late.
UNLIMITED = AdmissionNumbers(headroom=math.inf, burst=math.inf, tight_seconds=-math.inf)


class PlannedStreams(NamedTuple):
    """listeners: `max_streams`. gib: what all models take of the GPU, by token2wav's check with full-size networks."""

    listeners: int
    gib: float


class GpuPlan(NamedTuple):
    """What a server with everything on one GPU serves where `max_streams` is not set.

    card: the GB of the cards that it is for. prompt_device: as the setting. streams: by the name of the stack.
    """

    card: int
    prompt_device: Literal["auto", "cpu"]
    streams: Mapping[str, PlannedStreams]


def _plan(card: int, prompt_device: Literal["auto", "cpu"], **streams: tuple[int, float]) -> GpuPlan:
    return GpuPlan(card, prompt_device, {stack: PlannedStreams(*each) for stack, each in streams.items()})


# Each fits the smallest cards of its size, such as a T4 (15 GiB), an L4 (22.5) or an L40S (45), with room to spare.
# More than 96 streams of unet and 128 of cosyvoice3 have not been rendered in time on any GPU, and one orchestrator
# process serves 240 streams: for more, set both `max_streams` and `bls_instance_num`.
GPU_PLANS = (
    _plan(8, "cpu", dit=(4, 7.2), unet=(32, 7.4)),
    _plan(12, "cpu", dit=(16, 10.7), unet=(96, 8.8), cosyvoice3=(4, 10.5)),
    _plan(16, "cpu", dit=(24, 12.8), unet=(96, 8.8), cosyvoice3=(8, 12.6)),
    _plan(24, "cpu", dit=(56, 20.8), unet=(96, 8.8), cosyvoice3=(16, 18.2)),
    _plan(40, "auto", dit=(120, 37.5), unet=(96, 10.2), cosyvoice3=(40, 35.8)),
    _plan(48, "auto", dit=(144, 43.2), unet=(96, 10.2), cosyvoice3=(48, 40.8)),
    _plan(80, "auto", dit=(240, 66.0), unet=(96, 10.2), cosyvoice3=(96, 70.2)),
    _plan(141, "auto", dit=(240, 66.0), unet=(96, 10.2), cosyvoice3=(128, 90.2)),
)


def choose(name: ProfileName, device: str | None = None) -> Profile:
    """Return the profile of that name. `auto` is the one for `device`, such as "cuda:1"; without a device it is `h200`
    if there is a GPU."""
    if name == "unlimited":
        return replace(choose("auto", device), admission=UNLIMITED)
    if name != "auto":
        return PROFILES[name]
    import torch  # here: programs that only render configurations do without it

    return CPU if device == "cpu" or not torch.cuda.is_available() else H200
