"""Labels that predictions contradict, and classes that are taken for each other: confident learning (Northcutt, Jiang
and Chuang 2021, "Confident learning: estimating uncertainty in dataset labels"), as cleanlab 2.9 defines it.

Images are predicted by a run that wasn't trained on them, or by logistic regression on the features of packaged
weights, with cross-validation.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy, normalize

from effloop import config as configs
from effloop import model as networks
from effloop.assemble.environment import resolved
from effloop.assemble.loader import loader_of
from effloop.assemble.model import build_model
from effloop.audit.findings import Finding, Place
from effloop.audit.scan import kept
from effloop.config import Config
from effloop.data.source.base import Kind, Source, at_most
from effloop.data.source.view import View, unwrapped
from effloop.errors import ConfigError
from effloop.inference import ensemble
from effloop.inference.predict import SizedPlan
from effloop.inference.trained import Trained
from effloop.model.parameters import Features
from effloop.precision import precisions
from effloop.system import gpu
from effloop.system.progress import Meter, duration

LIMIT_S = 600.0
"""Seconds that features take at most where nobody has asked for them."""

FOLDS = 5

_STRENGTH = 1.0  # of the regularisation; each image's features have a length of 1
_CONFUSED = 0.05  # share of both classes that is taken for the other
_EXAMPLES = 3  # of each of them
_TIMED = 256  # images, after which it is known how long all take
_FEATURES = np.dtype([("done", np.bool_), ("values", np.float16, 1280)])


@dataclass(frozen=True)
class Judged:
    """What a run predicts for images that it wasn't trained on."""

    describe: str  # the run, in words
    classes: tuple[str, ...]  # names of its outputs; empty where targets aren't classes
    probabilities: NDArray[np.float32]  # (N, K) of all splits' samples in turn; NaN where it doesn't predict one
    score: str  # the first of the task's scores, in words, on its validation split
    without: str  # the same without the samples that are left out


def open_run(run: Path, overrides: Sequence[str]) -> Trained:
    """A run, or those of folds, whose images may be unreadable; errors as of `ensemble.open_runs`."""
    return ensemble.open_runs(run, [*overrides, "on_error=skip", "max_errors=1e12"], "probabilities", "val")


@torch.inference_mode()
def judge(trained: Trained, splits: Mapping[str, Source], left_out: Collection[Place]) -> Judged:
    """Score a run on its validation split, or those of folds on all images, with and without some samples."""
    loader, task = trained.loader("val"), trained.task
    source, by_class = loader.plan.source, loader.plan.source.kind is Kind.classes
    whole, its = unwrapped(source)
    numbers = {}  # of each split's samples in the source, else the last
    for name, split in splits.items():
        of, samples = unwrapped(split)
        places = np.full(len(of), len(source))
        if of.identity() == whole.identity():
            places[its] = np.arange(len(its))
        numbers[name] = places[samples]
    stays = np.ones(len(source) + 1, np.bool_)
    stays[[numbers[place.split][place.sample] for place in left_out]] = False
    scorers = [*trained.scorers(), *trained.scorers()]
    found = np.full((len(source) + 1, trained.num_outputs if by_class else 1), np.nan, np.float32)
    with Meter() as meter, closing(loader):
        meter.begin("predictions", total=len(source))
        for batch in loader.epoch(0):
            outputs, ids = trained.forward(batch.images), batch.ids.numpy()
            some = batch.valid & torch.from_numpy(stays[ids]).to(trained.device)
            for scorer, valid in zip(scorers, (batch.valid, some), strict=True):
                scorer.add(outputs, replace(batch, valid=valid))
            if by_class:
                seen = batch.valid.cpu().numpy()
                found[ids[seen]] = outputs.float().softmax(dim=1).cpu().numpy()[seen]
            meter.advance(len(ids))
    texts = [task.meters[0].text(scorer.scores()[task.meters[0].name]) for scorer in scorers]
    probabilities = np.concatenate([found[rows] for rows in numbers.values()])
    return Judged(trained.describe(), trained.classes if by_class else (), probabilities, *texts)


