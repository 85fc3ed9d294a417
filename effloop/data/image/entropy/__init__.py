"""Crops out of JPEGs that have no restart markers: an index beside the file, which stays as it is.

The index holds the states of the entropy decoder at every few MCUs of each row: bit position and DC predictors. With
it the bits of a crop are spliced into an ordinary smaller JPEG, whose pixels are those of the whole to the bit.
"""

from effloop.data.image.entropy.crop import crop_indexed
from effloop.data.image.entropy.index import VERSION, build_index, matches

__all__ = ["VERSION", "build_index", "crop_indexed", "matches"]
