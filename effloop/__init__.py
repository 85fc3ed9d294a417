"""EffLoop trains image classifiers on PyTorch as fast as the machine allows.

import effloop
cfg = effloop.compose(["data.root=/data/in1k"])
for batch in effloop.build_loader(cfg, split="train"):
    batch.images, batch.targets, batch.ids, batch.valid
effloop.build_trainer(cfg).fit()
effloop.load("outputs/RUN").predict(["cat.jpg"])
"""

from effloop.batch import Batch
from effloop.build.loader import build_loader
from effloop.build.trainer import build_trainer
from effloop.config import Config, compose
from effloop.inference.predictor import load

__version__ = "0.1.0"
__all__ = ["Batch", "Config", "build_loader", "build_trainer", "compose", "load"]
