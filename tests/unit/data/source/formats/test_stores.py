"""Arrays of other programs: `.npz`, IDX, HDF5, zarr and `.beton`."""

from __future__ import annotations

import base64
import gzip
import json
import lzma
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from images import encode
from plans import line, make_decoder, open_source, read_bytes
from runs import train
from stores import (
    Splits,
    jpeg_of,
    make_splits,
    write_beton,
    write_hdf5,
    write_hdf5_files,
    write_idx,
    write_npy,
    write_npz,
    write_zarr,
    write_zarr2,
)

from effloop.cli.main import main
from effloop.data.image.header import pnm_header, read_header
from effloop.data.source import Kind, NoSplitError
from effloop.data.source.folder import FolderSource
from effloop.data.source.splits import find_split
from effloop.errors import DataError, EffLoopError

SPLITS = make_splits(train=16, test=8)
STORES: dict[str, tuple[str, Callable[[Path, Splits], Path]]] = {
    "set.npz": ("npz", write_npz),
    "npy": ("npz", write_npy),
    "mnist": ("idx", write_idx),
    "set.h5": ("hdf5", write_hdf5),
    "files": ("hdf5", write_hdf5_files),
    "set.zarr": ("zarr", write_zarr),
    "set2.zarr": ("zarr", write_zarr2),
    "beton": ("beton", write_beton),
}
CLASSES = {"set.h5": ("a", "b", "c")}


def wanted(name: str, split: str, number: int) -> bytes:
    """The bytes of a sample."""
    image = SPLITS[split][0][number]
    if name == "files":
        return encode(image, "PNG")
    if name == "beton" and number % 3 == 0:
        return jpeg_of(number)
    if name == "mnist":
        return pnm_header(9, 8, 1) + image[:, :, 0].tobytes()
    return pnm_header(9, 8, 3) + image.tobytes()


