"""The LLM's directory, made with the official vocabulary, in the transformers of TensorRT-LLM and in ours."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from cosyvoice_triton.cli.convert_llm import main
from cosyvoice_triton.llm.interface import LLMPrompt
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.prepare.huggingface_llm import COSYVOICE2_LLM, COSYVOICE3_LLM, OfficialLLM

from tests.support import qwen_vocabulary
from tests.support.official_llm import official_llm

CONFIG = json.loads(qwen_vocabulary.CONFIG.read_text())
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1}
VERSION = "4.51.3"  # upstream's and TensorRT-LLM's
OLD = (f"transformers=={VERSION}", "tokenizers==0.21.4", "huggingface_hub==0.36.2")
PROMPT = LLMPrompt("你好世界, hello [breath]", "", (5, 17))
PROBE = """
import json, sys, torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
def read(directory, text):
    config, tokenizer = AutoConfig.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, torch_dtype="auto")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<|s_1|>"}]
    return {
        "ids": ids,
        "specials": [tokenizer.eos_token, tokenizer.pad_token, *sorted(tokenizer.all_special_tokens)],
        "chat": tokenizer.apply_chat_template(chat, tokenize=False),
        "types": [str(config.torch_dtype), str(model.dtype)],
        "ends": [config.eos_token_id, model.generation_config.eos_token_id],
        "likeliest": int(model(torch.tensor([ids])).logits[0, -1].argmax()),
    }
print(json.dumps([transformers.__version__, *(read(*each) for each in json.loads(sys.argv[1]))]))
"""


def old_packages() -> Path:
    """A folder with the old packages, kept for later runs. Skips the test without a package registry."""
    folder = Path(tempfile.gettempdir()) / f"cosyvoice-triton-tests-transformers-{VERSION}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--retries", "0"]
            command += ["--target", f"{scratch}/made", *OLD]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"no transformers {VERSION}: {done.stderr.strip().splitlines()[-1:]}")
            if not folder.exists():  # another worker's
                os.rename(f"{scratch}/made", folder)
    return folder


def probe(texts: dict[Path, str], path: Path | None = None) -> list[Any]:
    """The version of transformers below `path`, and what it reads from each directory."""
    environment = os.environ | {"PYTHONPATH": str(path or ""), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", PROBE, json.dumps([[str(directory), text] for directory, text in texts.items()])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def converted(official: OfficialLLM, blank_en: Path, folder: Path) -> Path:
    torch.save(official_llm(blank_en, official), folder / "llm.pt")
    directory = folder / official.name
    arguments = ["--llm-pt", str(folder / "llm.pt"), "--blank-dir", str(blank_en), "--output-dir", str(directory)]
    assert main(arguments) == 0
    return directory


@pytest.mark.slow
def test_transformers_4_and_5_read_the_same_llm_with_the_official_ids(tmp_path: Path) -> None:
    blank_en = tmp_path / "CosyVoice-BlankEN"
    qwen_vocabulary.write_blank_en(blank_en)
    (blank_en / "config.json").write_text(json.dumps(CONFIG | SIZES))
    texts = {}
    for official in (COSYVOICE2_LLM, COSYVOICE3_LLM):
        directory = converted(official, blank_en, tmp_path)
        texts[directory] = LLMTokenizer.from_dir(directory).prompt_string(PROMPT)
    _, *found = probe(texts)
    for directory, first, read in zip(texts, (151_663, 151_924), found, strict=True):
        tokenizer = LLMTokenizer.from_dir(directory)
        assert read["ids"] == tokenizer.encode_prompt(PROMPT).tolist()
        assert read["ids"][-2:] == [first + 5, first + 17] and 56568 in read["ids"]  # 你
        assert read["ends"] == [list(tokenizer.end_ids)] * 2 and read["types"] == ["torch.bfloat16"] * 2
        assert {"[breath]", "<|endofprompt|>"} <= {*read["specials"]}
        assert read["chat"] == "<|sos|>hi<|task_id|><|s_1|>"
    assert probe(texts, old_packages()) == [VERSION, *found]
