"""The settings of fill-in-the-middle samples: document = prefix, suffix, then middle."""

from __future__ import annotations

from typing import Annotated, ClassVar

from petatron.config.schema.numeric_bounds import Fraction
from petatron.config.schema.setting_metadata import Feature, settings_section, used_with


@settings_section
class FillInMiddleSettings:
    """Samples of text to fill in."""

    feature: ClassVar = Feature("fill in the middle", (used_with("data.fim_data"),), role="training")
    fim_data: Annotated[bool, "selects"] = False
    """Divide documents of a sample at random into prefix, middle and suffix, each after its sentinel token, and put the middle last."""
    fim_rate: Fraction = 0.5
    """Share of documents that are divided."""
    fim_spm_rate: Fraction = 0.5
    """Share of divided documents with the suffix before the prefix; the others have the prefix first."""
    fim_split_sample: str | None = None
    """Token at which a document is cut into fragments (files of a repository, for instance); each fragment is divided by itself."""
    fim_fragment_rate: Annotated[Fraction, used_with("data.fim_split_sample")] | None = None
    """FIM rate per fragment, within documents chosen by `--fim-rate`."""
    fim_no_prefix: str | None = None
    """Documents and fragments that start with this text are not divided."""
    fim_prefix_token: str = "<fim_prefix>"
    """Token before a prefix."""
    fim_middle_token: str = "<fim_middle>"
    """Token before a middle."""
    fim_suffix_token: str = "<fim_suffix>"
    """Token before a suffix."""
    fim_pad_token: str = "<fim_pad>"
    """Token that pads a sample that becomes shorter; masked in the loss."""
    fim_eod_token: str = "<|endoftext|>"
    """Token between the documents of a sample."""
