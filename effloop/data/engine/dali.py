"""NVIDIA DALI: decodes, resizes and flips; order, crop boxes and flips come from the plan, as for every engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from effloop.batch import Batch, Skipped
from effloop.data.engine.base import Engine, EngineConfig, Ring, engines
from effloop.data.engine.daemons import DaemonThreads
from effloop.data.order import BatchRequest
from effloop.data.plan import Plan, Prepared
from effloop.data.source import Kind
from effloop.errors import ConfigError, optional_package, warn
from effloop.lazy import F, Tensor, torch


@dataclass
class DaliConfig(EngineConfig):
    """Fields of `engine=dali`.

    DALI decodes batches of plain, complete images: 8-bit grey and RGB of JPEG, PNG, WebP and BMP. A batch with another
    one is decoded by `decode`: CMYK, palettes, alpha, 16 bits, raw pixels, GIF, TIFF and the like, what `decode.exif`
    turns.
    For 768 photographs of 500x375 at 224x224 DALI 2.4's pixels, on a CPU, differ from the other engines' by 0.17 levels
    (mean), 0.21 in the worst image, at most 11 in any pixel. DALI 2.1, which had other decoders, differs as much.

    Without a GPU it is slower than threads: 2.7 ms of a core instead of 1.4 for such a photograph of 100 KB, of which
    its antialiased resize takes 1.2. The other keys of `decode` have no effect on what DALI decodes.
    """

    def host_batches(self, device: str) -> int:
        return 0 if device == "cuda" else super().host_batches(device)  # it keeps them on the GPU


class _Begun(NamedTuple):
    """A batch being loaded: by DALI, or as a whole by EffLoop's decoders."""

    request: BatchRequest
    given: bool  # to DALI
    batch: Batch | None
    fills: list[Future[list[Skipped]]]


@engines.register("dali", DaliConfig)
class DaliEngine(Engine):
    """DALI decodes, resizes and flips, with a GPU there; boxes and flips are EffLoop's."""

    exact = False

    def __init__(self, config: DaliConfig, plan: Plan, *, num_workers: int, device: torch.device) -> None:
        self.config = config
        self.plan = plan
        self.num_threads = max(1, num_workers)
        self.device = device
        self.ring = Ring(device)
        self._spare: list[_Pipeline] = []  # building one takes 12 ms, the first in a process 190
        if plan.source.kind is Kind.masks:
            raise ConfigError("engine: dali can't load masks with their images; set engine=threads")
        if not plan.augment.fast_path or plan.augment.has_rest:
            raise ConfigError(
                "engine: dali can only crop, resize and flip, and this augmentation does more or something else on "
                "the host; set engine=threads" + " or augment.device=gpu" * plan.augment.fast_path
            )
        optional_package("nvidia.dali", "engine=dali", "effloop[dali]")

    def stream(self, epoch: int, samples_seen: int = 0) -> Iterator[Batch]:
        """As every engine's; with a GPU, the images are already there."""
        requests = self.plan.requests(epoch, samples_seen)
        begun: deque[_Begun] = deque()
        reading: deque[tuple[BatchRequest, Future[Prepared | None]]] = deque()
        if self._spare:
            pipeline = self._spare.pop()
        else:
            pipeline = _Pipeline(
                self.plan.order.batch_per_rank, self.plan.shape_of_image, self.num_threads, self.device
            )
        pool = DaemonThreads(self.num_threads, "effloop-read")
        try:
            for request in requests:
                reading.append((request, pool.submit(self._read, request)))
                if len(reading) > 1:
                    begun.append(self._begin(pipeline, pool, *reading.popleft()))
                if len(begun) > self.config.prefetch:
                    yield self._finished(pipeline, pool, begun.popleft())
            while reading:
                begun.append(self._begin(pipeline, pool, *reading.popleft()))
            while begun:
                yield self._finished(pipeline, pool, begun.popleft())
        finally:
            pool.close()
        self._spare.append(pipeline)  # not after leaving early, when it still has work

    def close(self) -> None:
        self._spare.clear()
        self.ring = Ring(self.device)

    def _read(self, request: BatchRequest) -> Prepared | None:
        """Read a batch's samples; None unless DALI decodes all of them like EffLoop's decoders."""
        try:
            prepared = self.plan.prepare(request.epoch, request.ids[: request.filled])
        except Exception:
            return None  # `fill` raises it, when it is this batch's turn
        plain = (
            info.plain and info.complete and info.format != "PNM" and info.orientation == 1 for info in prepared.infos
        )
        return prepared if request.filled and all(plain) else None

    def _begin(
        self, pipeline: _Pipeline, pool: DaemonThreads, request: BatchRequest, reading: Future[Prepared | None]
    ) -> _Begun:
        prepared = pool.result(reading, self.config.timeout_s, self.plan.source)
        if prepared is None:
            return self._load(pool, request)
        pipeline.feed(prepared)
        return _Begun(request, True, None, [])

    def _load(self, pool: DaemonThreads, request: BatchRequest) -> _Begun:
        batch = self.plan.empty_batch(request, self.ring.take(self.plan.shape(len(request.ids))))
        rows = range(0, request.filled, _RUN)
        fills = [pool.submit(self.plan.fill, request, batch.images, row, row + _RUN) for row in rows]
        return _Begun(request, False, batch, fills)

    def _finished(self, pipeline: _Pipeline, pool: DaemonThreads, begun: _Begun) -> Batch:
        request = begun.request
        pixels = pipeline.take() if begun.given else None
        if pixels is not None and len(pixels) == len(request.ids):
            return self.plan.empty_batch(request, pixels)
        if pixels is not None:  # the others are padding
            batch = self.plan.empty_batch(request)
            batch.images = self.plan.images(F.pad(pixels, (*(0,) * 7, len(request.ids) - len(pixels))))
            return batch
        _, _, loaded, fills = self._load(pool, request) if begun.given else begun
        assert loaded is not None
        skipped = [each for fill in fills for each in pool.result(fill, self.config.timeout_s, self.plan.source)]
        if begun.given:  # `decode` decides, and names the sample
            warn(f"engine=dali: DALI refused a batch that decode accepted, which is slow: {pipeline.refusal}")
        return self.plan.amend(loaded, skipped)


