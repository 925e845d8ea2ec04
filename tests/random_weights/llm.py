"""A random-weight LLM of a CosyVoice in HuggingFace form. It generates speech tokens only, for about three seconds.

A purely random network would hardly ever end an utterance at a plausible length. Therefore a few channels of the
residual stream are reserved, and no layer writes to them: there, each token's embedding encodes a phase of the
utterance, and the output head allows only tokens of the same phase or the next. The last phase leads to the end token.
Which token of a phase is next depends on the random rest of the network, hence on text, prompt and seed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from cosyvoice_triton.constants import SPEECH_VOCAB
from cosyvoice_triton.llm.checkpoint import END_OF_TEXT, write_configs
from cosyvoice_triton.llm.speech_tokens import COSYVOICE2, added_tokens
from cosyvoice_triton.stacks import TokenizerRules
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

TEXT_SPECIALS = (END_OF_TEXT, "<|im_start|>", "<|im_end|>", "<|endofprompt|>")
# Qwen2's split of text into words before byte-pair encoding.
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class LLMSizes:
    """Sizes of a Qwen2 network.

    tied: the output head is the embedding. rope_theta: base of the rotary angles. text_vocab: least number of text
    tokens; unused ones fill the vocabulary up.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    tied: bool = False
    rope_theta: float = 1e6
    text_vocab: int = 0


SMALL = LLMSizes(hidden=128, layers=2, heads=2, kv_heads=1, mlp=256)
OFFICIAL = LLMSizes(hidden=896, layers=24, heads=14, kv_heads=2, mlp=4864, text_vocab=151_643)

# Each phase lasts two tokens on average: utterances have about 75 tokens, with a standard deviation of 9.
PHASES = 37
START, ALWAYS = PHASES, PHASES + 1  # reserved channels after those of the phases: "no phase yet", and a constant
RESERVED = PHASES + 2
# Only the upper third of the codebook is generated; the demo's speech tokenizer uses the lower two thirds. So prompt
# tokens have no phase, and generation starts at the first phase after any prompt.
FIRST_UTTERED = 2 * SPEECH_VOCAB // 3

# With leading silence an answer begins with silent tokens, as official ones do: about 7 at the median, 20 at the 95th
# percentile. They have phases of their own, of two tokens on average like the others, before the first one. An answer
# begins in one of them: SILENT_STARTS has the number of tokens that may be the first, of each phase from the last on.
SILENT_STARTS = (4, 8, 11, 12, 9, 8, 6, 5, 4, 3, 3, 2)
SILENT_PHASE = max(SILENT_STARTS)  # tokens of each
SILENT_IDS = range(SPEECH_VOCAB - SILENT_PHASE * len(SILENT_STARTS), SPEECH_VOCAB)

RESERVED_AMPLITUDE = 4.0  # of a reserved channel in an embedding; the others have a standard deviation of 0.5
FOLLOWS = 3.0  # weight of the output head on the channels of a token's possible predecessors
ENDS = 4.0  # the same for the end token, which competes with every token of the last phase
UNSPOKEN = -6.0  # weight on the constant channel for tokens that are never generated
LOGIT_SPREAD = 0.12  # standard deviation of the output head's other weights, at SMALL's width


def make_llm(
    directory: Path,
    seed: int = 0,
    sizes: LLMSizes = SMALL,
    dtype: torch.dtype = torch.float32,
    rules: TokenizerRules = COSYVOICE2,
    leading_silence: bool = False,
) -> None:
    """Write the LLM with random weights and the control tokens of `rules` to `directory`."""
    tokenizer = build_tokenizer(text_vocab=sizes.text_vocab, rules=rules)
    ids = tokenizer.get_vocab()
    weights = random_weights(sizes, len(ids), ids[added_tokens(rules)[0]], ids[rules.ends[0]], seed)
    if leading_silence:
        lead_with_silence(weights, ids[added_tokens(rules)[0]])
    save_llm(directory, tokenizer, sizes, {key: weight.to(dtype) for key, weight in weights.items()})


def lead_with_silence(weights: dict[str, torch.Tensor], offset: int) -> None:
    """Let the network begin with SILENT_IDS. `offset`: id of `<|s_0|>`."""
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]  # (vocab, hidden)
    channels = slice(RESERVED, RESERVED + len(SILENT_STARTS))
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[channels] = 0.0
    ids = torch.tensor(SILENT_IDS).reshape(len(SILENT_STARTS), SILENT_PHASE) + offset
    for each in (embedding, head):
        each[ids, :RESERVED] = 0.0
        each[:, channels] = 0.0
    embedding[ids, ALWAYS] = RESERVED_AMPLITUDE
    head[:, START] = 0.0
    following = torch.arange(FIRST_UTTERED, SILENT_IDS[0], PHASES) + offset  # the first phase
    for phase, (own, starts) in enumerate(zip(ids, SILENT_STARTS, strict=True), RESERVED):
        embedding[own, phase] = RESERVED_AMPLITUDE
        head[own, phase] = FOLLOWS
        head[own[:starts], START] = FOLLOWS
        head[following, phase] = FOLLOWS
        following = own


