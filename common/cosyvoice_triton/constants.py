"""Rates, sizes and limits of CosyVoice2, and values derived from them. These numbers are defined nowhere else."""

# --- rates -------------------------------------------------------------------------------------------------------
SAMPLE_RATE = 24_000  # of all synthesized audio
PROMPT_SAMPLE_RATE = 16_000  # of the speech tokenizer and the speaker encoder, and of recordings sent without a rate
TOKEN_RATE = 25  # speech tokens per second
TOKEN_MEL_RATIO = 2  # mel frames per speech token
MEL_RATE = TOKEN_RATE * TOKEN_MEL_RATIO  # 50 frames per second
HOP_SAMPLES = SAMPLE_RATE // MEL_RATE  # 480 samples per mel frame
MEL_BINS = 80

# --- speech tokens -----------------------------------------------------------------------------------------------
SPEECH_VOCAB = 3**8  # FSQ codebook of the S3 tokenizer: ids 0..6560
SPEAKER_DIM = 192  # CAM++ x-vector
SPECIAL_SPEECH_IDS = 200  # rows of CosyVoice3's speech embedding after those of the codebook
# Id of <|s_0|> in the official LLM tokenizer. Serving reads it from the tokenizer's files (llm/speech_tokens.py);
# this value is used only if a model is rendered without a tokenizer directory, as upstream's commands do.
OFFICIAL_FIRST_SPEECH_ID = 151_663

ONSET_TOKENS = 1  # of silence that are kept before the first one that sounds
# What CosyVoice3's prompts begin with, before the token that ends an instruction; never spoken.
SYSTEM_WORDS = "You are a helpful assistant."

# --- flow --------------------------------------------------------------------------------------------------------
LOOKAHEAD_TOKENS = 3  # tokens after the last rendered one that the encoder needs
FLOW_CHUNK_TOKENS = 25  # training chunk of the UNet flow: its hops end on multiples of this
EULER_STEPS = 10
GUIDANCE = 0.7  # classifier-free guidance: (1 + g) * conditional - g * unconditional
# Generated frames that the DiT's caches keep in addition to the whole prompt. With fewer, the pitch of 30 s streams
# drifts by more than another noise changes it; more buy little for 0.625 MiB a frame (docs/results/speed.md).
STREAM_CACHE_FRAMES = 100

# --- limits of an utterance --------------------------------------------------------------------------------------
MAX_STREAM_TOKENS = 3_000  # two minutes; the vocoder's noise for so many is made when it loads
MAX_SOURCE_SECONDS = MAX_STREAM_TOKENS / TOKEN_RATE  # of a recording that is converted to another voice
# Generated tokens (15 s) that a stream keeps as context in addition to its prompt. The UNet flow computes them anew for
# each chunk, because its keys and values would take 2.3 MB a frame.
CONTEXT_TOKENS = 375

# --- vocoder streaming -------------------------------------------------------------------------------------------
OVERLAP_FRAMES = 8  # mel frames that a chunk repeats from the previous one
OVERLAP_SAMPLES = OVERLAP_FRAMES * HOP_SAMPLES  # 3840: withheld audio, cross-fade

# --- speaking rate ---------------------------------------------------------------------------------
MIN_SPEED = 0.25
MAX_SPEED = 4.0
QUIETEST, LOUDEST = -40.0, -10.0  # LUFS that may be asked for

# --- limits of a reference recording -----------------------------------------------------------------------------
MIN_REFERENCE_SECONDS = 0.5
MAX_REFERENCE_SECONDS = 30.0  # what the speech tokenizer reads at once; upstream refuses longer ones too
MIN_REFERENCE_RATE, MAX_REFERENCE_RATE = 8_000, 48_000
# Two rates with few common factors have a resampling filter of gigabytes. Every rate in use is a multiple of 25.
REFERENCE_RATE_STEP = 25
MAX_TRANSCRIPT_CHARS = 2_000  # of a registered voice
MAX_PROMPT_TOKENS = int(TOKEN_RATE * MAX_REFERENCE_SECONDS) + 2  # the tokenizer may round up

# --- calls between models ------------------------------------------------------------------------------------------
# Calls of other models that one model instance may wait for at once. Each occupies a thread of the instance's pool in
# tritonserver (32 threads by default), which also sends the instance's responses: 16 threads are reserved for those,
# otherwise a model waiting for others could not respond.
CALL_THREADS = 256
CALLS_AT_ONCE = CALL_THREADS - 16

# --- default ports -------------------------------------------------------------------------------------------------
HTTP_PORT, GRPC_PORT, METRICS_PORT = 8000, 8001, 8002  # tritonserver's own defaults
HEALTH_PORT, SPEECH_PORT = 8003, 10086
