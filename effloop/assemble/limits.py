"""What a run needs of its machine, compared with what there is, before anything is loaded."""

from __future__ import annotations

from effloop.assemble.resolve import num_workers
from effloop.config import Config
from effloop.parallel import Slice
from effloop.system.shortage import check_batch_memory, check_open_files, check_workers


def check_limits(config: Config, ranks: Slice, *, on_host: bool) -> None:
    """Refuse more workers, open files or memory than this machine has.

    Args:
        config: of the run.
        ranks: this process, and how many share its cores.
        on_host: whether the images are normalised in the host's memory, too.

    Raises:
        ConfigError: with what is needed, and what there is.
    """
    workers = num_workers(config, ranks)
    check_workers(workers, ranks.sharing)
    check_open_files(workers if config.engine.worker_bytes else 0)
    pixels = max(size.pixels for size in config.train_sizes)
    check_batch_memory(config.batch_size, pixels * config.data.channels * (5 if on_host else 1))


def what_to_lower(config: Config) -> str:
    """What a run that needs less memory is started with, for messages."""
    half = f"batch_size={max(1, config.batch_size // 2)} (it is {config.batch_size})"
    more = f" with accumulate={2 * config.accumulate}" if config.batch_size > 1 else ""
    words = ["" if config.precision and config.precision.mixed else "precision=amp", "a smaller image_size"]
    if not getattr(config.model, "checkpointing", True):
        words.insert(1, "model.checkpointing=true")
    return f"set {half}{more}; or {', '.join(filter(None, words))}"
