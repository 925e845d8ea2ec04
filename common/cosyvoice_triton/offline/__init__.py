"""Parts of the offline tools.

inputs                    options, samples and voice prompts
batch_lm, llm, transformers_lm    LLM backends
rendering                 speech tokens to audio, whole or streamed
pipeline, stages          samples through all stages, and their times
results                   the output folder
compare                   streamed against whole audio
tool                      exit codes and failures
inference, token2wav, streaming   the programs that scripts/ launches
"""
