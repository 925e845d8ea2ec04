"""A voice to clone: prompts as data, their encoders, registered voices, audio files and features.

prompt.py     Recording and Prompt, checks and a cache of them; numpy only, so that any process can import it
encoders.py   the networks that make a Prompt from a recording
model.py      audio_tokenizer and speaker_embedding as Triton models
files.py      the file formats of registered voices, one reader each
book.py       VoiceBook: registered voices by name
mix.py        voices mixed from registered ones
audio.py      sound files and resampling
recordings.py recordings as files that anybody may have made
"""
