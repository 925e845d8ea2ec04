"""The pipeline of a stack: one assembly, whatever its ports lead to.

The orchestrator's Triton model gives it ports to other models (model.py), `Speaker` ports within its process.
"""

from pathlib import Path

from cosyvoice_triton.config import OrchestratorConfig
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.demo_checkpoint import has_random_weights
from cosyvoice_triton.llm.checkpoint import follows_instructions, read_limits, speech_bias
from cosyvoice_triton.llm.interface import LengthRatios, SpeechLM, Timeouts
from cosyvoice_triton.llm.openai_client import OpenAILM
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.llm.triton_client import RESPONSE_OUTPUTS, TritonLM
from cosyvoice_triton.orchestrator.chunking import HopRules
from cosyvoice_triton.orchestrator.request import RequestRules, default_sampling
from cosyvoice_triton.orchestrator.synthesis import Instructions, Synthesizer
from cosyvoice_triton.orchestrator.token2wav_port import Token2WavPort
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.text.frontend import TextFrontend
from cosyvoice_triton.voice.book import VoiceBook
from cosyvoice_triton.voice.prompt import PromptEncoder
from cosyvoice_triton.voice.silent_tokens import silent_tokens


class Pipeline:
    """A stack's synthesizer, and the rules for its requests.

    rules: make a request of inputs. synthesizer: speaks it. voices: the registered ones. llm: to be closed by the
    caller. ValueError if the settings or the registered voices cannot be used.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        stack: Stack,
        tokenizer: LLMTokenizer,
        encoder: PromptEncoder,
        llm: SpeechLM,
        token2wav: Token2WavPort,
    ) -> None:
        full_band = stack.mel_max_hz > PROMPT_SAMPLE_RATE / 2
        self.voices = VoiceBook(
            config.voices_dir, config.model_dir, tokenizer.decode, config.default_speaker, full_band
        )
        self.voices.pronunciation(None)  # fail now rather than in a request
        if config.default_speaker:
            self.voices.get()
        self.texts = TextFrontend(stack.name, config.skip_thoughts)
        self.llm = llm
        hops = HopRules(
            strategy=config.dynamic_chunk_strategy,
            first_hop=config.first_hop_tokens,
            short_first_hop=config.short_first_hop_tokens,
            max_hop=config.max_hop_tokens,
            boundary=stack.chunk_boundary,
        )
        silent = silent_tokens(config.model_dir, stack)
        self.synthesizer = Synthesizer(
            self.texts,
            self.voices,
            encoder,
            llm,
            tokenizer,
            token2wav,
            hops,
            long_silence=stack.silent_tokens,
            silent_tokens=silent,
            judges=bool(silent) and not has_random_weights(Path(config.model_dir)),
            instructions=_instructions(config, stack),
        )
        self.rules = RequestRules(
            sampling=default_sampling(config),
            max_text_chars=config.max_text_chars,
            languages=self.texts.languages,
            trim_silence=config.trim_silence,
            retry_bad_answers=config.retry_bad_answers,
        )


def _instructions(config: OrchestratorConfig, stack: Stack) -> Instructions:
    if not follows_instructions(config.llm_tokenizer_dir):
        return "none"
    return "with transcript" if stack.llm.tokenizer.system else "alone"


def length_ratios(config: OrchestratorConfig) -> LengthRatios:
    return LengthRatios(min=config.min_token_ratio, max=config.max_token_ratio)


def remote_llm(config: OrchestratorConfig, tokenizer: LLMTokenizer) -> SpeechLM:
    """Return the LLM behind `llm_urls`, or else the model of this Triton."""
    timeouts, ratios = Timeouts(first_token=config.token_timeout, token=config.token_timeout), length_ratios(config)
    if config.llm_transport == "openai":
        return OpenAILM(config.llm_urls, config.llm_model, tokenizer, timeouts, ratios, config.llm_dialect)
    bias = None
    if config.llm_backend == "tensorrtllm":  # the python backend restricts the vocabulary itself
        limits = read_limits(config.llm_tokenizer_dir)
        bias = speech_bias(config.llm_tokenizer_dir, tokenizer, limits.vocab_size)
    from cosyvoice_triton.triton_io.streams import Streams  # only this transport needs the client

    return TritonLM(Streams(config.llm_model, RESPONSE_OUTPUTS), tokenizer, timeouts, ratios, bias)
