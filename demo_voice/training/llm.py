"""Stage `llm`: a small Qwen2 from text to speech tokens, with or without a prompt.

It is trained on the utterances of `speech` and `more_speech`, many of them also as perturbed recordings (see
llm_data.py). Dropout, and random replacement of 8 % of the speech tokens in its input, limit overfitting; the
replacements also train it to recover from badly sampled tokens.

A small network that has to find its place in the text by itself leaves words out and repeats them, so two of its heads
are shown where the text of each speech token is, about. Another loss is that of the token's phones: those are right or
wrong, while many tokens would do.
"""

import json
import logging
import time
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from cosyvoice_triton.constants import SPEECH_VOCAB
from cosyvoice_triton.stacks import TokenizerRules
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from demo_voice.training import tokenizer as speech_tokenizer
from demo_voice.training.dataset import TOKEN_PHONES
from demo_voice.training.llm_data import ABSENT, UNKNOWN_PHONE, Batch, Sequences, Utterances, encoded, text_tokenizer
from demo_voice.training.phonemes import PHONES
from demo_voice.training.qwen2 import Qwen2
from demo_voice.training.training import CapturedStep, TrainingRun, adamw, autocast, descend, prepare, trained
from tests.random_weights.llm import LLMSizes, build_tokenizer, save_llm

logger = logging.getLogger(__name__)

FILE, TOKENIZER_FILE = "llm.pt", "llm_tokenizer.json"
SIZES = LLMSizes(hidden=256, layers=8, heads=8, kv_heads=2, mlp=512, tied=True, rope_theta=10_000.0)
PEAK_RATE, WEIGHT_DECAY = 2e-3, 0.05
DROPOUT = 0.1
REPLACED = 0.08
# Of the losses. That of the size keeps logits near log probabilities, whose largest are near 0: a repetition penalty,
# which divides logits, then changes likely tokens little.
WEIGHTS = {"target": 1.0, "size": 2e-3, "guide": 0.1, "phones": 0.3}
NEAR = 3.0  # text tokens: how near the guided heads are to be to the text of the next speech token
# Factor on the exported logits: the server's default temperature suits the full-size LLM; a small one needs less.
SHARPNESS = 1.35
HELD_OUT = 256  # utterances
HELD_OUT_STEPS = 500
WORKERS = 6
ALTERED_RECORDINGS = 0.4  # share of the utterances: enough for prompts, and fast


