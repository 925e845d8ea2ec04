"""cli/test_llm.py, which pytest does not collect, with a real engine and with a server on a real socket."""

from cosyvoice_triton.cli.test_llm import main

from tests.support.http_servers import TOKENS, llm_server


def test_texts_are_answered_together_by_the_cpu_engine_with_tokens_speed_and_reason(llm_dir, genai_dir, capsys):
    arguments = ["--tokenizer_dir", str(llm_dir), "--engine_dir", str(genai_dir), "--log_level", "info"]
    arguments += ["--seed", "1", "--max_tokens", "20", "--exact_length"]
    assert main([*arguments, "--input_text", "First one.", "And another."]) == 0
    figures, first, end, second, _ = capsys.readouterr().out.splitlines()
    assert figures.startswith("2 stream(s): first token") and "tokens/s each" in figures
    assert first.count("<|s_") == 20 and end == "20 tokens, finish reason length" and first != second
    assert main([*arguments, "--input_text", "And another."]) == 0
    assert capsys.readouterr().out.splitlines()[1] == second


def test_many_streams_are_measured_without_printing_their_tokens(llm_dir, genai_dir, capsys):
    arguments = ["--tokenizer_dir", str(llm_dir), "--engine_dir", str(genai_dir), "--prompt_ids", "180"]
    assert main([*arguments, "--max_tokens", "20", "--exact_length", "--streams", "1", "4"]) == 0
    figures = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in figures] == ["1", "4"]


def test_one_prompt_is_answered_by_a_server(llm_dir, capsys):
    with llm_server() as (_, url):
        assert main(["--tokenizer_dir", str(llm_dir), "--urls", url]) == 0
    assert f"{TOKENS} tokens, finish reason stop" in capsys.readouterr().out


def test_an_unusable_engine_or_server_is_reported_in_one_line(llm_dir, tmp_path, capsys):
    assert main(["--tokenizer_dir", str(llm_dir), "--engine_dir", str(tmp_path)]) == 1
    assert "error: " in capsys.readouterr().err
    assert main(["--tokenizer_dir", str(llm_dir), "--urls", "http://127.0.0.1:9"]) == 1
    assert "cannot be reached" in capsys.readouterr().err