def save_llm(directory: Path, tokenizer: Tokenizer, sizes: LLMSizes, weights: Mapping[str, torch.Tensor]) -> None:
    """Write config, generation config, tokenizer and weights as `transformers` saves a Qwen2ForCausalLM."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    write_configs(directory, _network(sizes, len(weights["model.embed_tokens.weight"])), dtype)
    save_file(dict(weights), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # like the others: safetensors makes it readable for its owner only


def build_tokenizer(
    merges: Sequence[tuple[str, str]] = (), text_vocab: int = 0, rules: TokenizerRules = COSYVOICE2
) -> Tokenizer:
    """Return a byte-level BPE like Qwen2's: these merges, at least `text_vocab` text tokens, then those of `rules`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = dict.fromkeys([*alphabet, *("".join(pair) for pair in merges)])
    pieces |= dict.fromkeys(f"~{index}~" for index in range(len(pieces), text_vocab))
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in TEXT_SPECIALS])
    # Not special: servers that skip special tokens in decoding would return empty text.
    tokenizer.add_tokens([AddedToken(token, special=False) for token in added_tokens(rules)])
    return tokenizer


def random_weights(sizes: LLMSizes, vocab: int, offset: int, end_id: int, seed: int) -> dict[str, torch.Tensor]:
    """Return the state dict. `offset`: id of `<|s_0|>`; `end_id`: the end token that is uttered."""
    generator = torch.Generator().manual_seed(seed)
    hidden = sizes.hidden
    # Weights are smaller for sums over more channels, and for more layers that add to the residual stream.
    narrower, shallower = math.sqrt(SMALL.hidden / hidden), math.sqrt(SMALL.layers / sizes.layers)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    # (vocab, hidden): the token's phase, then random features.
    embedding = normal(vocab, hidden, std=0.5)
    embedding[:, :RESERVED] = 0.0
    embedding[:, START] = RESERVED_AMPLITUDE
    embedding[:, ALWAYS] = RESERVED_AMPLITUDE
    # (vocab, hidden): which phases a token may follow, then random preferences.
    head = normal(vocab, hidden, std=LOGIT_SPREAD * narrower)
    head[:, :RESERVED] = 0.0
    uttered = torch.arange(FIRST_UTTERED, SPEECH_VOCAB) + offset
    phase = torch.arange(len(uttered)) % PHASES
    embedding[uttered, START] = 0.0
    embedding[uttered, phase] = RESERVED_AMPLITUDE
    silent = torch.ones(vocab, dtype=torch.bool)
    silent[uttered] = False
    silent[end_id] = False
    head[silent, ALWAYS] = UNSPOKEN
    head[uttered, phase] = FOLLOWS
    head[uttered, torch.where(phase > 0, phase - 1, START)] = FOLLOWS
    head[end_id] = 0.0
    head[end_id, PHASES - 1] = ENDS

    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": torch.ones(hidden)}
    key, mlp = hidden // sizes.heads * sizes.kv_heads, sizes.mlp
    for i in range(sizes.layers):
        layer = {
            "self_attn.q_proj.weight": normal(hidden, hidden, std=0.15 * narrower),
            "self_attn.q_proj.bias": normal(hidden, std=0.1),
            "self_attn.k_proj.weight": normal(key, hidden, std=0.15 * narrower),
            "self_attn.k_proj.bias": normal(key, std=0.1),
            "self_attn.v_proj.weight": normal(key, hidden, std=0.1 * narrower),
            "self_attn.v_proj.bias": normal(key, std=0.1),
            "self_attn.o_proj.weight": normal(hidden, hidden, std=0.15 * narrower * shallower),
            "mlp.gate_proj.weight": normal(mlp, hidden, std=0.1 * narrower),
            "mlp.up_proj.weight": normal(mlp, hidden, std=0.1 * narrower),
            "mlp.down_proj.weight": normal(hidden, mlp, std=0.03 * narrower * shallower),
            "input_layernorm.weight": torch.ones(hidden),
            "post_attention_layernorm.weight": torch.ones(hidden),
        }
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            layer[name][:RESERVED] = 0.0  # no layer changes the phase
        weights.update({f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()})
    return weights


def _network(sizes: LLMSizes, vocab: int) -> dict[str, object]:
    """Return the network in the words of a Qwen2 `config.json`."""
    return {
        "model_type": "qwen2",
        "vocab_size": vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.mlp,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "max_window_layers": sizes.layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": sizes.rope_theta,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": sizes.tied,
    }