def find(
    splits: Mapping[str, Source],
    records: Mapping[str, NDArray[Any]],
    config: Config,
    run: Judged | None = None,
    limit_s: float = LIMIT_S,
) -> tuple[list[Finding], list[str]]:
    """What predictions say about the labels of some splits with `records` as of `scan`, and lines on what predicts, or
    why nothing does. Features of what the run doesn't predict may take `limit_s` seconds; `config` says how images are
    decoded, and on which device.
    """
    sources, findings, notes = splits.values(), list[Finding](), list[str]()
    if kinds := {source.kind.value for source in sources} - {Kind.classes.value}:
        return [], [f"wrong labels are looked for only where each image has one class; the targets are {kinds.pop()}"]
    ours = run.classes if run else ()
    classes = [*dict.fromkeys([*ours, *(name for source in sources for name in source.classes)])]
    tables = [np.array([*map(classes.index, source.classes), -1]) for source in sources]  # no class: -1
    labels = np.concatenate([of[at_most(each.labels, len(of) - 1)] for of, each in zip(tables, sources, strict=True)])
    places = [Place(name, sample) for name, source in splits.items() for sample in range(len(source))]
    probabilities, predicted = np.full((len(labels), len(classes)), np.nan, np.float32), []
    if run:
        probabilities[:, : len(ours)] = run.probabilities
        predicted.append((run.describe, ~np.isnan(probabilities[:, 0])))
        probabilities[predicted[0][1], len(ours) :] = 0
    rest = np.isnan(probabilities[:, 0]) & np.concatenate([records[name]["state"] == 1 for name in splits])
    counts = np.bincount(labels[rest & (labels >= 0)], minlength=len(classes) + 1)
    rest &= counts[labels] >= FOLDS  # each fold has one of each class
    if rest.any():
        try:
            features = _features(splits, rest, config, limit_s)
            probabilities[rest] = _out_of_fold(features, labels[rest], len(classes), config.seed)
            how = f"{FOLDS}-fold cross-validation of logistic regression on features of efficientnet_lite0"
            predicted.append((how, rest & ~np.isnan(probabilities[:, 0])))
        except ConfigError as error:
            notes.append(f"labels of {rest.sum():,} images aren't compared with predictions: {error}")
    joint, examples = np.zeros((len(classes), len(classes)), np.int64), dict[tuple[int, int], list[Place]]()
    for how, rows in predicted:
        used = np.flatnonzero(rows & (labels >= 0))
        of, own = probabilities[used], labels[used]
        best = of.argmax(axis=1)
        wrong, ratios, its = contradicted(of, own)
        joint += its
        notes.append(f"{np.count_nonzero(best == own):,} of {len(used):,} labels are as predicted by {how}")
        for row in wrong.tolist():
            place, label, taken = places[used[row]], int(own[row]), int(best[row])
            text = f"predicted: {classes[taken]} ({of[row, taken]:.2f})"
            findings.append(Finding("label", (place,), text, 1 - float(ratios[row])))
            examples.setdefault((label, taken), []).append(place)
    shares = joint / np.maximum(np.bincount(labels[labels >= 0], minlength=len(classes)), 1)[:, None]
    both = np.triu(np.minimum(shares, shares.T), 1)
    for one, other in np.argwhere(both >= _CONFUSED).tolist():
        pairs = (one, other), (other, one)
        text = ", ".join(f"{shares[pair]:.0%} of {classes[pair[0]]} are taken for {classes[pair[1]]}" for pair in pairs)
        shown = [place for pair in pairs for place in examples.get(pair, [])[:_EXAMPLES]]
        findings.append(Finding("confused", (*shown,), text, float(both[one, other])))
    return findings, notes


