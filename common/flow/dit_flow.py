"""The flow of Step-Audio2 (`token2wav/flow.pt`)."""

from common.flow.base import MelFlow
from common.flow.config import DiTFlowConfig
from common.flow.dit import DiTEstimator


class DiTFlow(MelFlow[DiTEstimator]):
    """Encoder and DiT estimator; `common.token2wav.dit` streams it with caches."""

    def __init__(self, config: DiTFlowConfig) -> None:
        super().__init__(config, DiTEstimator(config.estimator))
        self.config = config
