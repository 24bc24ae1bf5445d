"""How an image is written in a text: placeholders, one for each of its features, and what families of models put around them.

A placeholder is written once for a part of an image and repeated as an id, so that a text of thousands of them is not encoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from petatron.data.images.image_policies import ImageLayout
from petatron.data.multimodal.multimodal_tokenizer import IMAGE, IMAGE_TAGS


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMarkup:
    """The text of an image. tile: what is before each tile, with {row} and {column} from 1 on; None where tiles have nothing between them.

    thumbnail: what is before an image that has no tiles, and before the thumbnail of others. after_row: what ends a row of tiles.
    """

    placeholder: str = IMAGE
    before: str = ""
    after: str = ""
    tile: str | None = None
    thumbnail: str = ""
    after_row: str = ""

    def written(self, layout: ImageLayout) -> tuple[str, list[int]]:
        """Returns the text of an image, and how many of its parts each placeholder in it stands for.

        >>> IMAGE_MARKUPS["qwen2-vl"].written(ImageLayout(((28, 28),)))
        ('<|vision_start|><|image_pad|><|vision_end|>', [1])
        """
        if self.tile is None:
            return f"{self.before}{self.placeholder}{self.after}", [len(layout.sizes)]
        text = ""
        for row in range(layout.rows):
            for column in range(layout.columns):
                text += self.tile.format(row=row + 1, column=column + 1) + self.placeholder
            text += self.after_row
        if layout.rows:
            text += self.after_row
        if not layout.rows or layout.has_thumbnail:
            text += f"{self.before}{self.thumbnail}{self.placeholder}"
        return text + self.after, [1] * len(layout.sizes)


def _tagged(name: str) -> ImageMarkup:
    before, after = IMAGE_TAGS[name]
    return ImageMarkup(before=before, after=after)


_SMOLVLM = "<fake_token_around_image>"
IMAGE_MARKUPS: Mapping[str, ImageMarkup] = {
    "plain": ImageMarkup(),
    "llava": ImageMarkup(),
    "nvlm": _tagged("nvlm"),
    "internvl": _tagged("internvl"),
    "qwen2-vl": ImageMarkup(placeholder="<|image_pad|>", before="<|vision_start|>", after="<|vision_end|>"),
    "smolvlm": ImageMarkup(
        before=_SMOLVLM,
        after=_SMOLVLM,
        tile=_SMOLVLM + "<row_{row}_col_{column}>",
        thumbnail="<global-img>",
        after_row="\n",
    ),
}
