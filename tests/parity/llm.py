"""The fixtures of the LLMs: CosyVoice3's official state dict, converted to a HuggingFace directory, gives the same
logits; a text in pieces makes the same sequence of ids.

The recorded text vocabulary is one of numbers: a tokenizer of that size takes its place.
"""

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from cosyvoice_triton.checkpoint import shapes_of
from cosyvoice_triton.llm.checkpoint import speech_bias
from cosyvoice_triton.llm.interleaving import Interleaving
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.prepare.huggingface_llm import COSYVOICE3_LLM, convert
from torch import Tensor

from tests.parity.fixture import Check, Fixture
from tests.support.official_llm import write_blank

TEXT, SPEECH, SPECIAL = 0, 1, 2  # the tables of recorded rows
ROWS = 10_000  # more than a table has: a row's id is that of its table and itself


def check_llm(fixture: Fixture) -> Iterator[tuple[str, Tensor]]:
    from transformers import Qwen2ForCausalLM

    with tempfile.TemporaryDirectory() as scratch:
        directory = _converted(fixture, Path(scratch))
        tokenizer = LLMTokenizer.from_dir(directory)
        model = Qwen2ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        bias = torch.from_numpy(speech_bias(directory, tokenizer, model.config.vocab_size))
    first, rows = tokenizer.first_speech_id, COSYVOICE3_LLM.rows
    ends = set(tokenizer.end_ids)
    for call in fixture.meta["calls"]:
        tag = call["tag"]
        text = [*fixture[call["prompt_text"]].tolist(), *fixture[call["text"]].tolist()]
        speech, sampled = (fixture[call[name]].tolist() for name in ("prompt_speech", "sampled"))
        prompt = [tokenizer.sos_id, *text, tokenizer.task_id, *tokenizer.to_llm_ids(speech)]
        ids = [*prompt, *(first + token for token in sampled[:-1])]
        yield f"out/{tag}/hf_ids", torch.tensor(ids)
        yield f"out/{tag}/fed", torch.tensor([(SPEECH, id - first) if id >= first else (TEXT, id) for id in ids])
        yielded = [token for token in sampled if first + token not in ends]
        yield f"out/{tag}/yielded", torch.tensor(yielded, dtype=torch.int64)
        steps = slice(len(prompt) - 1, None)
        states = model.model(torch.tensor([ids])).last_hidden_state[0, steps]
        logits = model.lm_head(states)
        if not torch.isneginf((logits + bias)[:, :first]).all() or not torch.isneginf(bias[first + rows :]).all():
            raise ValueError("rows of text or padding can be sampled")
        yield f"out/{tag}/logits", (logits + bias)[:, first : first + rows]
        # Upstream keeps the head of the text model, whose rows are its embedding; ours are zero, and masked.
        fixture.computed_by = "reference"
        text_logits = states @ model.model.embed_tokens.weight[: fixture[f"out/{tag}/hf_logits_text"].shape[1]].T
        yield f"out/{tag}/hf_logits_text", text_logits
        fixture.computed_by = "network"


def _converted(fixture: Fixture, scratch: Path) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**fixture.meta["config"]["qwen2"])
    count = fixture.meta["hf"]["metadata"]["original_vocab_size"] - 3  # without the special tokens
    blank = write_blank(scratch / "blank", [f"~{i}~" for i in range(count)], config)
    with torch.device("meta"):
        qwen2 = shapes_of(Qwen2ForCausalLM(config).state_dict())
    shapes = {f"llm.model.{key}": tuple(shape) for key, shape in qwen2.items() if key != "lm_head.weight"}
    shapes |= {key: tuple(shape) for key, shape in COSYVOICE3_LLM.shapes(config.hidden_size).items()}
    state = fixture.generated_weights(shapes)
    torch.save(state | {"llm.model.lm_head.weight": state["llm.model.model.embed_tokens.weight"]}, scratch / "llm.pt")
    convert(scratch / "llm.pt", blank, scratch / "converted", torch.float32)
    return scratch / "converted"


def check_bistream(fixture: Fixture) -> Iterator[tuple[str, Tensor]]:
    """Upstream's sampler is asked once for each speech id, for each fill and for the end; ours never for a fill."""
    for call in fixture.meta["calls"]:
        tag, special = call["tag"], fixture.meta["special_ids"][call["class"]]
        table = SPECIAL if special["table_of_sos_and_task_id"] == "llm_embedding" else SPEECH
        sos_id, task_id = _row_ids(table, (special["sos"], special["task_id"]))
        given = {name: fixture[call[name]].tolist() for name in ("prompt_text", "prompt_speech", "text")}
        end_of_prompt = fixture.meta["endofprompt_in_this_vocabulary"]
        system = given["prompt_text"].index(end_of_prompt) + 1 if table == SPEECH else 0
        prompt_text = _row_ids(TEXT, given["prompt_text"])
        sequence = Interleaving(
            sos_id, task_id, prompt_text[:system], prompt_text[system:], _row_ids(SPEECH, given["prompt_speech"])
        )
        sampled = enumerate(_row_ids(SPEECH, fixture[call["sampler_ids"]].tolist()))
        text, sizes = _row_ids(TEXT, given["text"]), call["text_pieces"]
        sizes = [sizes] * len(text) if isinstance(sizes, int) else sizes
        spoken: list[int] = []
        fed, read = [0], []  # by call of upstream's sampler: rows so far, ids of text read so far
        for end, size in zip(itertools.accumulate(sizes), sizes, strict=True):
            if sequence.add(text[end - size : end]):
                block: list[int] = []
                fed.append(len(sequence.ids))
                while len(block) < sequence.due:
                    number, speech_id = next(sampled)
                    if number in call["sampler_gives_fill_at_calls"]:
                        break
                    block.append(speech_id)
                    fed.append(fed[-1] + 1)
                read += [min(end, len(text))] * (len(block) + 1)  # the last piece may be shorter than its size
                sequence.spoke(block)
                spoken += block
        sequence.finish()
        rest = [id_ for _, id_ in itertools.islice(sampled, fixture.meta["ids_sampled_after_the_text_before_eos"])]
        fed += range(len(sequence.ids), len(sequence.ids) + len(rest) + 1)
        read += [len(text)] * (len(rest) + 1)
        yield f"out/{tag}/fed", torch.tensor([divmod(id_, ROWS) for id_ in [*sequence.ids, *rest]])
        yield f"out/{tag}/yielded", torch.tensor([id_ % ROWS for id_ in [*spoken, *rest]])
        yield f"out/{tag}/fed_per_call", torch.tensor(fed).diff()
        yield f"out/{tag}/text_ids_read_at_call", torch.tensor(read)


def _row_ids(table: int, rows: Sequence[int]) -> list[int]:
    return [ROWS * table + row for row in rows]


CHECKS: dict[str, Check] = {"item5c_cosyvoice3_lm": check_llm, "item5d_bistream": check_bistream}