BETON = lzma.decompress(
    base64.b85decode(
        rb"{Wp48S^xk9=GL@E0stWa8~^|S5YJf5|Nj#Kqg?<203lJ<Mo0rz5^pDdqt)B`n8$Bw!j6C!2ftn^4xZ`Q(WBnspk1iqM2`+t*n<N5q&y{00h?PKlx"
        rb";~*=^FBf?*xwW_4RU=8HuG|bQ5ajF!L?fZgAp<daiE=>KI&Te=9q{y~R8G7+;kU5zD`X<o&~O<`)Iul$8<?^T0BN0aO$*CP#+ZK2e>v2Eeu5QP%<"
        rb"5k+6CRtw;R|b9RWgmRGE{P2p)BZ~IG#5Ntxrh(BBakI+u9CMc9~A3cvG;c%X(BVX(&%Z1UEn2LTXk@6>X_Zh$jm`#}d*ss-)55y%?`1O%CF$JZt?"
        rb"r*_xO-BsTkrAq`U>&;7u_qW@S%&FmQdqv}cC1<C<y!>^`N!I={QFWXbj==HAVT@wQ$6@8WC=Tf%PMT&wL9>{y)Iv>4?as~LXZ;<{}7Y-ad=ty3(f"
        rb"zPC`J#d{CwW~nlLU_z>kIVgMq+h#3fVs^^rC)1*Nd=Z^3X)M-0)C5vr|V9lFl3Cm38=hUsQfSib3YtXbscTLlRD$J(v@`%)`(%^q7ILiycOJ@?}4"
        rb"3Dckd5CJOy>~mA6{l2bzF&dw@jWKR;o~I*U>?q5H(Uq8rekzgjCw2E3zy_F2nElwV)sPRwB~$qIkv1^}rLgXA!EjAS4AGGhs;yuhy3VmD7+hI~>1"
        rb"I+`zUg+XS>)wg1qk`a+O7QiQY&=L9$O$n`Q1}J_$g!wJAlh7Y~Qsz@Wj0?U#bs2OJ+il6Au3nllXCXS@;Xh|CK0452^fo-us#`E>^&gh4X`fz-7c"
        rb"GQ~33fHZcXIu<mcca7{-H(UB3VtzaFx&ao#LTv>+cW>Q$b>2|DH<mFoh2>Hj_t^E5^D|F2sTOdOD-BUgIDP##dfXgau-?cmN#Jw(Gst-O(W<rn?4"
        rb"*w97_;Gky_zTVdl_*9Jsr-E2`<gH=R=|&i^MirFWyB>>4?nV>{}2Hy0PJ&9r~SUJd@&lIw~aAwaGs|lU+gH$h0&Fmihe4Q@+Woo8NddZO_=@Iuho"
        rb"zb#3fVs^^rC)1*Nd=Z^3X)M-0)C5vr|V9lFl3Cm38=hUsQfSib3YtXbscTLlRD$J(v@`%)`(%^q7ILiycOJ@_eP2|IwxDs11iJMhH4E?=q-K1*go"
        rb"kP{C75R>?Ecv<)h&Ht4sMh~g{eBS$-FfLZWkA?Gtfxu<NB~$qIkv1^}rLgXA!EjAS4AGGhs;yuhy3VmD7+hI~>1I+`zUg+XS>)wg1qk`a+O7QiQY"
        rb"&=L9$O$n`Q1}J_$g!wJAlh7Y~Qsz@Wj0?U#bs2OJ+il6Au3nllXCXS@;Xh|CK0452^fo-us#`E>^&gh4X`fz-7cGQ4c?|pZ^d6D*)_sQ>XpDu6!{"
        rb"XpSO)MZg8HbBVX(&%Z1UEn2LTXk@6>X_Zh$jm`#}d*ss-)55y%?`1O%CF$JZt?r*_xO-BsTkrAq`U>&;7u_qW@S%&FmQdqv}cC1<C<y!>^`N!I={"
        rb"QFWXbj==HAVT@wQ$6@8WC=Tf%PMT&wL9>{y)Iv>4?as~LXZ;<{}7Y-ad=ty3(fzPC`J#d{CwW~nlLU_z>kIVgMq+h#3fVs^^rC)1*Nd=Z^3X)M-0"
        rb")C5vr|V9lFl3Cm38=hUsQfSib3YtXbscTLlRD$J(v@`%)`(%^q7ILiycOJ@_eP2|IwxDs11iJMhH4E?=q-K1*gokP{C75R>?Ecv<)h&Ht4sMh~g{"
        rb"eBS$-FfLZWkA?Gtfxu<NB~cGQvY-Ff0`UNQWwK4^02IZ(p^u9Y^PfCU7G4dq;a>kK;-fW>RU6^1Z>6#^kU#>?+ykPBRI8m|$2I#k8p9c>G5CYzsS"
        rb"IHHjhcMe?du!+QF9Jmv4TT4Tu(IL;BlS1h*Q(M99~uQ{kC}nC$GQ@61Cb)6<jAddmqH|BQi<Z5O+0OmuM~rnhbLpq{u-ZFDMs7Cl$eqdqXN<xYwe"
        rb"7y5I=PV@J!#3lFekxt3d1uPDXlpP-wrO#3GP#4chXoB7JJ%|G)JJPxt*dPUU5tiNuSb&jNMuZX=W>V#!3ymF}K?6`ZtJ<7GY6T5{?;j=JGehEz8C"
        rb"Rg%(65u#Al;9*tY;dwb%~et#!{m2sQM~Ph-?f=5{$gPpOw{{ThQ?;qP{~dQ<O^8Vy$Mpux=Q%!B>s60r@_woUV1mMR9RvHc*;<P1C^UX9*Qu?U&^"
        rb"h>Wpejc@Lyrn+P~c7EVOa-?)GGdQ|}cQ@{?)kFE~;2#KN6v#>2s@xpp}5qm&ebj~`Aoahk<1RKMV2RXtPKcYTe<Hw1MlveMotIDgpYgySJ|vAuIz"
        rb"!UuinF!N~Ah8sd%x2=q+r8n*4FM5kl)!az)UQqZ=(?Br1Ml_2a*k*tCi9$C#U;0NXr5=i?ny6kRo@vqG#@(I$)+KmZ_zTVdl_*9Jsr-E2`<gH=R="
        rb"|&i^MirFWyB>@`1O%CF$JZt?r*_xO-BsTkrAq`U>&;7u_qW@S%&FmQdqv}cC1<C<y!>^`N!I={QFWXbj==HAVT@wQ$6@8WC=Tf%PMT&wL9>{y)Iv"
        rb">4?as~LXZ;<{}7Y-ad=ty3(fzPC`J#d{CwW~nlLU_z>kIVgMq+h#3fVs^^rC)1*Nd=Z^3X)M-0)C5vr|V9lFl3Cm38=hUsQfSib3YtXbscTLlRD$"
        rb"J(v@`%)`(%^q7ILiycOJ@_eP2|IwxDs11iJMhH4E?=q-K1*gokP{C75R>?Ecv<)h&Ht4sMh~g{YR1pQpZ^d6D*)_sQ>XpDu6!{XpSO)MZg8HbBVX"
        rb"(&%Z1UEn2LTXk@6>X_Zh$jm`#}d*ss-)55y%?`1O%CF$JZt?r*_xO-BsTkrAq`U>&;7u_qW@S%&FmQdqv}cC1<C<y!>^`N!I={QFWXbj==HAVT@w"
        rb"Q$6@8WC=Tf%PMT&wL9>{y)Iv>4?as~LXZ;<{}7Y-ad=ty3(fzPC`J#d{CwW~nlLU_z>kIVgMq+h#3fVs^^rC)1*Nd=Z^3X)M-0)C5vr|V9lFl3Cm"
        rb"38=hUsQfSib3YtXbscTLlRD$J(v@`%)`(%^q7ILiycOJ@_eP2|IwxDs11iJMhH4E?=q-K1*gokP{C75R>?Ecv<)h&Ht4sMh~g{eBS$-FfLZWkA?G"
        rb"tfxu<NB~cGQvY-DD0V@FPb5p1NzOH;R8lSg~F>Y|4rz2nND9eS>m6(ctDv|Ohb@v&-2AEBl{n)S7kPpNqQ~33fHZcXIu<mcca7{-H(UB3VtzaFx&"
        rb"ao#LTv>+cW>Q$b>2|DH<mFoh2>Hj_t^E5^D|F2sTOdOD-BUgIDP##dfXgau-?cmN#Jw(Gst-O(W<rn?4*w97_;Gky_zTVdl_*9Jsr-E2`<gH=R=|"
        rb"&i^MirFWyB>@`1O%CF$JZt?r*_xO-BsTkrAq`U>&;7u_qW@S%&FmQdqv}cC1<C<y!>^`N!I={QFWXbj==HAVT@wQ$6@8WC=Tf%PMT&wL9>{y)Iv>"
        rb"4?as~LXZ;<{}7Y-ad=ty3(fzPC`J#d{CwW~nlLU_z>kIVgMq+h#3fM=KeC_y5CJOy>~mA6{l2bzF&dw@jWKR;o~I*U>?q5H(Uq8rekzgjCw2E3zy"
        rb"_F2nElwV)sPRwB~$qIkv1^}rLgXA!EjAS4AGGhs;yuhy3VmD7+hI~>1I+`zUg+XS>)wg1qk`a+O7QiQY&=L9$O$n`Q1}J_$g!wJAlh7Y~Qsz@Wj0"
        rb"?U#bs2OJ+il6Au3nllXCXS@;Xh|CK0452^fo-us#`E>^&gh4X`fz-7cGQ~33fHZcXIu<mcca7{-H(UB3VtzaFx&ao#LTv>+cW>Q$b>2|DH<mFoh2"
        rb">Hj_t^E5^D|F2sTOdOD-BUgIDP##dfXgau-?cmN#Jw(Gst-O(W<rn?4*w97_;Gky_zTVdl_*9Jsr-E2`<gH=R=|&i^MirFWyB>>4?nVi2Mz!s0I+"
        rb"?2PBs~v)B6Myem2?RWO~#$(V+mpnq7=p%VmUJwgUhFGF+${jnh}>00Dy-;DCS#DJ1g=vBYQl0ssI200dcD"
    )
)
"""By FFCV 1.0.2, `write_mode="proportion"`: images (9, 8, 3), raw or JPEG, of 40 x the number + the column; labels."""