_RUN = 4  # samples that a thread takes at a time, of a batch that DALI doesn't get


class _Pipeline:
    """A DALI pipeline and the batches in it.

    DALI's dynamic executor (its default) accepts any number of batches ahead, and its outputs stay valid while they
    are referred to, so they are passed on without a copy. `refusal`: why it refused the last batch that it refused.
    """

    def __init__(self, batch: int, shape: tuple[int, int, int], num_threads: int, device: torch.device) -> None:
        self.options = {"batch_size": batch, "num_threads": num_threads, "device_id": device.index}
        self.shape = shape
        self.device = device
        self.refusal = ""
        self._given: deque[Prepared] = deque()
        self._pipeline = self._built()

    def _built(self) -> Any:
        dali = optional_package("nvidia.dali", "engine=dali", "effloop[dali]")
        fn = optional_package("nvidia.dali.fn", "engine=dali", "effloop[dali]")
        types = optional_package("nvidia.dali.types", "engine=dali", "effloop[dali]")
        # With a longer queue the first run would need as many batches at once.
        pipeline = dali.Pipeline(**self.options, prefetch_queue_depth=1, exec_dynamic=True)
        with pipeline:
            inputs = [fn.external_source(name=name) for name in ("encoded", "corners", "sizes", "flips")]
            encoded, corners, sizes, flips = inputs
            images = fn.decoders.image_slice(
                encoded,
                corners,
                sizes,
                axes=[0, 1],
                output_type=types.GRAY if self.shape[2] == 1 else types.RGB,
                device="mixed" if self.device.type == "cuda" else "cpu",
                normalized_anchor=False,
                normalized_shape=False,
                adjust_orientation=False,
                jpeg_fancy_upsampling=True,  # as on the CPU
            )
            pipeline.set_outputs(fn.flip(fn.resize(images, size=self.shape[:2]), horizontal=flips))
        pipeline.build()
        return pipeline

    def feed(self, prepared: Prepared) -> None:
        """Start a batch; the bytes are copied."""
        self._given.append(prepared)
        draws = prepared.draws
        self._pipeline.feed_input("encoded", [np.frombuffer(each, np.uint8) for each in prepared.encoded])
        self._pipeline.feed_input("corners", np.ascontiguousarray(draws.boxes[:, :2]))
        self._pipeline.feed_input("sizes", np.ascontiguousarray(draws.boxes[:, 2:]))
        self._pipeline.feed_input("flips", draws.flips.astype(np.int32))
        self._pipeline.schedule_run()

    def take(self) -> Tensor | None:
        """(N, H, W, C) uint8 of the oldest batch, on the GPU if there is one; None if DALI refuses it."""
        self._given.popleft()
        try:
            with torch.accelerator.device_index(self.device.index):  # None, of a CPU, changes nothing
                stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
                (found,) = self._pipeline.share_outputs(stream)
                pixels = torch.utils.dlpack.from_dlpack(found.as_tensor())
                self._pipeline.release_outputs()
        except RuntimeError as error:  # DALI doesn't name the sample, and the pipeline can't be used any more
            self.refusal = " ".join(str(error).rpartition("encountered:")[2].partition("Current pipeline")[0].split())
            self._pipeline, begun = self._built(), list(self._given)
            self._given.clear()
            for prepared in begun:
                self.feed(prepared)
            return None
        return pixels
