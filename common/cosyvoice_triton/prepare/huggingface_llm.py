"""The official LLM files, llm.pt and CosyVoice-BlankEN, converted to one HuggingFace directory."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from cosyvoice_triton.checkpoint import read_state, shape_differences, shapes_of
from cosyvoice_triton.constants import SPECIAL_SPEECH_IDS, SPEECH_VOCAB
from cosyvoice_triton.llm.checkpoint import HEAD_BIAS, write_configs
from cosyvoice_triton.llm.speech_tokens import COSYVOICE2, COSYVOICE3, LLMTokenizer, added_tokens
from cosyvoice_triton.stacks import TokenizerRules

# Tokens that CosyVoice2's tokenizer adds to CosyVoice-BlankEN's, in this order.
TEXT_SPECIALS = (
    *("<|im_start|>", "<|im_end|>", "<|endofprompt|>", "[breath]", "<strong>", "</strong>", "[noise]", "[laughter]"),
    *("[cough]", "[clucking]", "[accent]", "[quick_breath]", "<laughter>", "</laughter>", "[hissing]", "[sigh]"),
    *("[vocalized-noise]", "[lipsmack]", "[mn]"),
)
# Phonemes that CosyVoice3's tokenizer adds after them, in brackets, sorted: those of ARPAbet, the vowels without and
# with stress, and the initials and finals of pinyin with their tones.
_ARPABET_VOWELS = "AA AE AH AO AW AY EH ER EY IH IY OW OY UH UW".split()
_ARPABET_CONSONANTS = "B CH D DH F G HH JH K L M N NG P R S SH T TH V W Y Z ZH".split()
_PINYIN_INITIALS = "b c ch d f g h j k l m n p q r s sh t w x y z zh".split()
_PINYIN_FINALS = """
    a ai an ang ao à ài àn àng ào á ái án áng áo ā āi ān āng āo ǎ ǎi ǎn ǎng ǎo
    e ei en eng è èi èn èng èr é éi én éng ér ē ēi ēn ēng ě ěi ěn ěng ěr
    i ian in ing iu ì ìn ìng í ín íng ī īn īng ǐ ǐn ǐng
    ià iàn iàng iào iá ián iáng iáo iā iān iāng iāo iǎ iǎn iǎng iǎo iè ié iē iě iòng ióng iōng iǒng iù iú iū iǔ
    o ong ou ò òng òu ó óng óu ō ōng ōu ǒ ǒng ǒu
    u uang ue un uo ù ùn ú ún ū ūn ǔ ǔn ǘ ǚ ǜ vè
    uà uài uàn uàng uá uái uán uáng uā uāi uān uāng uǎ uǎi uǎn uǎng uè ué uē uě uì uí uī uǐ uò uó uō uǒ
""".split()
_STRESSED = [f"{vowel}{stress}" for vowel in _ARPABET_VOWELS for stress in ("", 0, 1, 2)]
PHONEMES = tuple(f"[{name}]" for name in sorted([*_STRESSED, *_ARPABET_CONSONANTS, *_PINYIN_INITIALS, *_PINYIN_FINALS]))


@dataclass(frozen=True)
class OfficialLLM:
    """What an official llm.pt has besides Qwen2. specials: text tokens that its tokenizer adds. rows: of its speech
    embedding and head. marks: a table of its own for sos and task id. bias: of the head."""

    name: str
    rules: TokenizerRules
    specials: tuple[str, ...]
    rows: int
    marks: bool
    bias: bool

    def shapes(self, hidden: int) -> dict[str, torch.Size]:
        """Return the shapes of the tensors besides Qwen2's."""
        return {
            **({"llm_embedding.weight": torch.Size((2, hidden))} if self.marks else {}),
            "speech_embedding.weight": torch.Size((self.rows, hidden)),
            "llm_decoder.weight": torch.Size((self.rows, hidden)),
            **({"llm_decoder.bias": torch.Size((self.rows,))} if self.bias else {}),
        }


