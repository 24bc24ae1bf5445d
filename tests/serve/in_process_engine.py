"""An engine of a model in this process, as a server drives one."""

from __future__ import annotations

from collections.abc import Sequence

from petatron.infer.engine import Engine
from petatron.infer.prompt_images import PromptImages
from petatron.infer.sampling_params import SamplingParams


class InProcessEngine(Engine):
    """`CheckpointEngine` without a checkpoint."""

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        images: PromptImages | None = None,
        compiled: bool = False,
    ) -> int:
        return super().submit(prompt_ids, params, images=images, compiled=compiled)

    def wake(self) -> None:
        """A step is computed here, and waits for nothing."""

    def check_alive(self) -> None:
        """Holds always."""
