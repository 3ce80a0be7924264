"""Outputs that are kept for a step, or sent to other ranks: their token lists become arrays."""

from array import array
from dataclasses import replace

# Type codes of array.array: int32, int8, float64.
TYPES = {
    "prompt_ids": "i",
    "response_ids": "i",
    "response_mask": "b",
    "response_logprobs": "d",
    "response_versions": "i",
}


class Numbers(array):
    """Numbers in an array, which equals the list of them. Its slices and sums are lists."""

    def __copy__(self, memo=None):
        return Numbers(self.typecode, self)

    __deepcopy__ = __copy__

    def __eq__(self, other):
        if not isinstance(other, list | array):
            return NotImplemented
        return self.tolist() == list(other)

    def __ne__(self, other):
        return not self == other

    def __getitem__(self, index):
        item = super().__getitem__(index)
        return item.tolist() if isinstance(index, slice) else item

    def __add__(self, other):
        return self.tolist() + list(other)

    def __radd__(self, other):
        return list(other) + self.tolist()


def compact(output):
    """Returns a copy of an AgentLoopOutput whose token lists are Numbers; it shares all else.

    Raises as its constructor does. A response token takes 17 bytes; in lists it takes up to 88."""
    lists = {name: Numbers(kind, getattr(output, name)) for name, kind in TYPES.items()}
    return replace(output, **lists)