COSYVOICE2_LLM = OfficialLLM("CosyVoice2", COSYVOICE2, TEXT_SPECIALS, SPEECH_VOCAB + len(COSYVOICE2.ends), True, True)
COSYVOICE3_LLM = OfficialLLM(
    "CosyVoice3",
    COSYVOICE3,
    (*TEXT_SPECIALS, "<|endofsystem|>", *PHONEMES),
    SPEECH_VOCAB + SPECIAL_SPEECH_IDS,
    marks=False,
    bias=False,
)
VOCAB_MULTIPLE = 128  # upstream's padding; sharded engines need a divisible vocabulary
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def convert(llm_pt: Path, blank_dir: Path, output_dir: Path, dtype: torch.dtype) -> None:
    """Write `output_dir` atomically. ValueError if an input is not the official one, CosyVoice2's or CosyVoice3's."""
    if output_dir.exists():
        raise ValueError(f"{output_dir} exists; remove it or choose another directory")
    if not (blank_dir / "config.json").is_file():
        raise ValueError(f"{blank_dir} is not CosyVoice-BlankEN: it has no config.json")
    state = read_state(llm_pt)
    official = COSYVOICE2_LLM if "llm_embedding.weight" in state else COSYVOICE3_LLM
    _check(state, blank_dir, llm_pt, official)
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    # Next to the result, so that the rename stays within one file system.
    with tempfile.TemporaryDirectory(dir=output_dir.parent, prefix=f".{output_dir.name}.") as scratch:
        built = Path(scratch) / "model"
        tokenizer = _write_tokenizer(blank_dir, built, official)
        _write_model(state, blank_dir, built, tokenizer, official, dtype, llm_pt.name)
        built.rename(output_dir)


def _check(state: dict[str, torch.Tensor], blank_dir: Path, llm_pt: Path, official: OfficialLLM) -> None:
    """Raise ValueError listing the keys and shapes in which llm.pt differs from the official LLM based on BlankEN."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(blank_dir)
    config.tie_word_embeddings = False  # llm.pt has both, although the text head is never used
    with torch.device("meta"):
        qwen2 = AutoModelForCausalLM.from_config(config)
    expected = {f"llm.model.{name}": shape for name, shape in shapes_of(qwen2.state_dict()).items()}
    expected |= official.shapes(config.hidden_size)
    if differences := shape_differences(expected, shapes_of(state)):
        found = f"{llm_pt} is not the LLM of {official.name} based on {blank_dir}"
        raise ValueError(f"{found}:\n  " + "\n  ".join(differences))


def _write_tokenizer(blank_dir: Path, built: Path, official: OfficialLLM) -> LLMTokenizer:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(blank_dir)
    known = tokenizer.get_vocab()
    tokenizer.add_tokens([token for token in official.specials if token not in known], special_tokens=True)
    # Not special: servers that skip special tokens when decoding would return empty text.
    tokenizer.add_tokens(added_tokens(official.rules))
    built.mkdir()
    tokenizer.backend_tokenizer.save(str(built / "tokenizer.json"), pretty=False)
    return LLMTokenizer.from_dir(built)


def _write_model(
    state: dict[str, torch.Tensor],
    blank_dir: Path,
    built: Path,
    tokenizer: LLMTokenizer,
    official: OfficialLLM,
    dtype: torch.dtype,
    made_from: str,
) -> None:
    from safetensors.torch import save_file

    text = state.pop("llm.model.model.embed_tokens.weight")
    del state["llm.model.lm_head.weight"]  # the text head is never used
    first, end = tokenizer.first_speech_id, tokenizer.first_speech_id + official.rows
    if first > len(text):
        raise ValueError(f"{blank_dir} has {first} tokens of text, more than the {len(text)} rows of the embedding")
    last = first + SPEECH_VOCAB + len(official.rules.after_speech)
    vocab = -(-last // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    embedding, head = (torch.zeros(vocab, text.shape[1]) for _ in range(2))
    bias = torch.full((vocab,), -torch.inf)
    embedding[:first] = text[:first]
    embedding[first:end] = state.pop("speech_embedding.weight")
    if official.marks:
        embedding[[tokenizer.sos_id, tokenizer.task_id]] = state.pop("llm_embedding.weight").float()
    head[first:end] = state.pop("llm_decoder.weight")
    bias[first:end] = state.pop("llm_decoder.bias") if official.bias else 0
    weights = {name.removeprefix("llm.model."): tensor for name, tensor in state.items()}
    weights |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head, HEAD_BIAS: bias}
    path = built / "model.safetensors"
    contiguous = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    save_file(contiguous, path, metadata={"format": "pt"})
    path.chmod(0o644)  # like the other files; safetensors makes it readable by the owner only
    config = json.loads((blank_dir / "config.json").read_text())
    network = config | {"vocab_size": vocab, "tie_word_embeddings": False, "made_from": made_from}
    write_configs(built, network, str(dtype).removeprefix("torch."))