def contradicted(
    probabilities: NDArray[np.float32], labels: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """Samples whose label is probably wrong. As many as confident learning counts: those that are taken for another
    class, which is the most probable one, too. A sample is taken for the class whose probability is at least its mean
    over the samples with that label; of several, for the most probable class.

    (N, K), out of fold, and (N,) -> the samples with the lowest ratios, that first; (N,) ratios of the label's
    probability to the highest other one; (K, K) how many samples of each class are taken for which.
    """
    rows, num_classes = np.arange(len(labels)), probabilities.shape[1]
    own, totals = probabilities[rows, labels].astype(np.float64), np.bincount(labels, minlength=num_classes)
    means = np.bincount(labels, own, num_classes) / np.maximum(totals, 1)
    confident = probabilities >= np.where(totals, means, 2) - 1e-6
    taken = np.where(confident.sum(axis=1) > 1, probabilities.argmax(axis=1), confident.argmax(axis=1))
    sure = confident.any(axis=1)
    joint = np.bincount(labels[sure] * num_classes + taken[sure], minlength=num_classes**2)
    others = probabilities.copy()
    others[rows, labels] = 0
    best = others.max(axis=1)
    # cleanlab ranks by `own`, which finds labels that were changed at random, or by `own - best`, which finds those
    # that were changed to a similar class. Their ratio finds both; it is the margin of the logits (Pleiss et al. 2020,
    # "Identifying mislabeled data using the area under the margin ranking").
    ratios = own / best
    count = np.count_nonzero(sure & (taken != labels) & (best > own + 1e-6))
    lowest = np.argsort(ratios, kind="stable")[:count]
    return lowest[ratios[lowest] < 1], ratios, joint.reshape(num_classes, num_classes)


def _features(
    splits: Mapping[str, Source], wanted: NDArray[np.bool_], config: Config, limit_s: float
) -> NDArray[np.float16]:
    """(n, D) features of the samples of all splits in turn that are wanted, 0 for those that can't be decoded; they
    are kept in the cache folder. A ConfigError if the weights aren't installed, or it takes longer than `limit_s`.
    """
    probe = configs.compose(["experiment=probe", "task=classification", "data.root=."])
    probe = replace(probe, decode=config.decode, device=config.device, num_workers=config.num_workers)
    parts, ends = [], np.cumsum([len(split) for split in splits.values()])[:-1]
    for split, of in zip(splits.values(), np.split(wanted, ends), strict=True):
        whole, samples = unwrapped(split)
        rows, samples = kept("features", _FEATURES, whole, config.data.index_dir), samples[of]
        parts.append((whole, rows, samples, samples[~rows["done"][samples]]))
    device, done, started = gpu.use(gpu.find_device(config.device)), 0, time.perf_counter()
    with Meter() as meter:
        if total := sum(len(left) for *_, left in parts):
            model = build_model(resolved(probe), 1000, device)
            normalisation = tuple(probe.data.mean or ()), tuple(probe.data.std or ())
            networks.load_weights(model, "DEFAULT", probe.model.zoo, probe.image_size, normalisation)
            features = Features(model, networks.find_head(model.eval(), probe.size))
            precision = precisions.build(resolved(probe).precision, device)
            meter.begin("features", total=total)
        for whole, rows, _, left in filter(lambda part: len(part[-1]), parts):
            with closing(loader_of(probe, View(whole, left), SizedPlan)) as loader:
                for batch in loader.epoch(0):
                    with precision.autocast():
                        values = features(batch.images)[batch.valid].cpu().numpy()
                    at = left[batch.ids[batch.valid.cpu()].numpy()]
                    rows["values"][at] = values
                    rows["done"][at] = True  # last: this process may be killed
                    meter.advance(len(at))
                    done += len(at)
                    needs = (time.perf_counter() - started) / max(done, 1) * total
                    if done >= _TIMED and needs > limit_s:
                        raise ConfigError(f"features of {total:,} take {duration(needs)}; labels=true computes them")
    return np.concatenate([rows["values"][samples] for _, rows, samples, _ in parts])


def _out_of_fold(features: NDArray[Any], labels: NDArray[np.int64], num_classes: int, seed: int) -> NDArray[np.float32]:
    """(N, D), (N,) -> (N, K) probabilities by logistic regression that was fitted to the other folds; NaN for samples
    without features.
    """
    found, used = np.full((len(labels), num_classes), np.nan, np.float32), np.flatnonzero(features.any(axis=1))
    x, y = torch.from_numpy(features[used].astype(np.float32)), torch.from_numpy(labels[used])
    x = torch.cat([normalize(x), torch.ones(len(x), 1)], dim=1)
    drawn = np.random.default_rng(seed).permutation(len(used))
    fold = torch.empty(len(used), dtype=torch.long)
    fold[drawn[np.argsort(labels[used][drawn], kind="stable")]] = torch.arange(len(used)) % FOLDS
    for number in range(min(FOLDS, len(used))):
        held, weight = fold == number, torch.zeros(x.shape[1], num_classes, requires_grad=True)
        its, of = x[~held], y[~held]
        optimizer: Any = torch.optim.LBFGS([weight], max_iter=100, tolerance_grad=0.1, line_search_fn="strong_wolfe")

        def loss(weight: torch.Tensor = weight, its: torch.Tensor = its, of: torch.Tensor = of) -> torch.Tensor:
            weight.grad = None
            total = cross_entropy(its @ weight, of, reduction="sum") + _STRENGTH / 2 * weight[:-1].square().sum()
            torch.autograd.backward(total)
            return total

        optimizer.step(loss)
        found[used[held.numpy()]] = (x[held] @ weight).softmax(dim=1).detach().numpy()
    return found
