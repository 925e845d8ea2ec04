"""Rates, hops, sizes and token names of CosyVoice2, and what derives from them. The one home of these numbers."""

# --- rates -------------------------------------------------------------------------------------------------------
SAMPLE_RATE = 24_000  # of every waveform that leaves the system
PROMPT_SAMPLE_RATE = 16_000  # of every reference recording that enters it
TOKEN_RATE = 25  # speech tokens per second
TOKEN_MEL_RATIO = 2  # mel frames per speech token
MEL_RATE = TOKEN_RATE * TOKEN_MEL_RATIO  # 50 frames per second
HOP_SAMPLES = SAMPLE_RATE // MEL_RATE  # 480 samples per mel frame
MEL_BINS = 80

# --- speech tokens -----------------------------------------------------------------------------------------------
SPEECH_VOCAB = 3**8  # FSQ codebook of the S3 tokenizer: ids 0..6560
SPEAKER_DIM = 192  # CAM++ x-vector
# Id of <|s_0|> in the official LLM tokenizer. Serving reads it from the tokenizer's files (llm/speech_tokens.py);
# this value stands in only where a model is rendered without a tokenizer directory, as upstream's commands do.
OFFICIAL_FIRST_SPEECH_ID = 151_663

# --- flow --------------------------------------------------------------------------------------------------------
LOOKAHEAD_TOKENS = 3  # the encoder sees this many tokens ahead of the last one it renders
FLOW_CHUNK_TOKENS = 25  # training chunk of the UNet flow: streamed hops end on multiples of it
EULER_STEPS = 10
GUIDANCE = 0.7  # classifier-free guidance: (1 + g) * conditional - g * unconditional
DIT_TAIL_FRAMES = 100  # generated frames that the DiT's cache keeps beside the whole prompt

# --- limits of an utterance --------------------------------------------------------------------------------------
MAX_STREAM_TOKENS = 3_000  # two minutes
CONTEXT_TOKENS = 375  # 15 s of it that a stream remembers beside its prompt

# --- vocoder streaming -------------------------------------------------------------------------------------------
OVERLAP_FRAMES = 8  # mel frames that a chunk repeats from the one before
OVERLAP_SAMPLES = OVERLAP_FRAMES * HOP_SAMPLES  # 3840: source cache, withheld audio, cross-fade

# --- speaking rate of an utterance that is not streamed ----------------------------------------------------------
MIN_SPEED = 0.25
MAX_SPEED = 4.0

# --- limits of a reference recording -----------------------------------------------------------------------------
MIN_REFERENCE_SECONDS = 0.5
MAX_REFERENCE_SECONDS = 30.0
MAX_TRANSCRIPT_CHARS = 2_000  # of a registered voice

# --- calls between models ------------------------------------------------------------------------------------------
# How many calls of other models one instance of a model may wait for at once: one per live stream. Each is a thread of
# tritonserver's, in a pool of the instance's own (by default of 32), by which the instance's answers are sent, too:
# some are kept for those, or a model that waits for others could not even answer.
CALL_THREADS = 256
CALLS_AT_ONCE = CALL_THREADS - 16

# --- default ports -------------------------------------------------------------------------------------------------
HTTP_PORT, GRPC_PORT, METRICS_PORT = 8000, 8001, 8002  # tritonserver's own defaults
HEALTH_PORT = 8003
