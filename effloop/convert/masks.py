"""Masks of samples that are converted: as large as their images, and as small in bytes as can be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from effloop.convert.reencode import shrunk
from effloop.data.image.header import Encoded
from effloop.data.image.mask import check_size, decode_mask, encode_mask, mask_digest, resize_mask
from effloop.data.source.base import Kind, Source, target_bytes
from effloop.data.source.storage.writing import Record
from effloop.errors import DataError
from effloop.system.progress import in_order

SizeOf = Callable[[Encoded], tuple[int, int]]
"""An encoded image -> height and width, turned as its EXIF says where the decoder turns it."""


def with_masks(
    source: Source, records: Iterable[tuple[int, Record]], max_side: int | None, threads: int, size_of: SizeOf
) -> Iterator[Record]:
    """Numbered records with the samples' masks, where targets are masks; else as they are.

    Args:
        source: of the samples.
        records: (sample, its record).
        max_side: pixels of a mask's longer side, at most, as of its image; None leaves its size.
        threads: how many encode masks.
        size_of: the decoder's.

    Raises:
        DataError: as from `with_mask`.
    """
    if source.kind is not Kind.masks:
        yield from (record for _, record in records)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="effloop-masks") as pool:
        try:
            yield from in_order(pool, lambda each: with_mask(source, *each, size_of, max_side), records, 4 * threads)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def with_mask(source: Source, sample: int, record: Record, size_of: SizeOf, max_side: int | None = None) -> Record:
    """A record with the sample's mask, of classes, as large as the record's image.

    Raises:
        DataError: the mask can't be read, has changed, or is of another size than the image; the message names the
            sample.
    """
    try:
        mask = decode_mask(source.read_mask(sample), source.mask_format)
        if mask_digest(mask) != target_bytes(source.target_rows[sample]):
            raise DataError("has a mask that was changed since it was looked at; convert again")
        height, width = mask.shape
        mask = resize_mask(mask, *shrunk(height, width, max_side))
        check_size(mask.shape, *size_of(record.data))
    except DataError as error:
        raise DataError(f"{source.where}/{source.key(sample)} {error}") from error
    return record._replace(target=mask_digest(mask), mask=encode_mask(mask))