def test_what_ffcv_wrote(tmp_path: Path) -> None:
    (tmp_path / "set.beton").write_bytes(BETON)
    source = open_source("auto", tmp_path / "set.beton", ".")
    assert source.labels.tolist() == [0, 1, 2, 0]
    formats = [read_header(read_bytes(source, index)).format for index in range(4)]
    assert {*formats} == {"PNM", "JPEG"}
    for index, name in enumerate(formats):
        pixels = make_decoder().decode(source.read(index)).astype(int)
        wanted = np.broadcast_to(40 * index + np.arange(8)[None, :, None], (9, 8, 3))
        assert abs(pixels - wanted).max() <= (0 if name == "PNM" else 3)


@pytest.mark.parametrize("name", STORES)
def test_is_read_to_the_bit_trained_on_and_converted(name: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data, write = STORES[name]
    root = write(here / name, SPLITS)
    for split, (images, labels) in SPLITS.items():
        source = open_source("auto", root, split)
        assert type(source) is type(open_source(data, root, split))
        assert source.classes == CLASSES.get(name, ("0", "1", "2"))
        assert source.labels.tolist() == labels.tolist()
        assert [read_bytes(source, i) for i in range(len(source))] == [
            wanted(name, split, i) for i in range(len(images))
        ]
        source.verify_index()
    pixels = make_decoder().decode(open_source("auto", root).read(1))
    of = SPLITS["train"][0][1]
    np.testing.assert_array_equal(pixels, of[:, :, :1].repeat(3, 2) if name == "mnist" else of)
    if name not in ("npy", "files", "set2.zarr"):
        assert train(root, "epochs=1") == 0
        assert "there is no 'val', so 'test' is used" in capfd.readouterr().out
    assert main(["convert", f"data.root={root}", "to=memmap", f"out={here / 'packed'}"]) == 0
    assert open_source("memmap", here / "packed", "val").fingerprint() == source.fingerprint()


def test_without_a_validation_split(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_idx(here / "set", make_splits(train=16))
    assert train(root, "epochs=1") == 2
    assert "has no split 'val'; it has train: set data.train_split or data.val_split, or data.val=0.2" in " ".join(
        capsys.readouterr().err.split()
    )
    assert train(root, "epochs=1", "data.val=0.25") == 0
    np.savez(here / "whole.npz", x=SPLITS["train"][0], y=SPLITS["train"][1])
    assert train(here / "whole.npz", "epochs=1", "data.val=0.25") == 0


def test_arrays_beside_folders_of_images_are_not_the_dataset(photos: Path, tmp_path: Path) -> None:
    root = write_npy(tmp_path / "set", SPLITS)
    for split in ("train", "val"):
        (root / split).symlink_to(photos / split)
    assert type(open_source("auto", root)) is FolderSource


def save(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


IMAGES, LABELS = SPLITS["train"]


def test_names_that_are_given(tmp_path: Path) -> None:
    path = save(
        tmp_path / "set.npz", train_fine=LABELS, train_coarse=LABELS // 2, train_pictures=IMAGES, train_x=IMAGES[::-1]
    )
    several = f"{path} has several arrays that may be images, train_pictures, train_x: set data.image=NAME"
    with pytest.raises(DataError, match=line(several)):
        open_source("npz", path)
    source = open_source("npz", path, image="pictures", label="coarse", classes=["near", "far"])
    assert source.classes == ("near", "far")
    assert source.labels.tolist() == (LABELS // 2).tolist()
    assert read_bytes(source, 0).endswith(IMAGES[0].tobytes())


def test_targets_that_are_not_classes(tmp_path: Path) -> None:
    flags = np.eye(3, dtype=np.uint8)[LABELS]
    flags[0] = 1
    source = open_source("npz", save(tmp_path / "flags.npz", train_images=IMAGES, train_labels=flags))
    assert source.kind is Kind.flags
    np.testing.assert_array_equal(source.targets, flags)
    numbers = LABELS + 0.5
    source = open_source("npz", save(tmp_path / "numbers.npz", x_train=IMAGES, y_train=numbers))
    assert source.kind is Kind.numbers
    np.testing.assert_array_equal(source.targets[:, 0], numbers.astype(np.float32))


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[: -path.stat().st_size // 3])
    return path


def cut_gzip(root: Path) -> Path:
    file = cut(write_idx(root, SPLITS) / "train-images-idx3-ubyte.gz")
    return file.parent


def short_idx(root: Path) -> Path:
    file = write_idx(root, SPLITS) / "train-images-idx3-ubyte.gz"
    file.write_bytes(gzip.compress(gzip.decompress(file.read_bytes())[:-5]))
    return root


def pickled_zarr(root: Path) -> Path:
    """Its codec would run what is in the chunk."""
    group = zarr.open_group(str(root), mode="w", zarr_format=2)
    group.create_array("x_train", data=IMAGES)
    group.create_array("y_train", data=LABELS, compressors=None)
    meta = root / "y_train" / ".zarray"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "compressor": {"id": "pickle", "protocol": 5}}))
    (root / "y_train" / "0").write_bytes(pickle.dumps(_Bomb()))
    return root


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("unpickled",)


def elsewhere(root: Path) -> Path:
    with h5py.File(root, "w") as file:
        file["x_train"] = IMAGES
        file.create_dataset("y_train", data=LABELS, external=[(str(root) + ".raw", 0, 16)])
    return root


def negative(root: Path) -> Path:
    header = {"descr": "|u1", "fortran_order": False, "shape": (-16, 9, 8)}
    root.mkdir()
    with (root / "x_train.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
    np.save(root / "y_train.npy", LABELS)
    return root


def wide(root: Path) -> Path:
    """Labels that take no space in the file, and 16 TB of memory."""
    with h5py.File(root, "w") as file:
        file["x_train"] = IMAGES
        file.create_dataset("y_train", (16, 1 << 40), np.uint8, chunks=(1, 1 << 20))
    return root


BAD: dict[str, tuple[str, Callable[[Path], Path], str]] = {
    "floats": (
        "npz",
        lambda at: save(at / "a.npz", x_train=IMAGES / 255, y_train=LABELS),
        "{root}:x_train is float64, (16, 9, 8, 3); images are read as uint8 from 0 to 255: write them anew as uint8, "
        "e.g. (255 * images).round().astype('uint8') if they are from 0 to 1",
    ),
    "flat": (
        "npz",
        lambda at: save(at / "a.npz", x_train=IMAGES.reshape(16, -1), y_train=LABELS),
        "{root}:x_train is uint8, (16, 216); images are read of shape (N, H, W), (N, H, W, 3) or (N, 3, H, W): reshape "
        "them",
    ),
    "fewer labels": (
        "npz",
        lambda at: save(at / "a.npz", x_train=IMAGES, y_train=LABELS[1:]),
        "{root}:x_train has 16 images, {root}:y_train 15 labels; correct either",
    ),
    "no labels": (
        "npz",
        lambda at: save(at / "a.npz", x_train=IMAGES, other=LABELS),
        "{root} has no array that looks like labels; it has x_train, other: set data.label=NAME",
    ),
    "neither": (
        "npz",
        lambda at: save(at / "a.npz", a=IMAGES, b=LABELS),
        "{root} has no array that looks like images; it has a, b: set data.image=NAME",
    ),
    "a negative label": (
        "npz",
        lambda at: save(at / "a.npz", x_train=IMAGES, y_train=LABELS.astype(int) - 1),
        "{root}:y_train has the label -1; allowed are 0 to 1",
    ),
    "objects": (
        "npz",
        lambda at: save(at / "a.npz", x_train=IMAGES, y_train=LABELS.astype(object)),
        "{root}:y_train holds Python objects, which only unpickling reads, and that could run code: save it anew "
        "without dtype=object",
    ),
    "half an npz": ("npz", lambda at: cut(write_npz(at / "a.npz", SPLITS)), "{root} is damaged or cut short"),
    "half a gz": ("idx", lambda at: cut_gzip(at / "a"), "{root}/train-images-idx3-ubyte.gz is damaged or cut short: "),
    "a short idx": (
        "idx",
        lambda at: short_idx(at / "a"),
        "{root}/train-images-idx3-ubyte.gz is damaged or cut short: it ",
    ),
    "half an h5": ("hdf5", lambda at: cut(write_hdf5(at / "a.h5", SPLITS)), "{root} is damaged, or no HDF5 file: "),
    "half a beton": (
        "beton",
        lambda at: cut(write_beton(at / "a", SPLITS) / "train.beton").parent,
        "{root}/train.beton is damaged or cut short: ",
    ),
    "a pickle in zarr": (
        "zarr",
        lambda at: pickled_zarr(at / "a"),
        "{root}",
    ),
    "a negative shape": (
        "npz",
        lambda at: negative(at / "a"),
        "{root}/x_train.npy is damaged: its shape is (-16, 9, 8); get it again",
    ),
    "nothing": (
        "npz",
        lambda at: save(at / "a.npz", x_train=IMAGES[:0], y_train=LABELS[:0]),
        "{root}",
    ),
    "wide labels": (
        "hdf5",
        lambda at: wide(at / "a.h5"),
        "{root}:y_train is uint8, (16, 1099511627776), 17,592 GB of labels, more than the 17 that are read",
    ),
    "values elsewhere": (
        "hdf5",
        lambda at: elsewhere(at / "a.h5"),
        "{root}:y_train has its values in another file; copy them into this one",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_line(what: str, tmp_path: Path) -> None:
    data, make, message = BAD[what]
    root = make(tmp_path)
    with pytest.raises(EffLoopError) as caught:
        open_source(data, root)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(message.format(root=root))


def test_splits_that_are_missing_are_listed(tmp_path: Path) -> None:
    root = write_npz(tmp_path / "set.npz", SPLITS)
    listed = f"{root} has no split 'extra'; it has train, test: set data.train_split or data.val_split"
    with pytest.raises(NoSplitError, match=line(listed)):
        open_source("npz", root, "extra")
    assert find_split(open_source("npz", root).config, "val").where == f"{root}:test"
