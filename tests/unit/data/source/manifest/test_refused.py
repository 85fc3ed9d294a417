"""Tables that are refused, each in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from effloop.data.source import sources
from effloop.data.source.base import WHOLE
from effloop.data.source.manifest.layout import CsvConfig
from effloop.errors import ConfigError, DataError

REFUSED = [
    pytest.param("", {}, "t.csv is empty", id="empty"),
    pytest.param("path,label\n", {}, "t.csv has no rows", id="no-rows"),
    pytest.param("\0\1\2", {}, "t.csv is no text", id="binary"),
    pytest.param("[{}]", {}, "t.csv is one JSON list; one a line", id="json-list"),
    pytest.param("PAR1 and no more", {}, "t.csv is no parquet file", id="parquet"),
    pytest.param(
        "a,label\n0.jpg,b\n", {}, "no column of paths file_name, path, image have a, label data.image=", id="path"
    ),
    pytest.param("id,a,b\n0,x,y\n", {}, "no column of targets label, labels have id, a, b data.label=", id="target"),
    pytest.param("id,x\n0,a\n", {"label": "y"}, "data.label: no column 'y'; have id, x", id="named-target"),
    pytest.param("id,x\n0,a\n", {"image": "idd"}, "data.image: no column 'idd' did you mean 'id'?", id="named-path"),
    pytest.param("id,x\n0,a\n", {"split": "s"}, "data.split: no column 's'; have id, x", id="named-split"),
    pytest.param("id,x,x\n0,a,b\n", {}, "several columns 'x'; rename", id="columns-of-one-name"),
    pytest.param("id,label,x\n0,a,1\n1,b\n", {}, "line 3: 2 fields, where the first line has 3", id="few-fields"),
    pytest.param("id,label\n0,a\n1,b,c\n", {}, "line 3: 3 fields the first line has 2; quote", id="many-fields"),
    pytest.param('id,label\n0,a\n1,"b\n', {}, "line 3: unexpected end of data; correct its quotes", id="quotes"),
    pytest.param(f"id,label\n0,{'a' * 200_000}\n", {}, "line 2: field larger than field limit", id="huge-field"),
    pytest.param("id,label\n0,a\n,b\n", {}, "line 3: no path; write one", id="no-path"),
    pytest.param("id,label\n0,a\n1,\n", {}, "line 3: nothing in 'label', where a class should be", id="no-class"),
    pytest.param("id,label\n0,.5\n1,nan\n", {}, "line 3: 'nan' in 'label', where a number should be", id="nan"),
    pytest.param("id,label\n0,.5\n1,-inf\n", {}, "line 3: '-inf' in 'label', where a number should be", id="inf"),
    pytest.param("id,label\n0,.5\n1,1e39\n", {}, "line 3: inf for 'label'; allowed are finite", id="beyond-float32"),
    pytest.param("id,label\n0,.5\n1,\n", {}, "line 3: nothing in 'label', where a number should be", id="no-number"),
    pytest.param(
        "id,label\n0,3\n1,n/a\n", {}, "line 3: 'n/a' has numbers ('3', line 2) task=classification", id="mixed"
    ),
    pytest.param(
        "id,a,b\n0,1,0\n1,2,1\n", {"label": [*"ab"]}, "line 3: '2' in 'a' flags, 0 or 1 task=regression", id="flags"
    ),
    pytest.param(
        "id,a,b\n0,1,0\n1,1,1\n", {"targets": "classes"}, "line 3: 2 of a, b are 1 task=multilabel", id="one-hot"
    ),
    pytest.param('id,labels\n0,"[1"\n1,"[a]"\n', {}, "line 3: '[a]' is no JSON list", id="json"),
    pytest.param(
        'id,labels\n0,"[1.5]"\n', {}, "line 2: '[1.5]' is no JSON list of names or whole numbers", id="json-real"
    ),
    pytest.param(
        '{"id": 0, "label": [0, 1]}\n{"id": 1, "label": [0, 1, 1]}\n',
        {},
        "t.csv, line 2: '[0, 1, 1]' has the label '1' twice; flags a column each",
        id="flags-in-a-list",
    ),
    pytest.param("id,label\n0,a|b\n1,a| a\n", {}, "line 3: 'a| a' has the label 'a' twice", id="label-twice-in-a-row"),
    pytest.param('{"id": 0, "label": "a"}\n{"id": 1,\n', {}, "t.csv, line 2: no JSON", id="jsonl"),
    pytest.param(
        '{"id": 0, "label": "a"}\n3\n', {}, "t.csv, line 2: a JSON int; write an object a line", id="no-object"
    ),
    pytest.param(
        "id,label\n0,a\n1,b\n", {"classes": ["a"]}, "line 3: 'b' is not in data.classes; have a", id="no-such-class"
    ),
    pytest.param(
        "id,label\n0,.5\n", {"classes": ["a"]}, "data.classes: [a], but numbers have no classes", id="classes"
    ),
    pytest.param(
        "id,label\n0,a\n", {"targets": "numbers"}, "line 2: 'a' in 'label', where a number should be", id="no-numbers"
    ),
    pytest.param("id,label\n0,.5\n", {"targets": "flags"}, "line 2: '.5' a list of names should be", id="no-lists"),
    pytest.param(
        "id,label\n0,a\n9,a\n8,a\nx/7.png,a\n6,b\n",
        {},
        "4 of 5 images '9' (line 3), '8' (line 4), 'x/7.png' (line 5), …; set data=csv data.images=",
        id="missing",
    ),
    pytest.param("id,label\n0,a\n1,b\n./0.jpg,b\n", {}, "line 4: 0.jpg is in line 2 already", id="twice"),
    pytest.param(
        "id,label,split\n0,a,train\n1,a,val\n0.jpg,a,val\n",
        {},
        "line 4: 0.jpg is in line 2 already",
        id="in-both-splits",
    ),
    pytest.param("id,label,is_valid\n0,a,0\n1,b,2\n", {}, "line 3: '2' in the column 'is_valid' 0 1", id="is-valid"),
    pytest.param(
        '{"id": 0, "label": "a|b"}\n{"id": 1, "label": ["a", "b"]}\n',
        {"targets": "classes"},
        "line 2: '[\"a\", \"b\"]' in 'label' is a list, a class should be; set task=multilabel",
        id="list-as-a-class",
    ),
    pytest.param("id,label,split\n0,a,train\n1,b,\n", {}, "line 3: nothing in the column 'split'", id="no-split"),
    pytest.param(
        '{"id": {"bytes": "", "path": "0"}, "label": "a"}\n',
        {},
        "line 1: the parts bytes, path are no text data.image",
        id="struct",
    ),
    pytest.param(
        "id,label,split\n" + "".join(f"{i % 6},a,{i}\n" for i in range(2, 40)),
        {},
        "more than 32 different values in 'split' data.split=",
        id="splits",
    ),
    pytest.param("id,label\n0,a\n", {"images": "/nowhere"}, "data.images: '/nowhere' is no folder", id="images"),
    pytest.param("id,label\n0,a\n", {"val_root": "/nowhere"}, "data.val_root: '/nowhere' is no file", id="val-root"),
    pytest.param("id,label\n0,a\n", {"label": [[]]}, "data.label: [[]] set the name of a column", id="label"),
    pytest.param("id,label\n0,a\n", {"classes": []}, "data.classes: [] set [NAME,NAME], or null", id="no-classes"),
    pytest.param("id,label\n0,a\n", {"classes": ["a", "a"]}, "data.classes: 'a' comes twice", id="class-twice"),
    pytest.param("id,label\n0,a\n", {"label": ["a", "a"]}, "data.label: 'a' comes twice", id="label-twice"),
    pytest.param(
        "id,label\n0,a\n", {"targets": "boxes"}, "data.targets: 'boxes' set classes, flags, numbers", id="targets"
    ),
]


@pytest.mark.parametrize(("text", "options", "words"), REFUSED)
def test_what_is_refused(text: str, options: dict[str, Any], words: str, root: Path) -> None:
    (root / "t.csv").write_text(text)
    with pytest.raises((ConfigError, DataError)) as caught:
        sources.build(CsvConfig(name="csv", root=str(root / "t.csv"), **options), WHOLE)
    message = str(caught.value)
    assert "\n" not in message
    at = 0
    for word in words.split(" "):
        assert word in message[at:], f"{word!r} of {words!r} in {message!r}"
        at = message.index(word, at)
