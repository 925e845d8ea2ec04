"""The flow of CosyVoice2 (`flow.pt`)."""

from common.flow.base import MelFlow
from common.flow.config import UNetFlowConfig
from common.flow.unet import UNetEstimator


class UNetFlow(MelFlow[UNetEstimator]):
    """Encoder and UNet estimator; `common.token2wav.unet` streams it, computing each chunk's window again."""

    def __init__(self, config: UNetFlowConfig) -> None:
        super().__init__(config, UNetEstimator(config.estimator))
        self.config = config
