"""What batches cost, for `Admission`."""

from collections.abc import Callable, Sequence

import numpy as np

from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.policy.admission import Admission
from cosyvoice_triton.token2wav.stream import Chunk

MEASURED_CHUNKS = (1, 8)  # of the batches that are rendered before the first listener comes


def costs(
    engine: Token2Wav, chunks: Sequence[Chunk], results: Sequence[np.ndarray | BaseException]
) -> tuple[int, int, float]:
    """Return the chunks of a batch, the tokens computed for it, padding included, and the seconds of its audio."""
    samples = sum(len(result) for result in results if not isinstance(result, BaseException))
    return len(chunks), engine.padded(len(chunks), max(chunk.computed for chunk in chunks)), samples / SAMPLE_RATE


def measure(engine: Token2Wav, admission: Admission, clock: Callable[[], float]) -> None:
    """Render first chunks, one alone and several together. Raises what that raises."""
    prompt, tokens = engine.sample(engine.limits.first_hop_tokens)
    for warm in (False, True):  # the first batch of a size takes longer
        for size in MEASURED_CHUNKS:
            streams = [engine.open(prompt) for _ in range(min(size, engine.limits.max_streams))]
            try:
                chunks, begun = [engine.chunk(stream, tokens, final=True) for stream in streams], clock()
                results = engine.render(chunks)
                if warm:
                    admission.rendered(*costs(engine, chunks, results), clock() - begun)
            finally:
                for stream in streams:
                    engine.close(stream)
