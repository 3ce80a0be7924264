"""Images: loading them, their tokens, and in a packed batch their pixels and positions."""

import functools
import io
import itertools
import weakref
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils._pytree import tree_leaves

from flatrl.devices import to_device
from losses import turn_starts

# ---------------------------------------------------------------- images and their tokens


def load_image(source) -> Image.Image:
    """Returns an image, upright and in RGB.

    source: a path, bytes, a dict {"bytes", "path"} as in Hugging Face's files, or a PIL image.
    Transparent pixels show a white background, as in vLLM. 16-bit greys keep their upper byte.
    Raises ValueError if it can't be read, or if its pixels have no known range."""
    source = _file_of(source)
    try:
        image = source
        if isinstance(source, bytes):
            image = Image.open(io.BytesIO(source))
        elif not isinstance(source, Image.Image):
            image = Image.open(source)
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16"):  # PIL would clip them to white
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        elif image.mode in ("I", "F"):
            raise ValueError(f"its mode is {image.mode!r}; give 8 or 16 bits a pixel")
        elif image.has_transparency_data:
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image.convert("RGBA"))
        return image.convert("RGB")
    except Exception as error:  # PIL, the file system and a wrong type each raise their own
        raise ValueError(f"{source!r:.80} can't be read as an image: {error}") from None


def _file_of(source):
    """Returns the bytes or the path of a dict {"bytes", "path"}, and any other source as it is."""
    if isinstance(source, dict):
        return source.get("bytes") or source.get("path")
    return source


_cached_image = functools.lru_cache(maxsize=64)(load_image)


def load_images(sources: Iterable) -> list[Image.Image]:
    """Loads images (`load_image`). They are copies, because a rollout may draw on them."""
    loaded = []
    for source in map(_file_of, sources):
        load = load_image if isinstance(source, Image.Image) else _cached_image
        loaded.append(load(source).copy())
    return loaded


def merge_images(outputs: Iterable):
    """Makes equal images of outputs one object, sent to other ranks and preprocessed only once."""
    known = {}
    for output in outputs:
        pixels = [(image.size, image.tobytes()) for image in output.images]
        output.images = list(map(known.setdefault, pixels, output.images))


def image_tokens(images: Sequence, processor) -> list[int]:
    """Returns the number of tokens of each image. Raises ValueError for an impossible shape."""
    sizes = [(image.height, image.width) for image in images]
    return processor._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"]


def expand(ids: list[int], images: Sequence, processor) -> list[int]:
    """Repeats each image's placeholder for every token of the image, as the model expects.

    processor: the model's image processor; None for text models. Raises ValueError unless
    there is one placeholder for each image, and the model accepts each image's shape."""
    if processor is None:
        if images:
            raise ValueError("there are images, and this model reads text only")
        return ids
    placeholder = processor.image_token_id
    n_found = ids.count(placeholder)
    if n_found != len(images):
        raise ValueError(f"there are {len(images)} images, but {n_found} placeholders")
    counts = iter(image_tokens(images, processor))
    expanded = []
    for token in ids:
        n = next(counts) if token == placeholder else 1
        expanded += [token] * n
    return expanded


def check_images(output, processor):
    """Raises ValueError unless an output's ids have a run of placeholders for each image."""
    if processor is None:
        expand([], output.images, None)  # raises if there are images
        return
    runs = itertools.groupby(output.prompt_ids + output.response_ids)
    found = [len([*run]) for token, run in runs if token == processor.image_token_id]
    expected = image_tokens(output.images, processor)
    if found != expected:
        raise ValueError(f"the ids have runs of {found} placeholders, the images take {expected}")


# ---------------------------------------------------------------- a packed batch


def prefix_ids_of(input_ids: Tensor, images: list[list], image_token_id: int) -> Tensor:
    """Returns input_ids (B, L) with -1, -2, ... for each image's placeholders.

    By them, rows with equal images can share a prefix. images: B lists, in which equal images are
    one object (`merge_images`)."""
    prefix_ids = input_ids.clone()
    numbers = {}  # of images, by id
    for ids, row_images in zip(prefix_ids, images):
        if not row_images:
            continue
        is_placeholder = ids == image_token_id  # (L,), one run for each image, see `check_images`
        of_row = [numbers.setdefault(id(image), -1 - len(numbers)) for image in row_images]
        image = turn_starts(is_placeholder).cumsum(0)[is_placeholder] - 1
        ids[is_placeholder] = torch.tensor(of_row)[image]
    return prefix_ids


class Vision:
    """Makes a vision-language model's inputs besides tokens: encoded images, and positions.

    For Qwen2-VL, Qwen2.5-VL, Qwen3-VL and models built like them. An image's pixels are
    computed when it is first packed on a rank, and kept there as long as the image itself."""

    def __init__(self, processor):
        self.processor = processor.image_processor
        self.image_token_id = processor.image_token_id
        self.pixels = {}  # id of a living image -> what the processor makes of it
        self.blank = Image.new("RGB", (56, 56))

    def _preprocessed(self, name, images):
        """Returns pixel_values, (patches, values of a patch), or image_grid_thw, (images, 3)."""
        for image in images:
            if id(image) not in self.pixels:
                self.pixels[id(image)] = self.processor(images=[image], return_tensors="pt")
                weakref.finalize(image, self.pixels.pop, id(image))
        return torch.cat([self.pixels[id(image)][name] for image in images])

    def _encode(self, model, images, device):
        """Returns the vision tower's output for some images."""
        names = "pixel_values", "image_grid_thw"
        pixels, grid = to_device([self._preprocessed(name, images) for name in names], device)
        return model.get_image_features(pixels, grid, return_dict=True)

    def inputs(self, model, packed: dict) -> dict:
        """Returns a model's further inputs for rows with images.

        packed: as from `data.pack_rows`. The result is position_ids (3, 1, P), in place of those
        in packed["inputs"], and mm_encoder_outputs, the vision tower's. It runs here because
        model.forward would pass it cu_seqlens, and encodes an image in a shared prefix once."""
        positions = []
        images_to_encode = []
        for ids, images, n_shared in packed["images"]:
            ids = torch.as_tensor(ids)  # (L,)
            is_placeholder = ids == self.image_token_id
            grid = self._preprocessed("image_grid_thw", images) if images else None
            row_positions, _ = model.get_rope_index(
                ids[None], mm_token_type_ids=is_placeholder[None].int(), image_grid_thw=grid
            )
            positions.append(row_positions[..., n_shared:])
            n_images_shared = turn_starts(is_placeholder)[:n_shared].sum()
            images_to_encode += images[n_images_shared:]
        device = packed["targets"].device
        return {
            "position_ids": to_device(torch.cat(positions, dim=2), device),
            "mm_encoder_outputs": {"image": self._encode(model, images_to_encode, device)},
        }

    def zero(self, model, device) -> Tensor:
        """Returns 0, computed by the vision tower, for a forward pass without images.

        Other ranks may have some, and DDP and FSDP wait for every rank's gradients."""
        outputs = self._encode(model, [self.blank], device)
        return 0 * sum(output.float().sum() for output in tree_leaves(outputs))