def train(work: Path, seconds: float, device: str | torch.device) -> None:
    begun = time.monotonic()
    device = prepare(device, seed=5)
    sentences = (work / "sentences.txt").read_text(encoding="utf-8").splitlines()
    tokenizer = text_tokenizer(sentences)
    tokenizer.save(str(work / TOKENIZER_FILE), pretty=False)
    utterances = _utterances(work, tokenizer, sentences, device)
    everyone = np.random.default_rng(5).permutation(len(utterances.texts))
    count = min(HELD_OUT, len(everyone) // 4)
    held_out = list(islice(Sequences(utterances, tokenizer, everyone[:count], seed=0), 2))
    data = Sequences(utterances, tokenizer, everyone[count:], seed=1)
    batches = iter(DataLoader(data, batch_size=None, num_workers=WORKERS, pin_memory=device.type == "cuda"))
    network = Qwen2(SIZES, tokenizer.get_vocab_size(), DROPOUT).to(device).train()
    phones = nn.Linear(SIZES.hidden, TOKEN_PHONES * len(PHONES), device=device)  # of the next token; for training only
    optimizer = adamw([*network.parameters(), *phones.parameters()], PEAK_RATE, weight_decay=WEIGHT_DECAY)
    left = max(1.0, seconds - (time.monotonic() - begun))  # tokenizing all the speech took a while
    run = TrainingRun(work / FILE, left, network, optimizer)
    given: dict[torch.Size, Batch] = {}  # input buffers of captured steps

    def train_step(shape: torch.Size) -> dict[str, Tensor]:
        found = losses(network, phones, _damaged(given[shape][0], data.first_speech_id), *given[shape])
        descend(torch.stack([WEIGHTS[name] * loss for name, loss in found.items()]).sum(), optimizer, clip=1.0)
        return {name: loss.detach() for name, loss in found.items()}

    captured = CapturedStep(train_step, device)
    held = torch.zeros(())
    for step, _ in enumerate(run):
        if step % HELD_OUT_STEPS == 0:
            held = _held_out_loss(network, phones, held_out, device)
        batch = next(batches)
        shape = batch[0].shape
        if shape not in given:
            ids, target, places, labels = (tensor.to(device) for tensor in batch)
            given[shape] = (ids, target, places, labels)
        for buffer, tensor in zip(given[shape], batch, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        run.losses(**captured(shape), held_out=held)


def losses(
    network: Qwen2, phones: nn.Linear, read: Tensor, ids: Tensor, target: Tensor, places: Tensor, labels: Tensor
) -> dict[str, Tensor]:
    """The losses of WEIGHTS, given the ids read (B, L); the others: see `Sequences`.

    target: cross entropy of the target ids. size: mean square of the log partition function. guide: see `guidance`.
    phones: cross entropy of the next token's phones.
    """
    with autocast(ids.device):
        logits, features, attention = network(read[:, :-1])
        heard = phones(features).unflatten(-1, (TOKEN_PHONES, len(PHONES))).float()
    logits = logits.float()
    total = logits.logsumexp(-1)
    chosen = logits.gather(-1, ids[:, 1:, None])[..., 0]
    weight = target[:, 1:] / target[:, 1:].sum()
    return {
        "target": ((total - chosen) * weight).sum(),
        "size": (total.square() * weight).sum(),
        "guide": guidance(attention, places[:, 1:]),
        "phones": F.cross_entropy(heard.flatten(0, 2), labels[:, 1:].flatten().long(), ignore_index=UNKNOWN_PHONE),
    }


def guidance(attention: Tensor, places: Tensor) -> Tensor:
    """Minus the logarithm of the attention that is near the place of the next speech token's text, 0 at best.

    attention: logarithms of weights (B, H, L, L). places: (B, L), see `Sequences`.
    """
    key = torch.arange(attention.shape[3], device=places.device)
    distance = (key - places[:, :, None]) / NEAR  # (B, L, L)
    near = (attention - 0.5 * distance.square()[:, None]).logsumexp(-1)  # (B, H, L)
    guided = (places != ABSENT)[:, None].expand_as(near)
    return -(near.where(guided, 0.0)).sum() / guided.sum().clamp(min=1)


def _damaged(ids: Tensor, first: int) -> Tensor:
    """`ids` with some of the speech tokens, whose ids start at `first`, replaced at random."""
    speech = (ids >= first) & (ids < first + SPEECH_VOCAB)
    replaced = speech & (torch.rand(ids.shape, device=ids.device) < REPLACED)
    return torch.where(replaced, first + torch.randint(SPEECH_VOCAB, ids.shape, device=ids.device), ids)


@torch.no_grad()
def _held_out_loss(network: Qwen2, phones: nn.Linear, held_out: list[Batch], device: torch.device) -> Tensor:
    network.eval()
    moved = [[tensor.to(device) for tensor in batch] for batch in held_out]
    found = [losses(network, phones, batch[0], *batch)["target"] for batch in moved]
    network.train()
    return torch.stack(found).mean()


def _utterances(work: Path, tokenizer: Tokenizer, sentences: list[str], device: torch.device) -> Utterances:
    """All utterances as tokens: those of `speech` and, if it exists, of `more_speech`."""
    network = speech_tokenizer.load(work, device)
    sources = [(np.load(work / "utterances.npy"), np.load(work / "audio.npy", mmap_mode="r"))]
    phones = [np.load(work / "phones.npy")]
    for path in sorted((work / "more").glob("*.npy")):
        found = np.load(path)
        if len(found):
            sources.append((found, np.memmap(path.with_suffix(".audio"), np.int16, "r")))
            phones.append(np.fromfile(path.with_suffix(".phones"), np.uint8))
    table = np.concatenate([found for found, _ in sources])
    # Both sources together, because utterances of equal length form batches.
    audio = torch.cat([torch.from_numpy(np.array(audio)).to(device) for _, audio in sources])
    lengths = torch.from_numpy(table[:, 2]).to(device)
    everyone = torch.arange(len(lengths), device=device)
    clean = speech_tokenizer.tokenize(network, audio, lengths, everyone)
    some = everyone[torch.rand(len(lengths), device=device) < ALTERED_RECORDINGS]
    altered = speech_tokenizer.tokenize(network, audio, lengths, some, perturbed=True)
    said = [sentences[line] for line in table[:, 0]]
    texts, joined = encoded(tokenizer, said), encoded(tokenizer, said, " ")
    logger.info("llm: %d utterances, %.1f h", len(table), table[:, 2].sum() / 25 / 3600)
    labels = np.split(np.concatenate(phones).reshape(-1, TOKEN_PHONES), np.cumsum(table[:-1, 2]))
    return Utterances(texts, joined, table[:, 1], clean, altered, labels)


def export(work: Path, directory: Path, rules: TokenizerRules) -> None:
    """Write the checkpoint's LLM directory with the control tokens of `rules`, float16."""
    weights = {name: value.half() for name, value in trained(work / FILE).items()}
    weights["model.norm.weight"] = (SHARPNESS * trained(work / FILE)["model.norm.weight"]).half()
    merges = json.loads((work / TOKENIZER_FILE).read_text(encoding="utf-8"))["model"]["merges"]
    tokenizer = build_tokenizer([(first, second) for first, second in merges], rules=rules)
    save_llm(directory, tokenizer, SIZES, weights)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["follows_instructions"] = False  # it saw none
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
