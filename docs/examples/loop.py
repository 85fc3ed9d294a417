"""A training loop of your own with EffLoop's loader: `python loop.py data.root=/data/pets image_size=64`."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn

import effloop

cfg = effloop.compose(["epochs=5", *sys.argv[1:]])
train = effloop.build_loader(cfg, split="train")
val = effloop.build_loader(cfg, split="val")


def block(channels: int, width: int) -> nn.Sequential:
    """(N, C, H, W) -> (N, width, H/2, W/2)."""
    convolution = nn.Conv2d(channels, width, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2))


torch.manual_seed(cfg.seed)
device = "cuda" if torch.cuda.is_available() else "cpu"
blocks = [block(channels, width) for channels, width in [(3, 32), (32, 64), (64, 128), (128, 256)]]
head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, len(train.classes))]
model = nn.Sequential(*blocks, *head).to(device, memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=cfg.epochs * len(train))

for epoch in range(cfg.epochs):
    model.train()
    for batch in train.epoch(epoch):  # (N, 3, H, W) float32 on the device, normalised
        loss = F.cross_entropy(model(batch.images), batch.targets, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

    model.eval()
    right = count = 0
    with torch.inference_mode():
        for batch in val.epoch(0):
            hits = model(batch.images).argmax(1) == batch.targets
            right += int(hits[batch.valid].sum())  # the last batch is padded: each image counts once
            count += int(batch.valid.sum())
    print(f"epoch {epoch}: loss {loss.item():.3f}, {right} of {count} right ({right / count:.1%})")
