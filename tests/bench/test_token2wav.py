"""The benchmark of token2wav, as far as it runs without a GPU and without a load."""

from pathlib import Path

from cosyvoice_triton import stacks
from cosyvoice_triton.bench.token2wav import LISTENERS, Subject, first_chunk


def test_every_stack_can_be_measured_and_cosyvoice3_is(demo_models: Path) -> None:
    assert LISTENERS.keys() == set(stacks.BUILT_IN)
    subject = Subject.build(stacks.COSYVOICE3, demo_models, "cpu", max_streams=1)
    assert 0 < first_chunk(subject) < 60
