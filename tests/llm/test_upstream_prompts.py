"""What upstream's CLI and its Triton runtime give the LLM for the requests of its examples, recorded as ids of the
official vocabulary: `prompt_text` and `tts_text` tokenized apart, as they are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.orchestrator.request import RequestRules
from cosyvoice_triton.prepare.huggingface_llm import COSYVOICE2_LLM, COSYVOICE3_LLM, _write_tokenizer
from cosyvoice_triton.text import TextFrontend

from tests.support.fakes import PROMPT_TOKENS, FakeLM
from tests.support.pipeline import Pipeline
from tests.support.qwen_vocabulary import write_blank_en

RECORDED = Path(__file__).parents[1] / "assets" / "upstream_prompts.jsonl"
CASES = [json.loads(line) for line in RECORDED.read_text().splitlines()]
OFFICIAL = {"cosyvoice2": COSYVOICE2_LLM, "cosyvoice3": COSYVOICE3_LLM}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LLMTokenizer]:
    folder = tmp_path_factory.mktemp("official")
    write_blank_en(folder / "blank")
    return {name: _write_tokenizer(folder / "blank", folder / name, llm) for name, llm in OFFICIAL.items()}


@pytest.mark.parametrize("case", CASES, ids=[f"{each['model']}-{each['call']}-{n}" for n, each in enumerate(CASES)])
def test_the_llm_gets_upstream_s_ids(case: dict[str, Any], tokenizers: dict[str, LLMTokenizer]) -> None:
    tokenizer, pipeline = tokenizers[case["model"]], Pipeline(FakeLM([1]))
    pipeline.texts = TextFrontend("cosyvoice3" if case["model"] == "cosyvoice3" else "unet")  # type: ignore[assignment]
    wav = np.full(PROMPT_SAMPLE_RATE, 0.1, np.float32)
    wav[::2] *= -1
    request = RequestRules().request(reference_wav=wav, **case["request"])
    pipeline.run(pipeline.synthesize(request))
    (prompt,) = pipeline.llm.prompts
    ids = tokenizer.encode_prompt(prompt).tolist()
    speech = [tokenizer.first_speech_id] * PROMPT_TOKENS if case["speech"] else []
    assert ids == [tokenizer.sos_id, *case["ids"], tokenizer.task_id, *speech]
