"""The encoder's attention in blocks of queries. tests/token2wav/test_chunks_equal_whole.py has the whole flows."""

from pathlib import Path

import pytest
import torch
from cosyvoice_triton.networks.flow import encoder as encoder_module

from tests.parity import flow_unet
from tests.parity.fixture import Fixture

GOLDEN = Path(__file__).parents[1] / "assets" / "golden"


@pytest.fixture
def encoder():
    return flow_unet.build(Fixture(GOLDEN / "item4_cosyvoice2_flow_inference.json")).encoder


@pytest.mark.parametrize("visible", ["all", "chunks"])
def test_scores_in_blocks_of_queries_equal_those_at_once(encoder, visible, monkeypatch):
    """The last block is shorter, with an odd number of scores; one block has a single query."""
    T, ahead = 17, encoder.config.lookahead
    windows = torch.randn(2, T, 1 + ahead, encoder.config.width, generator=torch.Generator().manual_seed(5))
    present = torch.ones(2, T, 1 + ahead, dtype=torch.bool)
    ends = torch.full((2, T), T) if visible == "all" else ((torch.arange(T) // 5 + 1) * 5).clamp(max=T).expand(2, T)
    expected = encoder(windows, present, ends)
    monkeypatch.setattr(encoder_module, "SCORES_AT_ONCE", 1)
    for queries in (4, 11):
        monkeypatch.setattr(encoder_module, "QUERIES_AT_ONCE", queries)
        assert len(encoder_module.query_blocks(T, 8)) > 1
        torch.testing.assert_close(encoder(windows, present, ends), expected, atol=2e-5, rtol=0)
